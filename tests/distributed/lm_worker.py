"""One rank of test_draft_model_parallel.py: `python lm_worker.py OUT`, with LOCAL_RANK and WORLD_SIZE given.

Every rank builds the same draft and the same packed micro-batch. The two ranks are first a context-parallel group, with
their rows, then a tensor-parallel one, with their parts of the vocabulary. Loss, metrics and gradients are compared
with one rank's plain run: sums over ranks, but for loss and metrics of tensor parallelism, which are whole on each.
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

from lightning_spec.attention.context import Context
from lightning_spec.attention.zigzag import Shard, Zigzag
from lightning_spec.draft import DraftInputs, DraftModel
from lightning_spec.errors import ConfigError
from lightning_spec.loss.draft import LK, SoftCrossEntropy
from lightning_spec.loss.vocab import VocabShard


@dataclass(frozen=True)
class Example:
    lengths: Sequence[int]
    options: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    """Only tokens from this global row on are sampled."""
    loss: type = SoftCrossEntropy
    dtype: torch.dtype = torch.float64
    frozen: str = ""


SMALL = {"num_kv_heads": 4, "head_dim": 4, "num_layers": 2, "intermediate_size": 12, "num_proposals": 3}
EXAMPLES = {
    "packed": Example([13, 1, 6, 2, 9]),
    "packed, tied": Example([13, 1, 6, 2, 9], {"tie_embeddings": True, "hidden_size": 12, "recompute": False}),
    "qwen2": Example([12, 5], {"model_type": "qwen2", "num_layers": 3}, loss=LK),
    "qwen3, two kv heads": Example([21], {"model_type": "qwen3", "num_kv_heads": 2, "num_proposals": 7}),
    "one row a document, ranks without rows": Example([1, 2, 1, 1]),
    "one token": Example([1]),
    "nothing sampled": Example([9, 4], first=99),
    "loss on the last row": Example([17], first=16),
    "one layer": Example([10, 3, 8], {"num_layers": 1}),
    "head alone is trained": Example([9, 5], frozen="model."),
    "layers alone are trained": Example([9, 5], frozen="lm_head."),
    "float32": Example([13, 6, 9], dtype=torch.float32),
    "bfloat16": Example([13, 6, 9], dtype=torch.bfloat16),
}


def build(example: Example, dtype: torch.dtype) -> DraftModel:
    draft = DraftModel(**(SMALL | example.options))
    draft.build(_shape(), dtype=dtype, seed=3)
    for name, parameter in draft.named_parameters():
        parameter.requires_grad_(not (example.frozen and name.startswith(example.frozen)))
    return draft


def make(example: Example, dtype: torch.dtype) -> DraftInputs:
    total = sum(example.lengths)
    sampled = (torch.arange(total) >= example.first).tolist()
    stop = [n % 11 == 10 for n in range(total)]
    x = _inputs(example.lengths, sampled=sampled, stop=stop, dtype=dtype, seed=1)
    return replace(x, features=x.features[:, :0])


def rows_of(x: DraftInputs) -> DraftInputs:
    context = Context.of(dist.group.WORLD)
    shard = Shard(Zigzag(tuple(x.lengths), context.size), context)
    names = ("features", "embeddings", "hidden")
    return replace(x, shard=shard, **{name: getattr(x, name)[shard.rows] for name in names})


def columns_of(x: DraftInputs) -> DraftInputs:
    assert dist.group.WORLD is not None
    vocab = VocabShard.split(x.policy_head.shape[0], dist.group.WORLD)
    return replace(x, policy_head=x.policy_head[vocab.start : vocab.stop], policy_embedding=None, vocab=vocab)


def measure(draft: DraftModel, x: DraftInputs, totals: Any, loss: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(loss and metric sums, gradients), by name."""
    draft.zero_grad(set_to_none=True)
    out = draft(x, loss, totals)
    with torch.no_grad():
        quiet = draft(x, loss, totals)
    (out.loss * 2.0).backward()
    sums = {"loss": out.loss.detach().double(), "loss without grad": quiet.loss.detach().double()}
    for name, (num, den, _) in out.metrics.items():
        sums[name] = torch.stack([num.double(), den.double()])
    grads = {}
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} got no gradient"
            grads[name] = parameter.grad.double() / 2.0
    return sums, grads


def compare(name: str) -> None:
    example = EXAMPLES[name]
    wide, draft = build(example, torch.float64), build(example, example.dtype)
    x64, x = make(example, torch.float64), make(example, example.dtype)
    totals = {key: value + 2.0 for key, value in wide.counts(x64).items()}  # type: ignore[arg-type]
    with torch.no_grad():
        for a, b in zip(wide.parameters(), draft.parameters(), strict=True):
            a.copy_(b)
    want_sums, want_grads = measure(wide, x64, totals, example.loss())
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.05}[example.dtype]
    for layout in ("ring", "ulysses", "tensor"):
        draft.set_attention("auto" if layout == "tensor" else layout)  # type: ignore[arg-type]
        part = columns_of(x) if layout == "tensor" else rows_of(x)
        sums, grads = measure(draft, part, totals, example.loss())
        for found, want in ((sums, want_sums), (grads, want_grads)):
            assert found.keys() == want.keys()
            for key, value in found.items():
                if layout != "tensor" or found is grads:
                    dist.all_reduce(value)
                scale = max(1.0, float(want[key].abs().max()))
                error = float((value - want[key]).abs().max()) / scale
                assert error < tolerance, f"{name}, {layout}: {key} is off by {error}"


def refuse() -> None:
    """Heads that do not divide, a head of another part, a mode that a language model has not: before any message."""
    example = Example([9], {"num_heads": 3, "num_kv_heads": 3, "head_dim": 4})
    draft, x = build(example, torch.float64), make(example, torch.float64)
    draft.set_attention("ulysses")
    with pytest.raises(ConfigError, match="draft_attention"):
        draft(rows_of(x), SoftCrossEntropy(), draft.counts(x))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot stream"):
        draft.set_attention("stream")
    with pytest.raises(ValueError, match="policy_head has 23 rows"):
        draft(replace(columns_of(x), policy_head=x.policy_head), SoftCrossEntropy(), draft.counts(x))  # type: ignore[arg-type]


def main() -> None:
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    for name in EXAMPLES:
        compare(name)
    refuse()
    assert torch.equal(state, torch.get_rng_state()), "the global random state was touched"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
