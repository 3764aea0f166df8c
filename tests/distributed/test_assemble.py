"""Whole tensors out of four ranks' parts: exact, in checkpoint order, whatever the bucket and whoever fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_spec.parallel.assemble import checkpoint_order
from lightning_spec.parallel.placement import Placement, Span
from lightning_spec.parallel.rectangle import Rectangle, cover, strips
from tests.distributed import assemble_worker
from tests.distributed.launch import start

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("assemble")
    start(folder, 4, "assemble_worker.py", timeout_s=120)
    return [torch.load(folder / f"assemble-{rank}.pt", weights_only=False) for rank in range(4)]


def equal(found: list[tuple[str, Tensor]], shift: float = 0) -> bool:
    """Whether these are all tensors, in checkpoint order."""
    values = assemble_worker.whole_tensors()
    assert [name for name, _ in found] == list(values)
    return all(
        t.dtype == v.dtype and torch.equal(t, v + shift)
        for (_, t), v in zip(found, values.values(), strict=True)
    )  # fmt: skip


@pytest.mark.parametrize("limit", [1, 700, 1 << 20])
def test_the_target_gets_every_tensor_whole_and_in_checkpoint_order_and_nobody_else_any(
    ranks: Found, limit: int
) -> None:
    assert equal(ranks[0][f"first-{limit}"])
    assert [rank[f"first-{limit}"] for rank in ranks[1:]] == [[], [], []]


def test_several_targets_each_get_all(ranks: Found) -> None:
    assert equal(ranks[1]["several"])
    assert equal(ranks[2]["several"])
    assert ranks[0]["several"] == ranks[3]["several"] == []


def test_a_plan_is_made_once_and_run_again_on_moved_weights(ranks: Found) -> None:
    for number, found in enumerate(ranks[3]["again"]):
        assert equal(found, shift=number + 1)
    assert {rank["gathers"] for rank in ranks} == {1}
    assert all(rank["order"] == list(assemble_worker.whole_tensors()) for rank in ranks)
    assert ranks[2]["sizes"]["model.embed_tokens.weight"] == 21 * 6 * 4


def test_a_consumer_that_gives_up_leaves_nobody_waiting_once_it_has_drained(ranks: Found) -> None:
    assert equal(ranks[0]["after"])


def test_copies_come_from_one_rank_and_a_target_uses_its_own(ranks: Found) -> None:
    assert equal(ranks[0]["copies"])
    assert equal(ranks[3]["copies"])
    assert ranks[1]["copies"] == ranks[2]["copies"] == []


def test_no_tensors_anywhere_is_an_empty_stream(ranks: Found) -> None:
    assert all(rank["nothing"] == [] for rank in ranks)


def test_a_part_that_nobody_holds_and_parts_that_do_not_fit_are_told_to_every_rank(ranks: Found) -> None:
    for rank in ranks:
        assert "model.embed_tokens.weight (21, 6): no rank holds" in rank["hole"]
        assert "model.norm.weight" in rank["dtype"]
        assert "torch.float64" in rank["dtype"]
        assert "other parameters" in rank["changed"]


def test_numbered_names_come_by_number_and_others_as_they_were_first_seen() -> None:
    found = ["embed", "layers.10.b", "layers.10.a", "layers.2.b", "x.experts.3.up", "norm", "x.experts.1.up"]
    assert checkpoint_order(found) == [
        "embed", "layers.2.b", "layers.10.b", "layers.10.a", "x.experts.1.up", "x.experts.3.up", "norm",
    ]  # fmt: skip


rectangles = st.builds(Rectangle, st.integers(0, 5), st.integers(0, 5), st.integers(1, 6), st.integers(1, 6))


@given(st.lists(rectangles, max_size=8))
def test_a_cover_takes_what_adds_something_and_names_exactly_what_is_left(parts: list[Rectangle]) -> None:
    inside = [r for r in parts if r.row + r.rows <= 7 and r.column + r.columns <= 7]
    taken, holes = cover(inside, 7, 7)
    grid = torch.zeros(7, 7, dtype=torch.int)
    for number, part in enumerate(inside):
        fresh = bool((part.of(grid) == 0).any())
        assert (number in taken) == fresh
        part.of(grid)[:] = 1
    left = torch.zeros(7, 7, dtype=torch.int)
    for hole in holes:
        hole.of(left).add_(1)
    assert torch.equal(left, 1 - grid)


def test_neighbouring_runs_are_one_strip_however_the_parameter_interleaves_them() -> None:
    fused = Placement("k", (8, 3), (Span(10, 2, 2), Span(4, 2, 0), Span(0, 1, 7)))
    first, second = strips(fused, (12, 3))
    assert (first.rectangle, first.runs) == (Rectangle(0, 0, 4, 3), ((4, 2, 0), (10, 2, 2)))
    assert (second.rectangle, second.runs) == (Rectangle(7, 0, 1, 3), ((0, 1, 0),))
    joined = Placement("k", (4, 3), (Span(1, 2, 0), Span(3, 2, 2)))
    assert strips(joined, (12, 3))[0].runs == ((1, 4, 0),)
