"""SpecCheckpoint: a checkpoint directory every few optimiser steps, of which the newest few stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from lightning_spec.errors import ConfigError
from lightning_spec.parallel.checkpoint import complete_checkpoints


class SpecCheckpoint(Checkpoint):
    """Saves at the end of a batch through the strategy, whose directories are complete or do not count.

    Args:
        dirpath: folder of the checkpoints; each is `step-<optimiser steps>`.
        every_n_steps: cadence in optimiser steps. The last step of the run is saved too.
        keep: how many of the newest complete checkpoints stay; 0 keeps all.

    Lightning places Checkpoint callbacks last, so a checkpoint sees what the other callbacks did with the batch.
    """

    def __init__(self, dirpath: str, every_n_steps: int = 100, keep: int = 2) -> None:
        if every_n_steps < 1:
            raise ConfigError(
                "bad checkpoint cadence", found=every_n_steps, needed="1 or more", key="checkpoint.every_n_steps"
            )
        if keep < 0:
            raise ConfigError(
                "bad number of checkpoints to keep", found=keep, needed="0 or more", key="checkpoint.keep"
            )
        self.dirpath = Path(dirpath)
        self.every_n_steps = every_n_steps
        self.keep = keep
        self._saved_step = -1

    def path(self, step: int) -> Path:
        return self.dirpath / f"step-{step:08d}"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning's restart logic expects batch-end saves: from one in `on_train_epoch_end` it trains a batch too many
        # of the finished epoch. From one at an epoch's last batch it skips the next `on_train_epoch_start`, so whoever
        # prepares an epoch's data there must also do it when the data is asked for (RolloutBuffer.refill).
        step = trainer.global_step
        last = step == trainer.max_steps or trainer.should_stop
        if step == self._saved_step or not (last or step % self.every_n_steps == 0):
            return
        self._saved_step = step
        trainer.save_checkpoint(self.path(step), weights_only=False)
        self._rotate(trainer)

    def _rotate(self, trainer: L.Trainer) -> None:
        if not self.keep:
            return
        # Decided by one rank: the others' views of a shared file system may lag.
        old = trainer.strategy.broadcast([str(p) for p in complete_checkpoints(self.dirpath)[: -self.keep]])
        for path in old:
            trainer.strategy.remove_checkpoint(path)
