"""SpecCheckpoint: a checkpoint directory every few optimiser steps, of which the newest few stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from lightning_spec.errors import ConfigError
from lightning_spec.jsonl_logger import JSONLLogger
from lightning_spec.parallel.checkpoint import complete_checkpoints


class SpecCheckpoint(Checkpoint):
    """Saves through the strategy, whose directories are complete or do not count.

    Args:
        dirpath: folder of the checkpoints; each is `step-<optimiser steps>`.
        every_n_steps: cadence in optimiser steps. The last step of the run is saved too.
        keep: how many of the newest complete checkpoints stay; 0 keeps all.

    A resumed run counts a checkpoint's step as done, with all that was measured at it, so nothing of the step may be
    left to do when its checkpoint becomes complete:

    - Where a validation is due at the step, the checkpoint waits for its end. A run killed before that makes the step
      again, from the checkpoint before.
    - Elsewhere it is saved at the batch's end, just before Lightning hands the step's metrics to the loggers. The
      checkpoint holds these metrics, and a resumed run writes them if the killed one did not come to it.

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
        self._waits_for_validation = False
        self._unlogged: dict[str, float] = {}

    def path(self, step: int) -> Path:
        return self.dirpath / f"step-{step:08d}"

    def state_dict(self) -> dict[str, Any]:
        return {"unlogged": dict(self._unlogged)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._unlogged = dict(state_dict.get("unlogged", {}))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_step = trainer.global_step
        unlogged, self._unlogged = self._unlogged, {}
        if unlogged:
            # After the progress callback has cut the file back to the restored step.
            for logger in trainer.loggers:
                if isinstance(logger, JSONLLogger):
                    logger.complete(unlogged)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning's restart logic expects saves here or in a validation: from one in `on_train_epoch_end` it trains a
        # batch too many of the finished epoch. From one here at an epoch's last batch it skips the next
        # `on_train_epoch_start`, so whoever prepares an epoch's data there must also do it when the data is asked for
        # (RolloutBuffer.refill).
        step = trainer.global_step
        last = step == trainer.max_steps or trainer.should_stop
        if last or step % self.every_n_steps == 0:
            self.save_step(trainer)

    def save_step(self, trainer: L.Trainer) -> bool:
        """Save the step that is ending unless it is saved, from a batch's or a validation's last hook. Collective.

        Returns:
            False where the save waits for the validation that is due at the step.
        """
        if trainer.global_step == self._saved_step:
            return True
        if trainer.validating:
            self._waits_for_validation = False
        elif validation_is_due(trainer):
            self._waits_for_validation = True
            return False
        else:
            connector = trainer._logger_connector
            self._unlogged = plain(connector.metrics["log"]) if connector.should_update_logs else {}
        self._save(trainer)
        self._unlogged = {}
        return True

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The validation's metrics are in the loggers' files by now, and the training step's before them.
        if self._waits_for_validation:
            self.save_step(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        self._saved_step = trainer.global_step
        trainer.save_checkpoint(self.path(self._saved_step), weights_only=False)
        self._rotate(trainer)

    def _rotate(self, trainer: L.Trainer) -> None:
        if not self.keep:
            return
        # Decided by one rank: the others' views of a shared file system may lag.
        old = trainer.strategy.broadcast([str(p) for p in complete_checkpoints(self.dirpath)[: -self.keep]])
        for path in old:
            trainer.strategy.remove_checkpoint(path)


def validation_is_due(trainer: L.Trainer) -> bool:
    """Whether Lightning validates after the batch that is just ending."""
    epoch_loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is None or not epoch_loop._should_check_val_fx(fetcher):
        return False
    # Without validation data Lightning runs no hook of a validation; the loop knows once its data is set up.
    epoch_loop.val_loop.setup_data()
    return not epoch_loop.val_loop.skip


def plain(metrics: dict[str, Any]) -> dict[str, float]:
    """Numbers of a logger's metrics."""
    return {name: float(value) for name, value in metrics.items()}
