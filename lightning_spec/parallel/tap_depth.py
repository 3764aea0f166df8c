"""How many landing slots a source of the TapChannel needs, from Megatron's order of forwards and backwards.

A put needs no waiting if the block that lay in its slot before was certainly read. "Certainly" is what the schedule
itself enforces: each rank runs its forwards and backwards in a fixed order, a forward needs the stage before it, a
backward the stage after it. Whatever is not ordered by that may happen in the worst order, and sends are taken to cost
no waiting at all, so the depth holds for any timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple

from lightning_spec.errors import ConfigError
from lightning_spec.parallel.groups import strategy_key


class Event(NamedTuple):
    """One forward or backward of one virtual stage."""

    forward: bool
    stage: int
    micro: int


def programme(pipeline: int, virtual: int, rank: int, micro_batches: int, group: int) -> list[Event]:
    """What a pipeline rank runs in a training step, in order: Megatron's warm-up, steady state and cool-down.

    Args:
        pipeline: ranks of the pipeline; virtual stage v runs on rank v % pipeline.
        virtual: model chunks on each rank.
        group: micro-batches that a chunk runs in a row (`microbatch_group_size_per_vp_stage`).
    """
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    place = SimpleNamespace(size=lambda: pipeline, rank=lambda: rank)
    chunks = virtual if virtual > 1 else None
    total, _, warm_up, _ = get_pp_rank_microbatches(
        micro_batches,
        virtual,
        group,
        p2p_communicator=SimpleNamespace(pp_group=place, virtual_pipeline_model_parallel_size=chunks),
    )
    table = get_schedule_table(micro_batches, virtual, group)
    forwards = [Event(True, chunk * pipeline + rank, micro) for micro, chunk in table]
    backwards = [Event(False, (virtual - 1 - chunk) * pipeline + rank, micro) for micro, chunk in table]
    events = forwards[:warm_up]
    for at in range(total - warm_up):
        events += [forwards[warm_up + at], backwards[at]]
    return events + backwards[total - warm_up :]


def slots(
    pipeline: int, virtual: int, source: int, reader: int | None = None, *, group: int | None = None, slack: int = 1
) -> int:
    """Landing slots with which no put of a training step waits, whatever the timing, and `slack` more.

    Args:
        pipeline: pipeline ranks.
        virtual: virtual stages on each rank.
        source: virtual stage that puts in its forward.
        reader: virtual stage in whose forward of a micro-batch the host reads that micro-batch's block; the last one
            where None.
        group: micro-batches that a chunk runs in a row; `pipeline` where None, as in Megatron.

    Raises:
        ConfigError: `reader` runs before `source`, so it would wait for ever.
    """
    last = pipeline * virtual - 1
    reader = last if reader is None else reader
    if not 0 <= source <= last or not 0 <= reader <= last or reader < source:
        raise ConfigError(
            "the draft would read taps before they are made",
            found=f"taps of virtual stage {source}, read by virtual stage {reader}",
            needed=f"stages from 0 to {last}, the reading one not before the other (or read what has arrived)",
            key=strategy_key("draft_stage"),
        )
    return _depth(pipeline, virtual, source, reader % pipeline, reader, group or pipeline) + slack


def slots_drained(
    pipeline: int, virtual: int, source: int, host: int, *, group: int | None = None, slack: int = 1
) -> int:
    """As `slots`, where pipeline rank `host` moves what has arrived to private memory in each of its forwards.

    Raises:
        ConfigError: a stage or rank that is not there.
    """
    if not 0 <= source < pipeline * virtual or not 0 <= host < pipeline:
        raise ConfigError(
            "no such stage",
            found=f"taps of virtual stage {source} on pipeline rank {host}",
            needed=f"stages below {pipeline * virtual}, ranks below {pipeline}",
            key=strategy_key("draft_stage"),
        )
    return _depth(pipeline, virtual, source, host, None, group or pipeline) + slack


@lru_cache
def _depth(pipeline: int, virtual: int, source: int, host: int, reader: int | None, group: int) -> int:
    """Most blocks that can lie unread when the source has just put one."""
    # The steady state is reached after two groups; a short last group has an order of its own.
    counts = {group, 2 * group, 4 * group, 4 * group + pipeline, 4 * group + max(pipeline, group - 1)}
    if virtual == 1:
        counts = {4 * pipeline}
    return max(_depth_of(pipeline, virtual, source, host, reader, group, count) for count in counts)


def _depth_of(
    pipeline: int, virtual: int, source: int, host: int, reader: int | None, group: int, micro_batches: int
) -> int:
    runs = [programme(pipeline, virtual, rank, micro_batches, group) for rank in range(pipeline)]
    before = _ancestors(runs, (host, source % pipeline))
    puts = [event for event in runs[source % pipeline] if event.forward and event.stage == source]
    if reader is not None:
        read = _prefix_counts(runs[host], lambda event: event.forward and event.stage == reader)
    else:
        read = _drained_counts(runs, before, source, host)
    return max(at + 1 - read[before[put][0]] for at, put in enumerate(puts))


def _drained_counts(
    runs: Sequence[Sequence[Event]], before: dict[Event, tuple[int, int]], source: int, host: int
) -> list[int]:
    """Blocks that have left their slots after the host's first n events."""
    made = _prefix_counts(runs[source % len(runs)], lambda event: event.forward and event.stage == source)
    counts = [0]
    for event in runs[host]:
        here = made[before[event][1]] if event.forward else 0
        counts.append(max(counts[-1], here))
    return counts


def _prefix_counts(run: Sequence[Event], wanted: Callable[[Event], bool]) -> list[int]:
    """How many of the first n events are wanted, for n = 0, 1, ..."""
    counts = [0]
    for event in run:
        counts.append(counts[-1] + wanted(event))
    return counts


def _ancestors(runs: Sequence[Sequence[Event]], watched: tuple[int, int]) -> dict[Event, tuple[int, int]]:
    """For every event, how many events of the two watched ranks must have ended before it can start."""
    last = max(event.stage for run in runs for event in run)
    ended: dict[Event, tuple[int, int]] = {}  # the same, after the event
    before: dict[Event, tuple[int, int]] = {}
    at = [0] * len(runs)
    progress = True
    while progress:
        progress = False
        for rank, run in enumerate(runs):
            while at[rank] < len(run):
                event = run[at[rank]]
                needs = _needs(event, last)
                if any(need not in ended for need in needs):
                    break
                known = [ended[need] for need in needs] + ([ended[run[at[rank] - 1]]] if at[rank] else [])
                first, second = (max((pair[i] for pair in known), default=0) for i in (0, 1))
                before[event] = (first, second)
                at[rank] += 1
                ended[event] = (
                    at[rank] if rank == watched[0] else first,
                    at[rank] if rank == watched[1] else second,
                )
                progress = True
    assert all(n == len(run) for n, run in zip(at, runs, strict=True)), "the schedule waits for itself"
    return before


def _needs(event: Event, last: int) -> list[Event]:
    """Events of other stages whose results an event needs."""
    if event.forward:
        return [Event(True, event.stage - 1, event.micro)] if event.stage else []
    if event.stage < last:
        return [Event(False, event.stage + 1, event.micro)]
    return [Event(True, last, event.micro)]
