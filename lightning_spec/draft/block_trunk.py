"""Trunk keys of a block drafter, and the sums of gradients that a run over a micro-batch forms chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_spec.draft.block import BlockDraft


class Sums:
    """Sums of gradients in float32 (float64 for float64) of the parameters that are trained, if any are."""

    def __init__(self, draft: nn.Module) -> None:
        on = torch.is_grad_enabled()
        self.parameters = [p for p in draft.parameters() if p.requires_grad and on]
        self._sums = [torch.zeros_like(p, dtype=wide(p.dtype)) for p in self.parameters]

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def of(self, parameter: Tensor) -> Tensor | None:
        """The sum of one parameter's gradients, to be added to; None where it is not trained."""
        return next((total for p, total in zip(self.parameters, self._sums, strict=True) if p is parameter), None)

    def backward(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor], leaves: Sequence[Tensor], share: bool = True
    ) -> list[Tensor | None]:
        """Add what `grads` of `outputs` give the parameters (unless `share` is False, where another rank adds the
        same); returns the gradients of `leaves`."""
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        if not pairs:
            return [None] * len(leaves)
        made, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(made, [*leaves, *self.parameters], given, allow_unused=True)
        for total, grad in zip(self._sums, found[len(leaves) :], strict=True):
            if grad is not None and share:
                total += grad
        return list(found[: len(leaves)])

    def take(self) -> list[tuple[Tensor, torch.dtype]]:
        """(gradient, the parameter's dtype) of every parameter."""
        return [(total, p.dtype) for p, total in zip(self.parameters, self._sums, strict=True)]


class Trunk:
    """Trunk keys and values of the rows held here. Of more rows than `size` they are made in pieces, and once more for
    the backward."""

    def __init__(self, draft: BlockDraft, features: Tensor, positions: Tensor, sums: Sums, size: int) -> None:
        self.draft, self.features, self.positions, self.sums = draft, features, positions, sums
        count = features.shape[0]
        self.pieces = [slice(first, min(first + size, count)) for first in range(0, count, size)] or [slice(0, 0)]
        self._kept: list[Tensor] | None = None

    def keys(self) -> list[Tensor]:
        """[T_r, K, D] each: k and v of layer 0, then of layer 1, ...; without a graph."""
        keep = bool(self.sums) and len(self.pieces) == 1
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
            self.sums.backward(made, [g[piece].to(k.dtype) for g, k in zip(grads, made, strict=True)], [])

    def _make(self, piece: slice) -> list[Tensor]:
        fused = self.draft.fuse(self.features[piece])
        return [tensor for pair in self.draft.trunk(fused, self.positions[piece]) for tensor in pair]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in."""
    return torch.promote_types(dtype, torch.float32)
