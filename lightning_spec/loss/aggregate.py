"""From a loss a token to the step's objective: one weight a token, by global counts.

The weights of a step's rows over all micro-batches and ranks sum to 1 (`token_mean`, `sequence_mean`), so micro-batch
losses are summed, never averaged, and any split, packing or data-parallel size gives the same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
"""token_mean: mean over the step's tokens (DAPO, arXiv 2503.14476).  sequence_mean: mean over sequences of each one's
token mean (GRPO, 2402.03300).  constant: sum over tokens / (sequences * constant_length) (Dr. GRPO, 2503.20783)."""


def loss_counts(loss_mask: Tensor, document: Tensor) -> dict[str, Tensor]:
    """Sums of one micro-batch that become the step's normalisers.

    Args:
        loss_mask: [T] bool.  document: [T] int64, index of the row's document in this micro-batch.

    Returns:
        tokens: rows in the mask; sequences: documents with at least one such row. float64 scalars.
    """
    return {
        "tokens": loss_mask.sum(dtype=torch.float64),
        "sequences": (tokens_per_document(document[loss_mask]) > 0).sum(dtype=torch.float64),
    }


def tokens_per_document(document: Tensor) -> Tensor:
    """[D] int64, rows of each document 0..D-1 among those given; documents without rows count 0."""
    return torch.bincount(document)


@dataclass(frozen=True, slots=True)
class Split:
    """What a rank knows of documents whose rows are split over several ranks (context parallelism).

    Sums over a document's rows are then collectives: every rank of the group makes them, forward and backward, in the
    same order and also where it holds no row.
    """

    tokens: Tensor
    """int64 [D], supervised rows of each document on all ranks together."""
    group: dist.ProcessGroup

    @classmethod
    def of(cls, loss_mask: Tensor, document: Tensor, group: dist.ProcessGroup, documents: int) -> Split:
        """From the whole micro-batch's loss_mask [T] and document [T], and its number of documents."""
        return cls(torch.bincount(document[loss_mask], minlength=documents), group)


def document_mean(values: Tensor, document: Tensor, split: Split | None = None) -> Tensor:
    """[n] each row's mean over its document; differentiable."""
    return document_sum(values, document, split) / _tokens(document, split)


def document_sum(values: Tensor, document: Tensor, split: Split | None = None) -> Tensor:
    """[n] each row's sum over its document; differentiable."""
    if split is not None:
        mine = values.new_zeros(split.tokens.numel()).index_add(0, document, values)
        return _SumOverRanks.apply(mine, split.group)[document]
    number = int(document.max()) + 1 if document.numel() else 0
    return values.new_zeros(number).index_add(0, document, values)[document]


def _tokens(document: Tensor, split: Split | None) -> Tensor:
    """[n] supervised rows of each row's document."""
    counts = tokens_per_document(document) if split is None else split.tokens
    return counts[document]


class _SumOverRanks(torch.autograd.Function):
    """Every rank gets the sum of all ranks' values. Losses are summed over ranks, so gradients are too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def token_weights(
    document: Tensor,
    totals: Mapping[str, Tensor],
    aggregation: Aggregation,
    constant_length: int | None,
    dtype: torch.dtype,
    split: Split | None = None,
) -> Tensor:
    """[n] weight of each supervised row, so that the objective is sum(weight * loss) over the whole step.

    Args:
        document: [n] int64, of the supervised rows only. A document's rows are all in one micro-batch.
        split: None where all of them are on this rank.
        totals: `loss_counts` summed over the step's micro-batches and the ranks that split data.
    """
    if aggregation == "token_mean":
        total = totals["tokens"]
    elif aggregation == "sequence_mean":
        total = totals["sequences"]
    else:
        assert constant_length is not None
        total = totals["sequences"] * constant_length
    total = total.to(document.device, torch.float64).clamp(min=1)
    if aggregation == "sequence_mean":
        total = total * _tokens(document, split)
    return (1.0 / total).to(dtype).expand(document.shape)
