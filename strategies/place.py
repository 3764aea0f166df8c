"""Where the draft lives in a pipeline, and which rank runs which micro-batch's draft step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_spec.errors import ConfigError
from lightning_spec.parallel.groups import strategy_key

DraftStage = int | Literal["last", "spread"]
"""Pipeline rank that hosts the draft; `spread`: every rank has the draft and runs some of the micro-batches."""


@dataclass(frozen=True, slots=True)
class Place:
    """The draft's place in one pipeline; the same for every pipeline of the world.

    On the last rank the draft's step of a micro-batch runs inside the schedule, right after the policy's forward that
    makes its last feature. Anywhere else it runs after the schedule: a rank then begins with its draft steps as soon as
    its own part of the schedule is done, and the last stage is done first.
    """

    hosts: tuple[int, ...]
    now: bool
    lead: float = 0.0
    """How much earlier than the one before it a stage is done with the schedule, in draft steps of a micro-batch."""

    @classmethod
    def of(cls, stage: DraftStage, pipeline: int, lead: float = 0.0) -> Place:
        """
        Raises:
            ConfigError: no such stage.
        """
        if stage in ("last", pipeline - 1) or pipeline == 1:
            return cls((pipeline - 1,), True)
        if stage == "spread":
            return cls(tuple(range(pipeline)), False, lead)
        if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage < pipeline:
            raise ConfigError(
                "no such place for the draft",
                found=stage,
                needed=f"last, spread, or a pipeline rank from 0 to {pipeline - 1}",
                key=strategy_key("draft_stage"),
            )
        return cls((stage,), False)

    def turns(self, tokens: Sequence[int]) -> list[int]:
        """The rank that runs each micro-batch's draft step, given the micro-batches' tokens.

        Each goes to the rank that is free first, counting from when it is done with the schedule. Decided by sizes and
        not by the clock, so that a resumed run adds the same gradients in the same order.
        """
        mean = sum(tokens) / max(1, len(tokens))
        busy = {rank: -rank * self.lead * mean for rank in self.hosts}
        out = []
        for count in tokens:
            rank = min(busy, key=lambda host: (busy[host], -host))
            busy[rank] += count
            out.append(rank)
        return out
