"""The buffer between generation and training: the Rollout callback fills it, the loader reads it once.

Lightning makes its loaders and their iterators before the first rollout exists, and fetches one batch ahead from a
loader that has no length. So the buffer is itself a *sized* loader that reads lazily: what training sees is what the
callback put in after `on_train_epoch_start`, sampled from the current weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning_spec.batch import StepBatch
from lightning_spec.errors import SpecError
from lightning_spec.recorded import rollout_from_dict, rollout_to_dict


class EmptyBufferError(SpecError):
    """A loader was asked for rollouts that nobody has made."""


class StateElsewhere:
    """A loader whose position is saved by its DataModule.

    Lightning saves the state of loaders from rank 0 alone, and warns about loaders without one: so there is one, empty.
    """

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: PromptData.load_state_dict does it, for each data-parallel rank."""


class RolloutBuffer(StateElsewhere):
    """A sized, single-use loader of StepBatches.

    Args:
        updates_per_rollout: optimiser steps made from one rollout phase; the loader's length, and the number of
            batches that `set` takes. It may be changed before training starts.
        name: used in errors.
    """

    def __init__(self, updates_per_rollout: int = 1, name: str = "train") -> None:
        self.updates_per_rollout = updates_per_rollout
        self.name = name
        self.refill: Callable[[], None] | None = None
        """Called when a batch is asked for and none is left; it must call `set`. The Rollout callback puts its phase
        here: resuming from a checkpoint of an epoch's last batch, Lightning 2.6.6 starts the next epoch without
        calling `on_train_epoch_start`."""
        self._batches: list[StepBatch] = []
        self._next = 0

    def set(self, batches: Sequence[StepBatch]) -> None:
        """Replace the content with one phase's batches, one for each optimiser step on this data-parallel rank."""
        if len(batches) != self.updates_per_rollout:
            raise ValueError(
                f"the {self.name} buffer holds {self.updates_per_rollout} batches a phase, got {len(batches)}"
            )
        self._batches, self._next = list(batches), 0

    @property
    def remaining(self) -> int:
        """Batches not yet handed out; more than 0 on resuming inside a phase, and then no new rollouts are due."""
        return len(self._batches) - self._next

    def __len__(self) -> int:
        return self.updates_per_rollout

    def __iter__(self) -> Iterator[StepBatch]:
        # Resuming inside an epoch, Lightning counts the batches already done and stops at the length by itself.
        for _ in range(self.updates_per_rollout):
            if self.remaining <= 0 and self.refill is not None:
                self.refill()
            if self.remaining <= 0:
                raise EmptyBufferError(
                    f"the {self.name} rollout buffer is empty: mode `rollouts` needs a Rollout callback that fills it "
                    "before each epoch; a phase is never used twice"
                )
            batch = self._batches[self._next]
            self._next += 1
            yield batch

    @property
    def pending(self) -> list[StepBatch]:
        """The batches not yet handed out."""
        return self._batches[self._next :]

    def save_phase(self) -> dict[str, Any]:
        """What is left of the phase, as plain data. Empty between phases, so checkpoints there stay small."""
        return {
            "batches": [
                {"version": batch.version, "rollouts": [rollout_to_dict(r) for r in batch.rollouts]}
                for batch in self.pending
            ]
        }

    def load_phase(self, state: dict[str, Any]) -> None:
        """Inverse of `save_phase`; the batches' metrics are not part of it."""
        self._batches = [
            StepBatch([rollout_from_dict(row) for row in item["rollouts"]], version=item["version"])
            for item in state["batches"]
        ]
        self._next = 0
