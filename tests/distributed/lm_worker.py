"""One rank of test_draft_model_parallel.py: `python lm_worker.py OUT`, with LOCAL_RANK and WORLD_SIZE given.

Every rank builds the same draft and the same packed micro-batch. The two ranks are first a context-parallel group, with
their rows, then a tensor-parallel one, with their parts of the vocabulary. Loss, metrics and gradients are compared
with one rank's plain run.
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
from one_rank import columns_of, compare, rows_of

from lightning_spec.draft import DraftInputs, DraftModel
from lightning_spec.errors import ConfigError
from lightning_spec.loss.draft import LK, SoftCrossEntropy


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


def check(name: str) -> None:
    example = EXAMPLES[name]
    wide, draft = build(example, torch.float64), build(example, example.dtype)
    x64, x = make(example, torch.float64), make(example, example.dtype)
    error = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.05}[example.dtype]
    compare(name, wide, draft, x64, x, example.loss(), ("ring", "ulysses"), error)


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
        check(name)
    refuse()
    assert torch.equal(state, torch.get_rng_state()), "the global random state was touched"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
