"""The confidence head's loss and calibration."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spec.loss import calibration, calibration_error, confidence_loss


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 9), seed=st.integers(0, 1 << 16))
def test_loss_and_gradient_are_those_of_the_formula(rows: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logits, target, weight = (torch.randn(rows, generator=g, dtype=torch.float64) for _ in range(3))
    target, weight = target.sigmoid(), weight.abs() * (torch.rand(rows, generator=g) < 0.7)
    for tensor in (logits, target, weight):
        tensor.requires_grad_()
    loss = confidence_loss(logits, target, weight)
    loss.backward()
    c = logits.detach().sigmoid()
    want = -(weight * (target * c.log() + (1 - target) * (1 - c).log())).sum()
    torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-10)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, (weight * (c - target)).detach(), rtol=1e-10, atol=1e-10)
    assert target.grad is None
    assert weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_extreme_logits_and_targets_beyond_0_and_1_stay_finite(dtype: torch.dtype) -> None:
    logits = torch.tensor([1e4, -1e4, 1e4, -1e4], dtype=dtype, requires_grad=True)
    target = torch.tensor([1.0 + 1e-6, -1e-6, 0.0, 1.0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = confidence_loss(logits, target, torch.ones(4))
    loss.backward()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.item() == 2 * float(logits[0].item())
    assert logits.grad is not None
    assert logits.grad.tolist() == [0.0, 0.0, 1.0, -1.0]


def test_rows_of_weight_0_may_hold_anything() -> None:
    logits = torch.tensor([0.0, math.nan, math.inf], requires_grad=True)
    loss = confidence_loss(logits, torch.tensor([1.0, 0.5, math.nan]), torch.tensor([1.0, 0.0, 0.0]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert logits.grad is not None
    assert logits.grad.tolist() == [-0.5, 0.0, 0.0]


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 60), seed=st.integers(0, 1 << 16))
def test_calibration_sums_give_the_error_over_ten_bins_and_the_brier_score(rows: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    confidence, target = torch.rand(2, rows, generator=g, dtype=torch.float64)
    valid = torch.rand(rows, generator=g) < 0.7
    sums = calibration(confidence, target, valid)
    bins: dict[int, list[int]] = {}
    for row in valid.nonzero().flatten().tolist():
        bins.setdefault(min(9, int(float(confidence[row]) * 10)), []).append(row)
    count = int(valid.sum())
    gaps = [abs(float(confidence[members].mean() - target[members].mean())) * len(members) for members in bins.values()]
    assert float(calibration_error(sums)) == pytest.approx(sum(gaps) / max(count, 1), abs=1e-12)
    assert sums["rows"].item() == count
    assert float(sums["brier"]) == pytest.approx(float(((confidence - target)[valid] ** 2).sum()), abs=1e-12)
    assert sums["bin_rows"].tolist() == [float(len(bins.get(b, []))) for b in range(10)]
    # Sums of parts add up, as over micro-batches and ranks.
    half = rows // 2
    parts = [calibration(confidence[s], target[s], valid[s]) for s in (slice(0, half), slice(half, None))]
    for key, value in sums.items():
        torch.testing.assert_close(parts[0][key] + parts[1][key], value, rtol=1e-12, atol=1e-12)


def test_a_calibrated_confidence_has_error_0_and_both_ends_have_a_bin() -> None:
    ends = torch.tensor([0.0, 0.05, 1.0, 0.95])
    sums = calibration(ends, ends, torch.ones(4, dtype=torch.bool))
    assert sums["bin_rows"].tolist() == [2.0, *[0.0] * 8, 2.0]
    assert calibration_error(sums).item() == sums["brier"].item() == 0.0
    assert calibration_error(calibration(ends[:0], ends[:0], ends[:0] > 0)).item() == 0.0


def test_rows_that_are_not_valid_are_not_read() -> None:
    sums = calibration(torch.tensor([0.5, math.nan]), torch.tensor([0.5, math.inf]), torch.tensor([True, False]))
    assert all(torch.isfinite(value).all() for value in sums.values())
    assert sums["rows"].item() == 1.0
