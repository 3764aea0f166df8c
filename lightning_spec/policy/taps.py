"""Taps: copies of the policy's intermediate features that a draft trains on, taken while the policy runs."""

from __future__ import annotations

from collections.abc import Sequence
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


class TapRecorder:
    """Records the residual stream before the given layers at every forward pass of a policy.

    Id k is the stream *before* layer k, transformers' `hidden_states[k]`; 0 is the embedding, and the number of layers
    L is the output of the last layer before the final norm (which transformers does not return).

    Only what runs inside the model's own forward is recorded: a layer that activation recompute runs again in
    backward does not record a second time. A forward pass replaces what an earlier one left.

        with TapRecorder(policy, (2, 4, 6)) as taps:
            hidden = policy(tokens, positions, lengths)
            features = taps.take().features
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        policy = unwrap(model)
        last = policy.config.num_layers
        ids = tuple(layer_ids)
        if len(set(ids)) != len(ids) or not ids:
            raise ConfigError(
                "tap layers collide", found=list(ids), needed="distinct layer ids", key="draft.aux_layer_ids"
            )
        if any(k < 0 or k > last for k in ids):
            raise ConfigError(
                "tap layer out of range", found=list(ids), needed=f"ids from 0 to {last}", key="draft.aux_layer_ids"
            )
        self.layer_ids = tuple(sorted(ids))
        self.enabled = True
        """False: forward passes are not recorded (scoring, validation), so nothing outlives them."""
        self._recording = False
        self._features: dict[int, Tensor] = {}
        self._embeddings: Tensor | None = None
        self._hooks = [
            policy.register_forward_pre_hook(self._start),
            policy.register_forward_hook(self._stop, always_call=True),
            policy.embedding.register_forward_hook(self._save_embeddings),
        ]
        layers = {layer.layer_number - 1: layer for layer in policy.decoder.layers}
        layers[last] = policy.decoder.final_layernorm
        for k in self.layer_ids:
            self._hooks.append(layers[k].register_forward_pre_hook(self._saver(k), with_kwargs=True))

    def take(self) -> Taps:
        """The last forward pass's taps; forgets them, so that they live no longer than their user."""
        missing = [k for k in self.layer_ids if k not in self._features]
        if missing or self._embeddings is None:
            raise RuntimeError(f"no forward pass has been recorded since the last take() (layers {missing or 'all'})")
        ordered = [self._features[k] for k in self.layer_ids]
        taps = Taps(torch.cat(ordered, dim=-1) if len(ordered) > 1 else ordered[0], self._embeddings)
        self._forget()
        return taps

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
        self._features.clear()
        self._embeddings = None

    def _start(self, module: nn.Module, args: Any) -> None:
        self._forget()
        self._recording = self.enabled

    def _stop(self, module: nn.Module, args: Any, output: Any) -> None:
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
