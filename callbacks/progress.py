"""One line that says how the run is doing: step, reward, acceptance length, tokens/s, what it does now, time left."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, Literal, TextIO

import lightning.pytorch as pl

from callbacks.rollout import find_rollout
from lightning_spec.jsonl_logger import JSONLLogger

SHOWN = (
    ("reward", "reward", "{:.3f}"),
    ("val/reward", "val reward", "{:.3f}"),
    ("spec/acceptance_length", "acceptance", "{:.2f}"),
    ("rollout/tokens_per_second", "tokens/s", "{:.0f}"),
    ("policy/loss", "policy loss", "{:.4f}"),
    ("draft/loss", "draft loss", "{:.4f}"),
)
"""Metric, its label, its format; shown where it was logged."""
PHASES = {
    "start": "starting the engine",
    "refit": "refit",
    "rollout": "rollouts",
    "validate": "validation rollouts",
    "compare": "frozen draft",
    "train": "update",
}


class ProgressCallback(pl.Callback):
    """Progress of a run on the terminal, and a clean start of its metrics file.

    Args:
        kind: `rich` is one live line, `plain` a line for each step, `none` is silent; `auto` is rich on a terminal and
            plain elsewhere.
        every_n_steps: plain lines only at each n-th step (and at the last).
        extra: further metrics to show.
    """

    def __init__(
        self,
        kind: Literal["auto", "rich", "plain", "none"] = "auto",
        every_n_steps: int = 1,
        extra: list[str] | None = None,
    ) -> None:
        self.kind = kind
        self.every_n_steps = max(1, every_n_steps)
        self.extra = list(extra or [])
        self.stream: TextIO = sys.stdout
        self._live: Any = None
        self._task: Any = None
        self._phase = ""
        self._seen: dict[str, float] = {}
        self._durations: deque[float] = deque(maxlen=20)
        self._began = time.monotonic()
        self._step_began = self._began

    # ---- Lightning's hooks ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, JSONLLogger):
                # Steps past the restored one happen again; a new run in an old folder starts an empty file.
                logger.truncate_after(trainer.global_step if trainer.global_step else -1)
        if not trainer.is_global_zero:
            self.kind = "none"
        if self.kind == "auto":
            self.kind = "rich" if self.stream.isatty() else "plain"
        if (rollout := find_rollout(trainer)) is not None and self.kind != "none":
            rollout.on_progress = self._on_progress
        self._began = self._step_began = time.monotonic()
        if self.kind == "rich":
            self._open_live(trainer)
        elif self.kind == "plain" and trainer.global_step:
            self._print(f"resuming after step {trainer.global_step}")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._phase = "train"
        self._draw(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        self._durations.append(now - self._step_began)
        self._step_began = now
        self._collect(trainer)
        last = trainer.global_step >= trainer.max_steps > 0
        if self.kind == "plain" and (trainer.global_step % self.every_n_steps == 0 or last):
            self._print(self.line(trainer))
        self._draw(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._collect(trainer)
        shown = {k: v for k, v in self._seen.items() if k.startswith("val/")}
        if self.kind == "plain" and shown and not trainer.sanity_checking:
            numbers = "  ".join(f"{k} {v:.4g}" for k, v in sorted(shown.items()) if k in _VALIDATION)
            self._print(f"  validation at step {trainer.global_step}: {numbers}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close_live()
        if self.kind in ("plain", "rich"):
            self._print(f"done: {trainer.global_step} steps in {_clock(time.monotonic() - self._began)}")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close_live()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close_live()

    # ---- the line ---------------------------------------------------------------------------------------------------

    def line(self, trainer: pl.Trainer) -> str:
        """The plain line of the step just done."""
        of = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
        parts = [f"step {trainer.global_step}{of}", *self._numbers()]
        if self._durations:
            parts.append(f"{self._durations[-1]:.1f} s")
        if (left := self._time_left(trainer)) is not None:
            parts.append(f"left {_clock(left)}")
        return "  ".join(parts)

    def _numbers(self) -> list[str]:
        shown = [f"{label} {form.format(self._seen[name])}" for name, label, form in SHOWN if name in self._seen]
        return shown + [f"{name} {self._seen[name]:.4g}" for name in self.extra if name in self._seen]

    def _time_left(self, trainer: pl.Trainer) -> float | None:
        if not self._durations or trainer.max_steps <= 0:
            return None
        return sum(self._durations) / len(self._durations) * max(0, trainer.max_steps - trainer.global_step)

    def _collect(self, trainer: pl.Trainer) -> None:
        self._seen.update({name: float(value) for name, value in trainer.callback_metrics.items()})

    def _on_progress(self, phase: str, done: int, of: int) -> None:
        self._phase = phase
        if self._live is not None:
            self._live.update(self._task, phase=self._phase_text(done, of))
        elif self.kind == "plain" and phase == "start":
            self._print("starting the rollout engine ...")

    def _phase_text(self, done: int = 0, of: int = 0) -> str:
        text = PHASES.get(self._phase, self._phase)
        return f"{text} {done}/{of}" if of > 1 else text

    # ---- drawing ----------------------------------------------------------------------------------------------------

    def _open_live(self, trainer: pl.Trainer) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._live = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("[dim]{task.fields[phase]}[/dim]"),
            TextColumn("{task.fields[left]}"),
            console=Console(file=self.stream),
        )
        total = trainer.max_steps if trainer.max_steps > 0 else None
        self._task = self._live.add_task("", total=total, numbers="", phase="", left="", completed=trainer.global_step)
        self._live.start()

    def _draw(self, trainer: pl.Trainer) -> None:
        if self._live is None:
            return
        left = self._time_left(trainer)
        self._live.update(
            self._task,
            completed=trainer.global_step,
            numbers="  ".join(self._numbers()),
            phase=self._phase_text(),
            left="" if left is None else f"left {_clock(left)}",
        )

    def _close_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


_VALIDATION = frozenset(
    (
        "val/reward",
        "val/pass_rate",
        "val/acceptance_length",
        "val/acceptance_cotrained",
        "val/acceptance_frozen",
        "val/loss",
    )
)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
