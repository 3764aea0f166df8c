"""Taps: copies of the policy's intermediate features that a draft trains on, taken while the policy runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_spec.errors import ConfigError
from lightning_spec.policy.weights import unwrap


@dataclass(frozen=True, slots=True)
class Taps:
    """Of one forward pass, detached. They may share memory with the policy's activations: never write into them."""

    features: Tensor
    """[T, n * C], the tapped layers' features side by side, ascending layer id."""
    embeddings: Tensor
    """[T, C], the input embedding of each token."""


@dataclass(frozen=True, slots=True)
class TapParts:
    """What one chunk of the model has of the taps of one forward pass, as its residual stream holds the rows.

    Under sequence parallelism these are this rank's rows of the padded micro-batch. Detached, as Taps.
    """

    features: dict[int, Tensor]
    """[rows, C] by layer id, ascending; the ids whose layer is in this chunk."""
    embeddings: Tensor | None
    """[rows, C] on the chunk that holds the embedding."""


def side_by_side(layers: Sequence[Tensor], like: Tensor) -> Tensor:
    """[T, n * C] of n tensors [T, C]; without any [T, 0], of the type and place of `like` [T, .]."""
    if len(layers) == 1:
        return layers[0]
    return torch.cat(tuple(layers), -1) if layers else like.new_empty(like.shape[0], 0)


def tap_owner(layout: Sequence[int], ids: Iterable[int]) -> dict[int, int]:
    """The virtual stage that records each tap: the one whose layer reads it, or the last one for the final norm's.

    Args:
        layout: decoder layers of each virtual stage, in order.
    """
    stages = [stage for stage, count in enumerate(layout) for _ in range(count)] + [len(layout) - 1]
    return {k: stages[k] for k in ids}


def check_layer_ids(ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The ids in ascending order; ConfigError where they collide or a policy of `num_layers` layers lacks one."""
    key = "draft.aux_layer_ids"
    if not ids:
        raise ConfigError("no tap layers", found=list(ids), needed="at least one layer id", key=key)
    if len(set(ids)) != len(ids):
        raise ConfigError("tap layers collide", found=list(ids), needed="distinct layer ids", key=key)
    if any(k < 0 or k > num_layers for k in ids):
        raise ConfigError("tap layer out of range", found=list(ids), needed=f"ids from 0 to {num_layers}", key=key)
    return tuple(sorted(ids))


class TapRecorder:
    """Records the residual stream before the given layers at every forward pass of a policy, or of one chunk of it.

    Id k is the stream *before* layer k, transformers' `hidden_states[k]`; 0 is the embedding, and the number of layers
    L is the output of the last layer before the final norm (which transformers does not return). Every chunk is given
    the same ids, which are checked against the whole model's layers, and records those that it reads (`tap_owner`).
    Without ids the embeddings are recorded alone.

    Only what runs inside the model's own forward is recorded: a layer that activation recompute runs again in
    backward does not record a second time. A forward pass replaces what an earlier one left.

        with TapRecorder(policy, (2, 4, 6)) as taps:
            hidden = policy(tokens, positions, lengths)
            features = taps.take().features
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        policy = unwrap(model)
        last = policy.config.num_layers
        self.layer_ids = check_layer_ids(layer_ids, last) if layer_ids else ()
        self.enabled = True
        """False: forward passes are not recorded (scoring, validation), so nothing outlives them."""
        self._recording = False
        self._complete = False
        self._features: dict[int, Tensor] = {}
        self._embeddings: Tensor | None = None
        self._hooks = [
            policy.register_forward_pre_hook(self._start),
            policy.register_forward_hook(self._stop, always_call=True),
        ]
        if policy.pre_process:
            self._hooks.append(policy.embedding.register_forward_hook(self._save_embeddings))
        readers: dict[int, nn.Module] = {layer.layer_number - 1: layer for layer in policy.decoder.layers}
        if policy.post_process:
            readers[last] = policy.decoder.final_layernorm
        self.own_ids = tuple(k for k in self.layer_ids if k in readers)
        """The ids that this chunk records."""
        for k in self.own_ids:
            self._hooks.append(readers[k].register_forward_pre_hook(self._saver(k), with_kwargs=True))

    def take(self) -> Taps:
        """The last forward pass's taps of a model that is whole; forgets them, so that they live no longer than their
        user."""
        parts = self.take_parts()
        missing = [k for k in self.layer_ids if k not in parts.features]
        if missing or parts.embeddings is None:
            raise RuntimeError(
                f"this chunk of the policy records layers {list(self.own_ids)} of {list(self.layer_ids)} and "
                f"{'no' if parts.embeddings is None else 'the'} embeddings: take_parts() gives what it has"
            )
        return Taps(side_by_side(list(parts.features.values()), parts.embeddings), parts.embeddings)

    def take_parts(self) -> TapParts:
        """What this chunk has of the last forward pass's taps; forgets them."""
        if not self._complete:
            raise RuntimeError("no forward pass has been recorded since the last take()")
        parts = TapParts({k: self._features[k] for k in self.own_ids}, self._embeddings)
        self._forget()
        return parts

    def close(self) -> None:
        """Remove the hooks and forget what was recorded. May be called twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._forget()

    def __enter__(self) -> TapRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _forget(self) -> None:
        self._features = {}
        self._embeddings = None
        self._complete = False

    def _start(self, module: nn.Module, args: Any) -> None:
        self._forget()
        self._recording = self.enabled

    def _stop(self, module: nn.Module, args: Any, output: Any) -> None:
        # After a failure torch calls this with no output.
        self._complete = self._recording and output is not None
        self._recording = False

    def _save_embeddings(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self._recording:
            self._embeddings = output.detach().squeeze(1)

    def _saver(self, k: int) -> Any:
        def save(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._recording:
                hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                self._features[k] = hidden.detach().squeeze(1)

        return save
