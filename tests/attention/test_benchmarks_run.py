"""The benchmarks' shared harness: peak memory is the case's own, and a failing case is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.common import Case, measure, ratio

HERE = "tests.attention.test_benchmarks_run"


def allocate(mib: int) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        block = b"x" * (mib << 20)
        return {"size": len(block)}

    return run


def fail() -> Callable[[], None]:
    def run() -> None:
        raise ValueError("the case is broken")

    return run


def test_peak_memory_is_that_of_the_case_alone() -> None:
    target = f"{HERE}:allocate"
    small, large = measure(
        [Case("small", target, {"mib": 20}), Case("large", target, {"mib": 150})], rounds=2, threads=1, timeout=60
    )
    assert 18 <= small.peak_mib <= 30
    assert 148 <= large.peak_mib <= 160
    assert large.extra == {"size": 150 << 20}
    assert len(large.wall) == len(large.cpu) == 2


def test_a_case_that_fails_is_an_error_that_names_it() -> None:
    with pytest.raises(RuntimeError, match="broken case"):
        measure([Case("broken case", f"{HERE}:fail")], rounds=1, threads=1, timeout=60)


def test_ratios_are_taken_within_a_round() -> None:
    assert ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]) == 2.0
