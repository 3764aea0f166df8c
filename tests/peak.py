"""Peak memory of a step, counted exactly."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate

import torch


def allocated_peak(step: Callable[[], object]) -> int:
    """The most bytes of tensors that lived at once, above those before: every allocation and release, in order.

    Resident memory, which an operating system shows, also tells what an earlier step left in the allocator: it moved
    by a fifth from machine to machine.
    """
    # What an earlier profile saw allocated would count as a release if it were collected now.
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    kineto = profile.profiler.kineto_results  # type: ignore[union-attr]
    changes = [(event.start_ns(), event.nbytes()) for event in kineto.events() if event.name() == "[memory]"]
    held = list(accumulate(size for _, size in sorted(changes, key=lambda change: change[0])))
    assert len(held) > 100, "the profiler recorded no memory"
    return max(held)
