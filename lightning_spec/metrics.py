"""Metrics that know how they are reduced over micro-batches and over ranks.

A metric is a (numerator, denominator) pair with a declared reduction, so that a mean over tokens stays a mean over
tokens for any micro-batch split and any number of data-parallel ranks, counts are summed, and learning rates are left
alone (CASES.md G5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "max", "same"]
"""mean: sum(num) / sum(den).  sum: sum(num).  max: the largest.  same: equal on every rank, not reduced."""


@dataclass(slots=True)
class Metric:
    """One metric; `num` and `den` are float64 scalars on the CPU."""

    reduction: Reduction
    num: Tensor
    den: Tensor

    @property
    def value(self) -> float:
        if self.reduction == "mean":
            return float(self.num / self.den) if float(self.den) != 0 else 0.0
        return float(self.num)


def _scalar(value: float | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64).reshape(())
    return torch.tensor(float(value), dtype=torch.float64)


class MetricBag:
    """An ordered set of metrics that micro-batches add to and ranks reduce together."""

    def __init__(self) -> None:
        self._items: dict[str, Metric] = {}

    def add(self, name: str, num: float | Tensor, den: float | Tensor = 1.0, reduction: Reduction = "mean") -> None:
        """Add one observation. `mean`: num is a sum over den items. `max` and `same` ignore den."""
        new = Metric(reduction, _scalar(num), _scalar(den))
        old = self._items.get(name)
        if old is None:
            self._items[name] = new
            return
        if old.reduction != reduction:
            raise ValueError(f"metric {name!r} was declared as {old.reduction!r}, now as {reduction!r}")
        self._merge(old, new)

    @staticmethod
    def _merge(old: Metric, new: Metric) -> None:
        if old.reduction in ("mean", "sum"):
            old.num, old.den = old.num + new.num, old.den + new.den
        elif old.reduction == "max":
            old.num = torch.maximum(old.num, new.num)
        else:
            old.num = new.num

    def update(self, other: MetricBag) -> None:
        for name, metric in other.items():
            self.add(name, metric.num, metric.den, metric.reduction)

    def items(self) -> Iterator[tuple[str, Metric]]:
        return iter(self._items.items())

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def __getitem__(self, name: str) -> Metric:
        return self._items[name]

    def __len__(self) -> int:
        return len(self._items)

    def values(self) -> dict[str, float]:
        return {name: metric.value for name, metric in sorted(self._items.items())}
