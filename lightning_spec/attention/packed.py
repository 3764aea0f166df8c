"""Causal attention inside each document of a packed batch: the *trunk* of a draft, and the policy's attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_spec.attention import layout
from lightning_spec.attention.attend import Work, attend, attend_backward


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of a packed batch; rows see rows of their own document only.

    Args:
        q: [T, H, D];  k, v: [T, K, D], K divides H.
        lengths: rows of each document, in order; they sum to T. Lengths 0 and 1 are fine.
        scale: factor on the logits; D ** -0.5 by default.
        window: row t sees row s when t - s < window; None for no limit.

    Returns:
        [T, H, D] in the dtype of q. Differentiable once in q, k and v; saves these, the output and the log-sum-exp.

    Raises:
        ValueError: shapes that do not fit together, or a window below 1.
    """
    check_shapes(q, k, v, lengths, q.shape[0], window)
    work = Work.of_runs(layout.whole_documents(tuple(lengths)), k.shape[0], window=window)
    return _Packed.apply(q, k, v, work, q.shape[-1] ** -0.5 if scale is None else float(scale))


def check_shapes(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], rows: int, window: int | None) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q [T, H, D] and k, v [T, K, D] do not fit: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {k.shape[1]} kv heads")
    if sum(lengths) != k.shape[0] or any(length < 0 for length in lengths):
        raise ValueError(f"lengths sum to {sum(lengths)} and must be >= 0, the trunk has {k.shape[0]} rows")
    if q.shape[0] != rows:
        raise ValueError(f"q has {q.shape[0]} rows, expected {rows}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, found {window}")


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: Work, scale: float) -> Tensor:
        out, lse = attend(q, k, v, work, scale=scale)
        out = out.to(q.dtype).contiguous()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.work, ctx.scale = work, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = attend_backward(grad, q, k, v, out, lse, ctx.work, scale=ctx.scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None
