"""Ring depths against a simulation of the schedule in which the host is as slow as it can be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spec.errors import ConfigError
from lightning_spec.parallel.tap_depth import programme, slots, slots_drained


def most_unread(pipeline: int, virtual: int, source: int, host: int, micro: int, group: int, reads: str) -> int:
    """Run the schedule rank by rank; the host moves only when nobody else can. Most blocks that lay unread at once.

    A put counts at the start of its forward, a read at the end of the host's: the worst of both.
    """
    runs = [programme(pipeline, virtual, rank, micro, group) for rank in range(pipeline)]
    last = pipeline * virtual - 1
    done, at = set(), [0] * pipeline
    lying, most = 0, 0
    order = [rank for rank in range(pipeline) if rank != host] + [host]

    def can(rank: int) -> bool:
        if at[rank] == len(runs[rank]):
            return False
        forward, stage, m = runs[rank][at[rank]]
        if forward:
            return stage == 0 or (True, stage - 1, m) in done
        return (True, last, m) in done if stage == last else (False, stage + 1, m) in done

    while any(at[rank] < len(runs[rank]) for rank in range(pipeline)):
        rank = next(rank for rank in order if can(rank))
        forward, stage, m = runs[rank][at[rank]]
        if forward and stage == source:
            lying += 1
            most = max(most, lying)
        if forward and rank == host and (reads == "drained" or stage == int(reads)):
            lying = 0 if reads == "drained" else lying - 1
        done.add((forward, stage, m))
        at[rank] += 1
    return most


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[int, int, int]:
    pipeline = draw(st.integers(1, 4))
    virtual = 1 if pipeline == 1 else draw(st.integers(1, 3))
    group = pipeline + (draw(st.integers(0, 3)) if virtual > 1 else 0)
    return pipeline, virtual, group


@given(pipelines(), st.data())
@settings(max_examples=25, deadline=None)
def test_depth_without_slack_is_exactly_what_the_slowest_host_leaves_unread(
    layout: tuple[int, int, int], data: st.DataObject
) -> None:
    pipeline, virtual, group = layout
    reader = data.draw(st.integers(0, pipeline * virtual - 1))
    source = data.draw(st.integers(0, reader))
    depth = slots(pipeline, virtual, source, reader, group=group, slack=0)
    if virtual == 1:
        counts = [1, 2, pipeline, 2 * pipeline + 1, 4 * pipeline]
    else:  # Megatron refuses other numbers
        counts = [m for m in range(group, 4 * group + 1) if m % group == 0 or m % group >= pipeline]
    seen = [most_unread(pipeline, virtual, source, reader % pipeline, m, group, str(reader)) for m in counts]
    assert max(seen) == depth


@given(pipelines(), st.data())
@settings(max_examples=25, deadline=None)
def test_a_host_that_drains_in_each_forward_needs_no_more_than_its_depth(
    layout: tuple[int, int, int], data: st.DataObject
) -> None:
    pipeline, virtual, group = layout
    host = data.draw(st.integers(0, pipeline - 1))
    source = data.draw(st.integers(0, pipeline * virtual - 1))
    depth = slots_drained(pipeline, virtual, source, host, group=group, slack=0)
    for micro in (group, 2 * group, 3 * group):
        assert most_unread(pipeline, virtual, source, host, micro, group, "drained") <= depth


@pytest.mark.parametrize(("source", "depth"), [(0, 4), (1, 3), (2, 2), (3, 1)])
def test_1f1b_needs_the_warm_up_of_the_source_and_one(source: int, depth: int) -> None:
    assert slots(4, 1, source, slack=0) == depth
    assert slots(4, 1, source) == depth + 1


def test_the_schedule_runs_every_forward_and_backward_once() -> None:
    for rank in range(3):
        events = programme(3, 2, rank, 7, 4)
        assert len(events) == len(set(events)) == 2 * 2 * 7
        assert {event.stage % 3 for event in events} == {rank}


def test_reading_before_the_taps_are_made_is_refused() -> None:
    with pytest.raises(ConfigError, match="before they are made"):
        slots(4, 1, 2, 1)
    with pytest.raises(ConfigError, match="no such stage"):
        slots_drained(2, 1, 2, 0)
