"""One rank of test_draft_context_parallel.py: `python draft_worker.py OUT`, with LOCAL_RANK and WORLD_SIZE given.

Every rank builds the same draft and the same packed micro-batch, takes its rows, and compares the sums over ranks of
loss, metrics and every parameter gradient with one rank's plain run (all rows at once).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "draft"))

from conftest import _inputs, _shape
from one_rank import measure, split

from lightning_spec.attention.context import Context
from lightning_spec.draft import MTP, DraftInputs, Eagle3, VocabMap
from lightning_spec.draft.chained import ChainedDraft
from lightning_spec.errors import ConfigError
from lightning_spec.loss.draft import LK, SoftCrossEntropy

MODES = ("stream", "ring", "ulysses")


@dataclass(frozen=True)
class Example:
    lengths: Sequence[int]
    options: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    """Only tokens from this global row on are sampled."""
    loss: type = SoftCrossEntropy
    dtype: torch.dtype = torch.float64
    modes: Sequence[str] = MODES
    seed: int = 0
    mtp: bool = False


# Heads are multiples of 4, so that ulysses divides them.
MHA = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 4}
EXAMPLES = {
    "packed": Example([13, 1, 6, 2, 9], {"num_passes": 3, "chunk_rows": 3}),
    "seven passes, one kv head": Example([21], {"num_passes": 7, "num_kv_heads": 1, "head_dim": 6}, modes=MODES[:2]),
    "one row a document, ranks without rows": Example([1, 2, 1, 1], {"num_passes": 3}),
    "one token": Example([1], {"num_passes": 2}),
    "nothing sampled": Example([9, 4], {"num_passes": 2}, first=99),
    "loss on the last quarter": Example([24], {"num_passes": 4, "chunk_rows": 2}, first=18),
    "loss on the last row": Example([17], {"num_passes": 4}, first=16),
    "many rows end": Example([2] * 7 + [3] * 5 + [11], {"num_passes": 5, "chunk_rows": 4}),
    "own head and embedding, detached": Example(
        [12, 5], {"num_passes": 3, "own_head": True, "own_embedding": True, "recycle": "detach", "chunk_rows": 2}
    ),
    "reduced vocabulary": Example([11, 7], {"num_passes": 3, "draft_vocab_size": 5}, loss=LK),
    "two layers": Example([10, 3, 8], {"num_passes": 3, "num_layers": 2, "chunk_rows": 3}),
    "three layers, all norms, owned": Example(
        [14, 2],
        {
            "num_passes": 4,
            "num_layers": 3,
            "own_embedding": True,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "fc_norm": True,
            "norm_output": True,
            "pass_weights": [1.0, 0.5, 0.0, 0.2],
        },
    ),
    "sampled rows": Example([15, 9], {"num_passes": 3, "rows_per_step": 7, "chunk_rows": 2}, seed=5),
    "sampled rows, two layers": Example([15, 9], {"num_passes": 2, "rows_per_step": 3, "num_layers": 2}, seed=6),
    "mtp": Example([13, 1, 6, 2, 9], {"num_passes": 3, "num_kv_heads": 4, "chunk_rows": 3}, mtp=True),
    "mtp, loss on the last quarter, float32": Example(
        [24], {"num_passes": 4, "num_kv_heads": 4, "chunk_rows": 2}, first=18, dtype=torch.float32, mtp=True
    ),
    "float32": Example([13, 6, 9], {"num_passes": 4, "chunk_rows": 3}, dtype=torch.float32),
    "float32, two layers": Example([19, 5], {"num_passes": 3, "num_layers": 2}, dtype=torch.float32),
}


def build(example: Example, dtype: torch.dtype) -> ChainedDraft:
    if example.mtp:
        head = MTP(**example.options)
        head.build(_shape(), dtype=dtype, seed=3)
        return head
    draft = Eagle3(**(MHA | example.options))
    if "draft_vocab_size" in example.options:
        draft.use_vocab_map(VocabMap(torch.tensor([1, 4, 5, 11, 22][: example.options["draft_vocab_size"]]), 23))
    draft.build(_shape(), dtype=dtype, seed=3)
    return draft


def make(example: Example, dtype: torch.dtype) -> DraftInputs:
    total = sum(example.lengths)
    sampled = (torch.arange(total) >= example.first).tolist()
    stop = [n % 11 == 10 for n in range(total)]
    x = _inputs(example.lengths, sampled=sampled, stop=stop, dtype=dtype, seed=1)
    return replace(x, seed=example.seed)


def compare(name: str, context: Context) -> None:
    example = EXAMPLES[name]
    wide, draft = build(example, torch.float64), build(example, example.dtype)
    x64, x = make(example, torch.float64), make(example, example.dtype)
    totals = wide.counts(x64)  # type: ignore[arg-type]
    totals = {key: value + 2.0 for key, value in totals.items()}  # other micro-batches of the step have rows, too
    with torch.no_grad():
        for a, b in zip(wide.parameters(), draft.parameters(), strict=True):
            a.copy_(b)
    wide.set_attention("ring")
    want_sums, want_grads = measure(wide, x64, totals, example.loss())
    want = want_sums | want_grads
    tolerance = 1e-10 if example.dtype == torch.float64 else 1e-5
    state = torch.get_rng_state()
    for mode in example.modes:
        draft.set_attention(mode)  # type: ignore[arg-type]
        sums, grads = measure(draft, split(x, context), totals, example.loss())
        assert sums.keys() | grads.keys() == want.keys()
        for key, value in (sums | grads).items():
            dist.all_reduce(value)
            scale = max(1.0, float(want[key].abs().max()))
            error = float((value - want[key]).abs().max()) / scale
            assert error < tolerance, f"{name}, {mode}, CP {context.size}: {key} is off by {error}"
    assert torch.equal(state, torch.get_rng_state()), "the global random state was touched"


def refuse(context: Context) -> None:
    """Heads that do not divide: every rank refuses before any message."""
    example = EXAMPLES["seven passes, one kv head"]
    draft, x = build(example, torch.float64), make(example, torch.float64)
    draft.set_attention("ulysses")
    with pytest.raises(ConfigError, match=r"draft_attention"):
        draft(split(x, context), SoftCrossEntropy(), draft.counts(x))  # type: ignore[arg-type]


def main() -> None:
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    context = Context.of(dist.group.WORLD)
    for name in EXAMPLES:
        compare(name, context)
        if context.rank == 0:
            print("done", name, flush=True)
    refuse(context)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
