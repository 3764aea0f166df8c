"""The frozen twin: what the draft's acceptance would be had it stayed as it was when the run began.

Acceptance of a co-trained draft is measured in the engine and not inferred from a loss, which can fall while acceptance
falls too (CASES.md A12). At each validation the twin refits the *first* draft into the engine beside the *current*
policy, generates the same prompts with the same seeds, and gives the engine its live draft back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from callbacks.collect import speculation_metrics
from callbacks.rollout import RolloutCallback, find_rollout
from callbacks.served import full_draft, serves_draft
from callbacks.speaker import Speaker, consumed, writes_with_first
from lightning_spec.batch import SpecStats
from lightning_spec.errors import ConfigError
from lightning_spec.metrics import MetricBag
from lightning_spec.rollout.engine import NamedTensors


class FrozenTwin(pl.Callback):
    """Measures acceptance of the draft as it was at the start, beside the co-trained one, on the same prompts.

    Logs `val/acceptance_frozen` and `val/acceptance_cotrained` with every validation.

    Args:
        enabled: off by default; each validation then costs a second generation and two draft refits.
        folder: where the first draft's tensors are kept, so that a resumed run compares with the same draft.
    """

    def __init__(self, enabled: bool = False, folder: str = "runs/default/frozen_draft") -> None:
        self.enabled = enabled
        self.folder = Path(folder)
        self._tensors: dict[str, Tensor] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not self.enabled:
            return
        rollout = find_rollout(trainer)
        if rollout is None or not serves_draft(rollout.engine):
            raise ConfigError(
                "the frozen twin needs an engine that serves a draft",
                found="an engine without one" if rollout else "no engine",
                needed="a speculative engine, or enabled: false",
                key="acceptance.enabled",
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.enabled:
            self._tensors = self._first_draft(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Runs after the rollout callback, which has just generated with the live draft.
        if not self.enabled or trainer.sanity_checking or self._tensors is None:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        rollout = find_rollout(trainer)
        if rollout is None or not data.val_batches:
            return
        metrics = self.compare(trainer, pl_module, rollout)
        # Batch 0 exists on every rank and its metrics go through the same reduction as the rest.
        data.val_buffer.pending[0].metrics.update(metrics)

    def compare(self, trainer: pl.Trainer, module: Any, rollout: RolloutCallback) -> MetricBag:
        """Both acceptances; the engine ends with the live draft, also when generation fails."""
        assert rollout.engine is not None
        assert self._tensors is not None
        data = trainer.datamodule  # type: ignore[attr-defined]
        live = rollout.engine.last.spec
        try:
            rollout.refit(module, draft=iter(self._tensors.items()))
            frozen = rollout.measure(data)
        finally:
            if rollout.engine.running:
                rollout.refit(module)
        metrics = MetricBag()
        positions = full_draft(rollout.engine)
        for name, spec in (("cotrained", live), ("frozen", frozen)):
            metrics.add(f"val/acceptance_{name}", *_length(spec))
            for key, metric in speculation_metrics(spec, positions, prefix="x").items():
                if "accepted_at_" in key:
                    metrics.add(f"val/{name}_{key.removeprefix('x/')}", metric.num, metric.den)
        return metrics

    def _first_draft(self, trainer: pl.Trainer, module: Any) -> dict[str, Tensor]:
        file = self.folder / "draft.safetensors"
        resumed = trainer.global_step > 0
        if resumed and not file.is_file():
            raise ConfigError(
                "the resumed run's first draft is gone, so nothing can be compared with it",
                found=str(file),
                needed="the file that the run wrote at its start, or acceptance.enabled: false",
                key="acceptance.folder",
            )
        if not resumed and writes_with_first(trainer):
            # Where the draft lives on other ranks than rank 0, those send it.
            _save(module.draft_tensors(), file, trainer.is_global_zero)
        trainer.strategy.barrier("frozen_draft")
        if not Speaker.of(trainer.strategy).speaks:
            return {}  # the engine gets the tensors, and this rank has none
        return {name: tensor.to(_device(module)) for name, tensor in load_file(file).items()}


def _save(tensors: NamedTensors, file: Path, first: bool) -> None:
    def write() -> None:
        if first:
            file.parent.mkdir(parents=True, exist_ok=True)
            beside = file.with_suffix(".partial")
            save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors}, beside)
            beside.replace(file)

    consumed(write, tensors)


def _length(spec: SpecStats) -> tuple[float, float]:
    return (spec.drafts + spec.accepted or 1, spec.drafts or 1)


def _device(module: Any) -> torch.device:
    return getattr(module, "device", torch.device("cpu"))
