"""Preemption: a signal to any rank ends the run at one step on all ranks, with a checkpoint, and may requeue the job.

A signal handler runs between any two instructions: in the middle of a pipeline schedule, or of a save. So the handler
here sets a number and does nothing else. The ranks compare their numbers at the end of a batch, where all of them have
made the same step.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from callbacks.checkpoint import SpecCheckpoint
from lightning_spec.compose import nearest
from lightning_spec.errors import ConfigError


class Preempted(SystemExit):
    """Ends the process with 128 + the signal's number, which SLURM and shells read as "ended by that signal"."""

    def __init__(self, signum: int, checkpoint: Path) -> None:
        super().__init__(128 + signum)
        self.signum, self.checkpoint = signum, checkpoint


class PreemptionCallback(Checkpoint):
    """Saves and leaves when a rank is signalled. A `Checkpoint`, so that Lightning runs it after all other callbacks.

    Args:
        signals: names of the signals to answer; an empty list answers none and costs nothing.
        requeue: those of them after which the first rank asks SLURM to queue the job again (`scontrol requeue`).
            Nothing is requeued outside SLURM. A signal that SLURM also sends for `scancel` (TERM) would bring cancelled
            jobs back.
        every_n_steps: the ranks compare notes after every n-th optimiser step (and after each validation): one
            reduction of a number over all ranks.

    Where a validation is due at the step, the checkpoint waits for it (see SpecCheckpoint), and the run ends after it.
    A run that has just made its last step finishes instead. What was there before is put back when training ends, and
    is called after each signal; only Lightning's own handlers are not, since they run collectives where they stand.
    """

    def __init__(
        self,
        signals: Sequence[str] = ("USR1", "TERM"),
        requeue: Sequence[str] = (),
        every_n_steps: int = 1,
    ) -> None:
        if every_n_steps < 1:
            raise ConfigError(
                "bad cadence of the ranks' agreement",
                found=every_n_steps,
                needed="1 or more",
                key=_key("every_n_steps"),
            )
        self.signals = [_signal(name, "signals") for name in signals]
        self.requeue = [_signal(name, "requeue") for name in requeue]
        if missing := [one.name for one in self.requeue if one not in self.signals]:
            raise ConfigError(
                "requeue after a signal that is not answered",
                found=missing,
                needed=f"some of {[one.name for one in self.signals]}",
                key=_key("requeue"),
            )
        self.every_n_steps = every_n_steps
        self._received = 0
        self._agreed = 0
        self._previous: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None
        self._listening = False

    @property
    def should_stop(self) -> bool:
        """Whether this rank was signalled. Other ranks may not know yet: no collective may depend on it alone."""
        return bool(self._received)

    # ---- Lightning's hooks ------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and self.signals and _saver(trainer) is None:
            raise ConfigError(
                "preemption saves through the checkpoint callback, and there is none",
                found="no SpecCheckpoint",
                needed="callbacks.SpecCheckpoint among the callbacks, or no signals",
                key=_key("signals"),
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.listen(trainer)

    def listen(self, trainer: pl.Trainer) -> None:
        """Install the handlers, once. Not before `on_train_start`: Lightning installs its own just ahead of it."""
        if not self.signals or self._listening:
            return
        self._listening = True
        self._received = self._agreed = 0
        self._group = _cpu_world(trainer)
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn("training runs outside the main thread: Python delivers no signals to it")
            return
        for one in self.signals:
            self._previous[one] = without_lightning(signal.getsignal(one))
            signal.signal(one, self._note)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if not self.signals or step % self.every_n_steps or step == trainer.max_steps:
            return
        self._agreed = self._agree()
        saver = _saver(trainer)
        if self._agreed and saver is not None and saver.save_step(trainer):
            # What Lightning does right after this hook, which is not reached.
            trainer._logger_connector.update_train_step_metrics()
            self._leave(trainer, saver)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = trainer.global_step
        if not self.signals or trainer.state.fn != "fit" or trainer.sanity_checking or step == trainer.max_steps:
            return
        self._agreed = self._agreed or self._agree()
        saver = _saver(trainer)
        if self._agreed and saver is not None and saver.save_step(trainer):
            self._leave(trainer, saver)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()

    # ---- the signal -------------------------------------------------------------------------------------------------

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._received = max(self._received, signum)
        previous = self._previous.get(signum)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(signum, frame)

    def _restore(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for signum, handler in self._previous.items():
                signal.signal(signum, handler)
        self._previous = {}
        self._listening = False

    def _agree(self) -> int:
        """The highest signal that any rank has received, on all ranks; 0 for none. Collective over the world."""
        if self._group is None:
            return self._received
        highest = torch.tensor(self._received, dtype=torch.int32)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._group)
        return int(highest)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _leave(self, trainer: pl.Trainer, saver: SpecCheckpoint) -> None:
        checkpoint, name = saver.path(trainer.global_step), signal.Signals(self._agreed).name
        if trainer.is_global_zero:
            job = job_id() if self._agreed in self.requeue else None
            what = f"; {requeue(job)}" if job is not None else ""
            print(f"{name}: step {trainer.global_step} is saved in {checkpoint}{what}", flush=True)
            for logger in trainer.loggers:
                logger.finalize("success")
        # A task that ends with an error may make srun end the others: none leaves before all is written and requeued.
        trainer.strategy.barrier("preempted")
        raise Preempted(self._agreed, checkpoint)


class EarlyListener(pl.Callback):
    """Makes a PreemptionCallback listen ahead of the other callbacks, which may take minutes to start an engine."""

    def __init__(self, callback: PreemptionCallback) -> None:
        self._callback = callback

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._callback.listen(trainer)


def without_lightning(handler: Any) -> Any:
    """A signal's handler without what Lightning composed into it; SIG_DFL where nothing is left or Python set none."""
    from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose, _SignalConnector

    if isinstance(handler, _HandlersCompose):
        kept = [one for one in map(without_lightning, handler.signal_handlers) if callable(one)]
        return _HandlersCompose(kept) if len(kept) > 1 else (kept or [signal.SIG_DFL])[0]
    if handler is None or isinstance(getattr(handler, "__self__", None), _SignalConnector):
        return signal.SIG_DFL
    return handler


def job_id() -> str | None:
    """This SLURM job as `scontrol` knows it (a task of an array by the array's number), or None outside SLURM."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    found = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
    return found if re.fullmatch(r"\d+(_\d+)?", found) else None


def requeue(job: str, timeout_s: float = 60.0) -> str:
    """Ask SLURM to queue the job again; returns what came of it in words. A failure ends nothing: the step is saved."""
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"job {job} could not be requeued: {error}"
    if done.returncode:
        return f"job {job} could not be requeued: {done.stderr.strip() or f'scontrol returned {done.returncode}'}"
    return f"job {job} is queued again"


def _saver(trainer: pl.Trainer) -> SpecCheckpoint | None:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((one for one in callbacks if isinstance(one, SpecCheckpoint)), None)


def _cpu_world(trainer: pl.Trainer) -> dist.ProcessGroup | None:
    """A group of all ranks for CPU tensors (a flag on a GPU would cost a synchronisation); None for one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if dist.get_backend() == "gloo":
        return dist.group.WORLD
    seconds = float(getattr(trainer.strategy, "timeout_s", 1800.0))
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))


def _signal(name: str, field: str) -> signal.Signals:
    known = {one.name.removeprefix("SIG"): one for one in signal.Signals if one not in (signal.SIGKILL, signal.SIGSTOP)}
    short = str(name).upper().removeprefix("SIG")
    if short not in known:
        raise ConfigError(
            "no signal that a process can answer", found=name, needed=nearest(short, known, "one of"), key=_key(field)
        )
    return known[short]


def _key(field: str) -> str:
    return f"preemption.{field}"
