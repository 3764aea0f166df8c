"""Trunk keys of a block drafter over a micro-batch, and their way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_spec.draft.stream_gradients import Gradients

if TYPE_CHECKING:
    from lightning_spec.draft.block import BlockDraft


class Trunk:
    """Trunk keys and values of the rows held here. Of more rows than `size` they are made in pieces, and once more for
    the backward."""

    def __init__(self, draft: BlockDraft, features: Tensor, positions: Tensor, gradients: Gradients, size: int) -> None:
        self.draft, self.features, self.positions, self.gradients = draft, features, positions, gradients
        count = features.shape[0]
        self.pieces = [slice(first, min(first + size, count)) for first in range(0, count, size)] or [slice(0, 0)]
        self._kept: list[Tensor] | None = None

    def keys(self) -> list[Tensor]:
        """[T_r, K, D] each: k and v of layer 0, then of layer 1, ...; without a graph."""
        keep = bool(self.gradients) and len(self.pieces) == 1
        parts = []
        for piece in self.pieces:
            with torch.set_grad_enabled(keep):
                parts.append(self._make(piece))
        if keep:
            self._kept = parts[0]
        made = parts[0] if len(parts) == 1 else [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        return [tensor.detach() for tensor in made]

    def backward(self, grads: Sequence[Tensor]) -> None:
        """`grads` of what `keys` returned."""
        for piece in self.pieces:
            with torch.enable_grad():
                made = self._kept or self._make(piece)
            self.gradients.backward(made, [g[piece].to(k.dtype) for g, k in zip(grads, made, strict=True)], [])

    def _make(self, piece: slice) -> list[Tensor]:
        fused = self.draft.fuse(self.features[piece])
        return [tensor for pair in self.draft.trunk(fused, self.positions[piece]) for tensor in pair]
