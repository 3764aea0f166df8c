"""One rank of test_block_draft_parallel.py: `python block_draft_worker.py OUT`, with LOCAL_RANK and WORLD_SIZE given.

Every rank builds the same draft and the same packed micro-batch. The two ranks are first a context-parallel group, each
with its rows, then a tensor-parallel one, each with its part of the vocabulary. Loss, metrics and gradients are
compared with one rank's plain run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_spec.draft import DraftInputs
from lightning_spec.draft.block import BlockDraft
from lightning_spec.loss.draft import DraftLoss, HardCrossEntropy, SoftCrossEntropy, TotalVariation, Weighted
from lightning_spec.loss.position import DPACE
from tests.distributed.one_rank import columns_of, compare
from tests.draft.conftest import _inputs, _shape
from tests.draft.test_block_dense import build

PUBLISHED = Weighted([HardCrossEntropy(), TotalVariation()], [0.1, 0.9])


@dataclass(frozen=True)
class Example:
    kind: str
    lengths: Sequence[int]
    options: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    """Only tokens from this global row on are sampled."""
    loss: DraftLoss = field(default_factory=SoftCrossEntropy)
    dtype: torch.dtype = torch.float64
    frozen: str = ""


EXAMPLES = {
    "packed": Example("dflash", [13, 1, 6, 2, 9]),
    "packed, markov and confidence": Example("dspark", [13, 1, 6, 2, 9], loss=PUBLISHED),
    "chunks": Example("dspark", [13, 1, 6, 2, 9], {"token_budget": 9, "num_layers": 2}, loss=PUBLISHED),
    "one anchor a chunk": Example("dflash", [9, 4], {"token_budget": 1}),
    "windows, causal": Example("dflash", [21, 8], {"sliding_window": 5, "causal": True, "num_layers": 3}),
    "window shorter than a block": Example("dspark", [15, 6], {"sliding_window": 2}),
    "dynamic weights": Example("dspark", [12, 9], {"slot_weights": DPACE(), "token_budget": 13}),
    "dynamic weights of overlap": Example("dflash", [12, 9], {"slot_weights": DPACE("accept")}),
    "drawn anchors": Example("dflash", [18, 11, 5], {"anchors_per_sequence": 3}),
    "one anchor, so a rank without": Example("dspark", [17], first=15),
    "one anchor of few in a long trunk": Example("dflash", [40], {"anchors_per_sequence": 1, "num_layers": 2}),
    "one row a document, ranks without rows": Example("dspark", [1, 2, 1, 3, 1]),
    "one token": Example("dflash", [1]),
    "nothing sampled": Example("dspark", [9, 4], first=99),
    "trunk is frozen": Example("dspark", [9, 5], frozen="fc"),
    "heads are frozen": Example("dspark", [9, 5], frozen="markov_head"),
    "float32": Example("dspark", [13, 6, 9], {"num_layers": 2}, loss=PUBLISHED, dtype=torch.float32),
}


def make(example: Example, dtype: torch.dtype) -> DraftInputs:
    total = sum(example.lengths)
    sampled = [n >= example.first for n in range(total)]
    stop = [n % 11 == 10 for n in range(total)]
    x = _inputs(example.lengths, sampled=sampled, stop=stop, dtype=dtype, seed=1)
    assert x.policy_embedding is not None
    mask = x.policy_embedding[20:21]
    return replace(x, special=mask, policy_embedding=None, document_seeds=[7 + n for n in range(len(x.lengths))])


def build_example(example: Example, dtype: torch.dtype) -> BlockDraft:
    draft = build(example.kind, example.options, _shape(), dtype)
    for name, parameter in draft.named_parameters():
        parameter.requires_grad_(not (example.frozen and name.startswith(example.frozen)))
    return draft


def check(name: str) -> None:
    example = EXAMPLES[name]
    wide, draft = build_example(example, torch.float64), build_example(example, example.dtype)
    x64, x = make(example, torch.float64), make(example, example.dtype)
    error = {torch.float64: 1e-10, torch.float32: 1e-4}[example.dtype]
    compare(name, wide, draft, x64, x, example.loss, ("stream", "ring"), error)


def refuse() -> None:
    """A head of another part is refused before any message."""
    draft, x = build_example(EXAMPLES["packed"], torch.float64), make(EXAMPLES["packed"], torch.float64)
    with pytest.raises(ValueError, match="policy_head has 23 rows"):
        draft(replace(columns_of(x), policy_head=x.policy_head), SoftCrossEntropy(), draft.counts(x))  # type: ignore[arg-type]


def main() -> None:
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    for name in EXAMPLES:
        check(name)
        if dist.get_rank() == 0:
            print("done", name, flush=True)
    refuse()
    assert torch.equal(state, torch.get_rng_state()), "the global random state was touched"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
