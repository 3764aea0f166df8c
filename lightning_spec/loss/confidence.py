"""The draft's own estimate of its acceptance: its loss, and how well it is calibrated."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from lightning_spec.loss.chunks import exact_math, math_dtype

BINS = 10
"""Bins of equal width that the calibration error is measured over."""


def confidence_loss(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """sum_r weight[r] * binary cross-entropy(sigmoid(logits[r]), target[r]); scalar, at least float32.

    The gradient reaches `logits` only. Rows of weight 0 are not read.

    Args:
        logits: [R].
        target: [R], the chance of acceptance sum_v min(p, q); clamped to [0, 1], which rounding may leave.
        weight: [R], with the global normaliser inside.
    """
    rows = (weight != 0).nonzero().squeeze(1)
    dtype = math_dtype(logits)
    with exact_math(logits.device):
        return functional.binary_cross_entropy_with_logits(
            logits[rows].to(dtype),
            target.detach()[rows].to(dtype).clamp(0.0, 1.0),
            weight.detach()[rows].to(dtype),
            reduction="sum",
        )


def calibration(confidence: Tensor, target: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Sums over the `valid` rows from which calibration is measured: they add up over micro-batches and ranks.

    Args:
        confidence: [R], probabilities.  target: [R], the chance of acceptance.  valid: [R] bool.

    Returns:
        float64. rows: scalar; brier: scalar, of (confidence - target)^2; bin_rows, bin_confidence, bin_target: [BINS],
        rows and sums of each bin of confidence.
    """
    c, t = (values.detach()[valid].to(torch.float64).clamp(0.0, 1.0) for values in (confidence, target))
    bins = (c * BINS).to(torch.int64).clamp(max=BINS - 1)

    def by_bin(values: Tensor) -> Tensor:
        return values.new_zeros(BINS).index_add_(0, bins, values)

    return {
        "rows": valid.sum(dtype=torch.float64),
        "brier": (c - t).square().sum(),
        "bin_rows": by_bin(torch.ones_like(c)),
        "bin_confidence": by_bin(c),
        "bin_target": by_bin(t),
    }


def calibration_error(sums: Mapping[str, Tensor]) -> Tensor:
    """Expected calibration error (arXiv 1706.04599) of summed `calibration`s: the mean over rows of the distance
    between mean confidence and mean target of the row's bin; float64 scalar, 0 without rows."""
    return (sums["bin_confidence"] - sums["bin_target"]).abs().sum() / sums["rows"].clamp(min=1)
