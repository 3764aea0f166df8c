"""Does speculation pay? What the rollout callback says of it, and carries across a resume."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_spec.rollout.engine import Engine, SpeculationReport

PAYS_FROM = 1.1
"""Acceptance length below which a warning is given. It bounds the speed-up from above, and drafting is not free."""


class GainWatch:
    """Warns, once for each thing, about speculation that is slower than none.

    `state` is what adaptive speculation knew after the last generation; plain data for checkpoints.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self._warned = False
        self._off: set[int] = set()

    def generated(self, engine: Engine) -> None:
        """To be called after every generation."""
        report = engine.last.adaptive
        if report is not None:
            self.state = report.state
            self._say_switched(report)

    def check(self, engine: Engine) -> None:
        """Say once that speculation cannot pay. A verification step costs no less than a plain one, so the acceptance
        length bounds the speed-up from above; what it really is, adaptive speculation and `benchmarks.rollout` measure.
        """
        spec = engine.last.spec
        length = spec.acceptance_length
        if engine.last.adaptive is None and engine.speculative and spec.drafts and length < PAYS_FROM:
            if self._warned:
                return
            self._warned = True
            rank_zero_warn(
                f"speculation is slower than none here: acceptance length {length:.2f}, so a speed-up above "
                f"{length:.2f}x is impossible; set rollout.engine.speculation.adaptive: true, method: none, fewer "
                "proposals, or by_batch_size rows with k = 0"
            )

    def _say_switched(self, report: SpeculationReport) -> None:
        for start, gain in sorted(report.gains.items()):
            if report.chosen[start] or start in self._off:
                continue
            self._off.add(start)
            rank_zero_warn(
                f"speculation is slower than none from {start} running requests on ({gain:.2f}x, measured): switched "
                "off for such batches; probes go on and switch it on again when it pays"
            )
