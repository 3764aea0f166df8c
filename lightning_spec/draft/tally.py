"""Bookkeeping of a draft's passes: its metrics, and the loss of a micro-batch without any valid row."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, float32, nn

from lightning_spec.draft.base import DraftMetrics


def add_pass(
    metrics: DraftMetrics,
    i: int,
    loss: Tensor,
    scored: Tensor,
    agree: Tensor,
    alpha: Tensor,
    accept: Tensor,
    rows: Tensor,
) -> None:
    """Means over rows of pass i: its loss, top-1 agreement, sum_v min(p, q), and the share of rows on which this and
    every earlier pass agreed, i.e. the engine's greedy acceptance at position i (exact for greedy rollouts).

    Args:
        loss: sum of the rows' losses. scored: rows in it (a loss may drop some).
        agree, alpha, accept: sums over all `rows` valid rows.
    """
    metrics[f"draft/loss_{i}"] = (loss, scored, "mean")
    metrics[f"draft/agree_{i}"] = (agree, rows, "mean")
    metrics[f"draft/alpha_{i}"] = (alpha, rows, "mean")
    metrics[f"draft/accept_{i}"] = (accept, rows, "mean")


def nothing(parameters: Iterable[nn.Parameter], like: Tensor) -> Tensor:
    """A zero that every parameter is part of, with zero gradients: on a rank without valid rows the gradient hooks of
    data parallelism still fire. Sums of nothing, not products with 0, which would turn an infinity into NaN."""
    zero = like.new_zeros((), dtype=float32)
    for parameter in parameters:
        if parameter.requires_grad:
            zero = zero + parameter.reshape(-1)[:0].sum().to(zero.dtype)
    return zero
