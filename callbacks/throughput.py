"""Seconds of updates and validations, beside those of rollout and refit that the rollout callback measures."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from lightning_spec.batch import StepBatch


class ThroughputCallback(pl.Callback):
    """Logs `time/update` and `train/tokens_per_second` of each step, and `time/validation` of each validation.

    Seconds are this process's (rank 0's in the log). An update is the strategy's whole step: forward, backward,
    gradient reduction and optimiser. Tokens are those of this rank's sequences, prompts included.
    """

    def __init__(self) -> None:
        self._update_began = 0.0
        self._validation_began = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: StepBatch, batch_idx: int
    ) -> None:
        self._update_began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        seconds = time.perf_counter() - self._update_began
        tokens = sum(rollout.length for rollout in batch.rollouts)
        values = {"time/update": seconds, "train/tokens_per_second": tokens / seconds if seconds else 0.0}
        pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1, rank_zero_only=True)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        # self.log is closed in this hook; the loggers are open.
        seconds = time.perf_counter() - self._validation_began
        for logger in trainer.loggers:
            logger.log_metrics({"time/validation": seconds}, step=trainer.global_step)
