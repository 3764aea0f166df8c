"""Bookkeeping of a draft's passes: its metrics, and the loss of a micro-batch without any valid row."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_spec.draft.base import DraftMetrics


class Tally:
    """Means over rows of each pass: its loss, top-1 agreement, sum_v min(p, q), and the share of rows on which this and
    every earlier pass agreed, i.e. the engine's greedy acceptance at position i (exact for greedy rollouts).

    Args:
        passes: number of passes.
        factor: what one row counts for (more than 1 where rows are sampled).
    """

    def __init__(self, passes: int, factor: float, device: torch.device) -> None:
        self.factor = factor
        self.sums = torch.zeros(passes, 6, dtype=torch.float64, device=device)

    def add(
        self, counts: list[int], rows: Tensor, size: int, each: Tensor, valid: Tensor, agree: Tensor, alpha: Tensor
    ) -> None:
        """Rows of all passes of some anchors, pass by pass.

        Args:
            counts: rows of each pass; they sum to R.
            rows: int64 [R], index of the row's anchor, below `size`.
            each, valid, agree, alpha: [R], of `DraftLossOutput`.
        """
        accepted = torch.ones(size, dtype=torch.bool, device=rows.device)
        first = 0
        for i, count in enumerate(counts):
            part = slice(first, first + count)
            first += count
            accepted[rows[part]] &= agree[part]
            sums = (each[part], valid[part], agree[part], alpha[part], accepted[rows[part]])
            self.sums[i, :5] += torch.stack([x.sum(dtype=torch.float64) for x in sums])
            self.sums[i, 5] += count

    def metrics(self) -> DraftMetrics:
        found: DraftMetrics = {}
        for i, (loss, scored, agree, alpha, accept, rows) in enumerate((self.sums * self.factor).unbind(0)):
            found[f"draft/loss_{i}"] = (loss, scored, "mean")
            found[f"draft/agree_{i}"] = (agree, rows, "mean")
            found[f"draft/alpha_{i}"] = (alpha, rows, "mean")
            found[f"draft/accept_{i}"] = (accept, rows, "mean")
        return found


def nothing(parameters: Iterable[nn.Parameter], like: Tensor) -> Tensor:
    """A zero that every parameter is part of, with zero gradients: on a rank without valid rows the gradient hooks of
    data parallelism still fire. Sums of nothing, not products with 0, which would turn an infinity into NaN."""
    zero = like.new_zeros((), dtype=torch.float32)
    for parameter in parameters:
        if parameter.requires_grad:
            zero = zero + parameter.reshape(-1)[:0].sum().to(zero.dtype)
    return zero
