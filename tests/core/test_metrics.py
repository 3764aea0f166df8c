"""Metrics: each name declares how it is reduced, over micro-batches and over ranks (CASES G5)."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from lightning_spec.metrics import MetricBag


def bag(**entries: tuple[float, float, str]) -> MetricBag:
    out = MetricBag()
    for name, (num, den, reduction) in entries.items():
        out.add(name, num, den, reduction)  # type: ignore[arg-type]
    return out


def reduce_over(bags: list[MetricBag]) -> list[MetricBag]:
    """Every rank's reduction, with the collective emulated by running the ranks call by call."""
    import threading

    barrier = threading.Barrier(len(bags))
    shared: list[Tensor | None] = [None] * len(bags)
    results: list[MetricBag | Exception | None] = [None] * len(bags)

    def work(rank: int) -> None:
        def all_reduce(x: Tensor, op: Literal["sum", "max"]) -> Tensor:
            shared[rank] = x
            barrier.wait(10)
            stacked = torch.stack([t for t in shared if t is not None])
            barrier.wait(10)
            return stacked.sum(0) if op == "sum" else stacked.amax(0)

        try:
            results[rank] = bags[rank].reduce(all_reduce)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(r,)) for r in range(len(bags))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results  # type: ignore[return-value]


def test_means_weigh_by_their_denominator_and_learning_rates_are_not_averaged() -> None:
    ranks = reduce_over(
        [
            bag(loss=(6.0, 3, "mean"), tokens=(3, 1, "sum"), gap=(0.1, 1, "max"), lr=(0.5, 1, "same")),
            bag(loss=(2.0, 1, "mean"), tokens=(1, 1, "sum"), gap=(0.7, 1, "max"), lr=(0.5, 1, "same")),
        ]
    )
    for reduced in ranks:
        assert reduced.values() == {"loss": 2.0, "tokens": 4.0, "gap": 0.7, "lr": 0.5}


def test_ranks_with_different_names_raise_instead_of_mixing_numbers() -> None:
    with pytest.raises(ValueError, match="ranks log different metrics"):
        reduce_over([bag(a=(1, 1, "mean")), bag(b=(1, 1, "mean"))])


def test_a_mean_over_nothing_is_zero_and_finite() -> None:
    assert bag(x=(0.0, 0.0, "mean"))["x"].value == 0.0


def test_one_name_cannot_be_reduced_in_two_ways() -> None:
    b = bag(x=(1, 1, "mean"))
    with pytest.raises(ValueError, match="declared as 'mean'"):
        b.add("x", 1, 1, "sum")


def test_micro_batches_merge_like_ranks() -> None:
    a = bag(loss=(6.0, 3, "mean"), top=(1, 1, "max"))
    a.update(bag(loss=(2.0, 1, "mean"), top=(5, 1, "max")))
    assert a.values() == {"loss": 2.0, "top": 5.0}
