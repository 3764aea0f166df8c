"""Metrics: each name declares how it is reduced, over micro-batches and over ranks (CASES G5)."""

from __future__ import annotations

import pytest

from lightning_spec.metrics import MetricBag


def bag(**entries: tuple[float, float, str]) -> MetricBag:
    out = MetricBag()
    for name, (num, den, reduction) in entries.items():
        out.add(name, num, den, reduction)  # type: ignore[arg-type]
    return out


def test_means_weigh_by_their_denominator_and_learning_rates_are_not_averaged() -> None:
    """The strategy merges the bags of the ranks; `tests/distributed` does it over two processes."""
    total = MetricBag()
    total.update(bag(loss=(6.0, 3, "mean"), tokens=(3, 1, "sum"), gap=(0.1, 1, "max"), lr=(0.5, 1, "same")))
    total.update(bag(loss=(2.0, 1, "mean"), tokens=(1, 1, "sum"), gap=(0.7, 1, "max"), lr=(0.5, 1, "same")))
    assert total.values() == {"loss": 2.0, "tokens": 4.0, "gap": 0.7, "lr": 0.5}


def test_a_rank_without_a_metric_changes_nothing_of_it() -> None:
    total = bag(loss=(6.0, 3, "mean"))
    total.update(MetricBag())
    assert total.values() == {"loss": 2.0}


def test_a_mean_over_nothing_is_zero_and_finite() -> None:
    assert bag(x=(0.0, 0.0, "mean"))["x"].value == 0.0


def test_one_name_cannot_be_reduced_in_two_ways() -> None:
    b = bag(x=(1, 1, "mean"))
    with pytest.raises(ValueError, match="declared as 'mean'"):
        b.add("x", 1, 1, "sum")
