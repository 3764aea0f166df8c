"""Adaptive speculation inside vLLM: times each engine step and rewrites the scheduler's table of proposals.

vLLM looks the number of proposals up by the number of scheduled requests at each step (`Scheduler.dynamic_sd_lookup`,
there when `num_speculative_tokens_per_batch_size` is given). With 0 it makes none, but still runs the draft once over
the new tokens, so that the draft's keys and values have no holes when it is asked again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning_spec.rollout.adaptive import AdaptiveConfig, AdaptiveSpeculation, Step
from lightning_spec.rollout.engine import SpeculationReport


class AdaptiveScheduler:
    """Wraps a vLLM scheduler that lives in this process.

    Args:
        scheduler: vllm.v1.core.sched.scheduler.Scheduler, with a table.
        config: cadence of the probes.
        clock: seconds.

    Raises:
        RuntimeError: the scheduler has no table to rewrite.
    """

    def __init__(self, scheduler: Any, config: AdaptiveConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        if getattr(scheduler, "dynamic_sd_lookup", None) is None:
            raise RuntimeError("vLLM's scheduler has no dynamic_sd_lookup: speculation.adaptive needs it")
        self.controller = AdaptiveSpeculation(scheduler.dynamic_sd_lookup, config)
        self._scheduler, self._clock = scheduler, clock
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._began, self._asked = 0.0, 0
        self._requests = self._proposals = self._off = 0
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update_from_output

    def schedule(self, *args: Any) -> Any:
        self._began = self._clock()
        return self._schedule(*args)

    def update_from_output(self, scheduled: Any, output: Any) -> Any:
        results = self._update(scheduled, output)
        batch = len(scheduled.num_scheduled_tokens)
        if batch == 0:
            return results
        seconds = self._clock() - self._began
        k = int(scheduled.num_spec_tokens_to_schedule)
        drafted = sum(len(tokens) for tokens in scheduled.scheduled_spec_decode_tokens.values())
        # One token of each request and its proposals; what is beyond that are prompts (or preempted requests again).
        prefill = bool(scheduled.scheduled_new_reqs) or scheduled.total_num_scheduled_tokens > batch + drafted
        tokens = sum(len(one.new_token_ids) for out in results.values() for one in out.outputs)
        self._requests += batch
        self._proposals += k * batch
        self._off += batch * self.controller.is_off(batch)
        if self.controller.record(Step(batch, self._asked, k, prefill, tokens, seconds)):
            self._write()
        self._asked = k
        return results

    def restore(self, state: dict[str, Any]) -> None:
        self.controller.restore(state)
        self._write()

    def report(self) -> SpeculationReport:
        """What was done since the last report."""
        made = SpeculationReport(
            requests=self._requests,
            proposals=self._proposals,
            off=self._off,
            chosen=tuple(self.controller.chosen()),
            gains=self.controller.gains(),
            state=self.controller.state(),
        )
        self._requests = self._proposals = self._off = 0
        return made

    def _write(self) -> None:
        self._scheduler.dynamic_sd_lookup[:] = self.controller.lookup()
