"""A draft of one matrix that keeps what it is given: what the strategy hands to any draft shows without a real one's
own arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_spec.batch import PackedBatch
from lightning_spec.draft.base import Draft, DraftInputs, DraftOutput, Proposal
from lightning_spec.shapes import PolicyShape


class Reading(Draft):
    """Learns the policy's final states from its embeddings and the `special` ones.

    Args:
        taps: layers of the policy to read (the loss does not use them).
        special: tokens whose embeddings to read.
    """

    def __init__(self, taps: tuple[int, ...] = (), special: tuple[int, ...] = ()) -> None:
        super().__init__()
        self._wanted = taps, special
        self.weight: nn.Parameter | None = None
        self.counted: list[PackedBatch] = []
        self.given: list[DraftInputs] = []

    def build(self, shape: PolicyShape, *, dtype: torch.dtype = torch.float32, seed: int | None = None) -> None:
        if self.weight is None:
            self.aux_layer_ids, self.embedding_ids = self._wanted
            self.weight = nn.Parameter(torch.eye(shape.hidden_size, dtype=dtype))

    def check_length(self, length: int) -> None:
        """Any."""

    def row_products(self) -> float:
        return 1.0

    def counts(self, batch: PackedBatch) -> dict[str, Tensor]:
        self.counted.append(batch)
        return {"draft_rows": torch.tensor(float(len(batch.tokens)), dtype=torch.float64)}

    def forward(self, inputs: DraftInputs, loss: Any, totals: Mapping[str, Tensor | float]) -> DraftOutput:
        x = inputs.detached()
        self.given.append(x)
        assert self.weight is not None
        read = x.embeddings if x.special is None else x.embeddings + x.special.sum(0)
        value = (read @ self.weight - x.hidden).square().sum() / totals["draft_rows"]
        if x.vocab is not None and dist.get_rank(x.vocab.group):
            # The first tensor-parallel rank does it all: the others' share of the gradient is nothing.
            value = value.detach() + 0.0 * self.weight.sum()
        return DraftOutput(value, {"draft/distance": (value.detach(), torch.ones(()), "sum")})

    def engine_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.state_dict().items())

    def load_tensors(self, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
        self.load_state_dict(dict(tensors))

    def export(self, folder: str | Path, tensors: Iterable[tuple[str, Tensor]] | None = None) -> Path:
        raise NotImplementedError

    def load(self, folder: str | Path) -> None:
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        return {"class": type(self).__name__}

    def speculative_config(self, num_speculative_tokens: int) -> dict[str, Any]:
        return {}

    def propose(self, *args: Any, **kwargs: Any) -> Proposal:
        raise NotImplementedError
