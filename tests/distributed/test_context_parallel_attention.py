"""Attention on 2 and 4 context-parallel ranks against one device (SEMANTICS 3; CASES B5, B6, B9, B12).

All cases of one size run inside one launch of `cp_attention_worker.py`; a test is one claim of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launch import start

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp(f"cp{request.param}")
    start(folder, request.param, "cp_attention_worker.py", timeout_s=400)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


def assert_claim(ranks: list[dict[str, Any]], claim: str, checks: int) -> None:
    for rank, report in enumerate(ranks):
        crashed = [text for name in ("parity", "exchanges") for text in report["failed"].get(name, [])]
        assert not crashed, f"rank {rank}: {crashed[0]}"
        failed = report["failed"].get(claim, [])
        assert not failed, f"rank {rank}, {len(failed)} of {report['checks'][claim]}: " + "\n".join(failed[:5])
        assert report["checks"].get(claim, 0) >= checks


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_outputs_and_every_gradient_equal_one_device(ranks: list[dict[str, Any]], mode: str, dtype: str) -> None:
    """Random packings (lengths 0, 1, odd), windows, GQA, passes 0..6, selected rows, ranks with no row at all."""
    assert_claim(ranks, f"{mode} {dtype}", 40)


@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_float32_gradients_sum_over_all_hops(ranks: list[dict[str, Any]], mode: str) -> None:
    """An accumulator that aliases the buffer of a message under way, or is rounded on the wire, shows here."""
    assert_claim(ranks, f"{mode} float32 over long documents", 20)


def test_unexpanded_heads_travel_once_and_a_window_moves_only_rows_that_are_seen(ranks: list[dict[str, Any]]) -> None:
    """Bytes sent equal the formula exactly: K/V in the dtype of the input, gradients in float32 or float64."""
    assert_claim(ranks, "traffic", 12)


def test_no_rank_holds_all_rows_or_scores_of_rows_by_rows(ranks: list[dict[str, Any]]) -> None:
    assert_claim(ranks, "memory", 3)


def test_row_exchange_equals_indexing_and_its_gradient(ranks: list[dict[str, Any]]) -> None:
    assert_claim(ranks, "exchange", 60)


def test_gathering_and_summing_back_equal_one_device(ranks: list[dict[str, Any]]) -> None:
    assert_claim(ranks, "gather", 40)


def test_groups_that_are_part_of_the_world_work(ranks: list[dict[str, Any]]) -> None:
    assert_claim(ranks, "subgroup", 2)
