"""Checkpoints of the strategy as directories: what goes in, and how Lightning's own dictionary is shared and split.

A policy's tensors go in under Hugging Face's names and in its shapes, its optimiser state too, so that a checkpoint
loads at any tensor, pipeline, context, expert and data parallel sizes. A draft goes in whole, from the ranks that host
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_spec.parallel.checkpoint import Contents, load_checkpoint, remove_checkpoint, save_checkpoint
from lightning_spec.parallel.optimizer import JointOptimizer
from lightning_spec.parallel.random_state import random_states, restore_random_states
from lightning_spec.parallel.sharded import NamedPieces, Piece
from lightning_spec.policy import PolicyModel, local_tensors
from strategies.processes import MegatronProcesses
from strategies.wrap import parts_of

# Entries of Lightning's checkpoint that are the same on every rank; everything else may differ between data ranks.
_SHARED_KEYS = ("epoch", "global_step", "pytorch-lightning_version", "lr_schedulers", "optimizer_states")
_SEED = "lightning_spec.step_seed"
_SHARED_MARKS = ("hparams", "hyper_parameters")


class CheckpointedStrategy(MegatronProcesses):
    """Saves and loads module, optimizer, random states and Lightning's dictionary through `lightning_spec.parallel`."""

    precision: str = "fp32"
    _resumed_random_states: dict[str, Any] | None = None
    _step_seed: int | None = None

    @property
    def _module(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _joint(self) -> JointOptimizer:
        (optimizer,) = self.optimizers
        assert isinstance(optimizer, JointOptimizer)
        return optimizer

    @override
    def on_train_start(self) -> None:
        if self._step_seed is None:
            self._step_seed = int(self.broadcast(torch.initial_seed()))
        # Here, not at load: in between, Lightning makes data iterators, which draw from the generators.
        if self._resumed_random_states is not None:
            restore_random_states(self._resumed_random_states)
            self._resumed_random_states = None

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    def _pieces(self, *, optimizer: bool) -> NamedPieces:
        module = self._module
        policy, draft = getattr(module, "policy", None), getattr(module, "draft", None)
        chunks = [part for part in parts_of(policy) if isinstance(part, PolicyModel)]
        pieces = [piece for chunk in chunks for piece in _policy_pieces(chunk)]
        done = (*(["policy."] if chunks else []), *([] if parts_of(draft) else ["draft."]))
        for name, tensor in module.state_dict().items():
            if isinstance(tensor, Tensor) and not name.startswith(done):
                pieces.append((f"model.{name}", Piece.whole(tensor)))
        return [*pieces, *(self._joint.pieces() if optimizer else ())]

    def _fingerprint(self) -> dict[str, Any]:
        describe = getattr(self._module, "fingerprint", None)
        return {**(describe() if describe else {}), "precision": self.precision}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint directory; collective over the world. Atomic: see `lightning_spec.parallel.checkpoint`."""
        folder = Path(self.broadcast(str(filepath)))
        checkpoint = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        local = {key: value for key, value in checkpoint.items() if not _is_shared(key)}
        contents = Contents(
            pieces=self._pieces(optimizer="optimizer_states" in checkpoint),
            shared={**checkpoint, _SEED: self._step_seed},
            local={"lightning": local, "random": random_states()},
            fingerprint=self._fingerprint(),
            step=int(checkpoint.get("global_step", 0)),
        )
        save_checkpoint(folder, contents, self.data)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load tensors in place and return the rest for Lightning; collective over the world.

        `weights_only` defaults to False: Lightning drops the user's choice on this path, and torch's default refuses
        the paths and configuration nodes that callbacks and hyper-parameters hold.
        """
        folder = Path(self.broadcast(str(checkpoint_path)))
        fitting = bool(self.optimizers)
        contents = load_checkpoint(
            folder,
            lambda shared: self._pieces(optimizer=fitting and "optimizer_states" in shared),
            self._fingerprint(),
            self.data,
            partial=not fitting,
            weights_only=bool(weights_only),
        )
        if fitting:
            if "optimizer_states" in contents.shared:
                self._joint.load_state_dict(contents.shared["optimizer_states"][0])
            else:
                self._joint.weights_loaded()
            self._step_seed = contents.shared[_SEED]
            self._resumed_random_states = contents.local.get("random")
        # Lightning asks for `state_dict`; the tensors are in place already.
        return {**contents.shared, **contents.local.get("lightning", {}), "state_dict": {}}

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._module.state_dict()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` filled the live tensors."""

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._joint.state_dict()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` filled the live state."""

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            remove_checkpoint(filepath)


def _policy_pieces(chunk: nn.Module) -> Iterator[tuple[str, Piece]]:
    for place, parameter in local_tensors(chunk):
        for piece in place.pieces(parameter):
            yield f"model.policy.{place.name}", piece


def _is_shared(key: str) -> bool:
    return key in _SHARED_KEYS or any(mark in key for mark in _SHARED_MARKS)
