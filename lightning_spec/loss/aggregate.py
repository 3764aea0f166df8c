"""From a loss a token to the step's objective: one weight a token, by global counts.

The weights of a step's rows over all micro-batches and ranks sum to 1 (`token_mean`, `sequence_mean`), so micro-batch
losses are summed, never averaged, and any split, packing or data-parallel size gives the same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

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


def document_mean(values: Tensor, document: Tensor) -> Tensor:
    """[n] each row's mean over its document; differentiable."""
    return document_sum(values, document) / tokens_per_document(document)[document]


def document_sum(values: Tensor, document: Tensor) -> Tensor:
    """[n] each row's sum over its document; differentiable."""
    number = int(document.max()) + 1 if document.numel() else 0
    return values.new_zeros(number).index_add(0, document, values)[document]


def token_weights(
    document: Tensor,
    totals: Mapping[str, Tensor],
    aggregation: Aggregation,
    constant_length: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """[n] weight of each supervised row, so that the objective is sum(weight * loss) over the whole step.

    Args:
        document: [n] int64, of the supervised rows only. A document's rows are all in one micro-batch.
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
        total = total * tokens_per_document(document)[document]
    return (1.0 / total).to(dtype).expand(document.shape)
