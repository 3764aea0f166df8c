"""Causal attention inside each document of a packed batch: the *trunk* of a draft, and the policy's attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_spec.attention import kernels, layout
from lightning_spec.attention.layout import Run


class TrunkPlan(NamedTuple):
    """How the trunk part of one call is computed: static facts, no tensors of the batch."""

    runs: tuple[Run, ...]
    offset: int
    window: int | None
    scale: float

    def windowed(self) -> bool:
        """Whether the window hides any key; most windows are wider than the documents."""
        return self.window is not None and layout.longest_reach(self.runs) + self.offset >= self.window


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
    plan = TrunkPlan(
        layout.whole_documents(tuple(lengths)), 0, window, q.shape[-1] ** -0.5 if scale is None else float(scale)
    )
    return _Packed.apply(q, k, v, plan)


def check_shapes(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], rows: int, window: int | None) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q [T, H, D] and k, v [T, K, D] do not fit: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {k.shape[1]} kv heads")
    if q.shape[0] != rows:
        raise ValueError(f"q has {q.shape[0]} rows, expected {rows}")
    if sum(lengths) != k.shape[0] or any(length < 0 for length in lengths):
        raise ValueError(f"lengths sum to {sum(lengths)} and must be >= 0, the trunk has {k.shape[0]} rows")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, found {window}")


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: TrunkPlan) -> Tensor:
        out, lse = trunk_forward(q, k, v, plan)
        out = out.to(q.dtype).contiguous()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = trunk_backward(grad, q, k, v, out, lse, ctx.plan)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def trunk_forward(q: Tensor, k: Tensor, v: Tensor, plan: TrunkPlan) -> tuple[Tensor, Tensor]:
    """Output [R, H, D] and log-sum-exp [R, H] (accumulation dtype) of the trunk keys alone.

    Rows that see no trunk key have output 0 and log-sum-exp -inf. The output may be wider than q, and a view.
    """
    if plan.windowed() or kernels.choose(q) == "plain":
        low, high = layout.intervals(plan.runs, plan.offset, plan.window)
        return kernels.interval_attend(q, k, v, low, high, scale=plan.scale)
    acc = kernels.accumulation_dtype(q.dtype)
    buckets = layout.buckets(plan.runs, mask_keys=not q.is_cuda)
    out, lse = torch.empty(0), torch.empty(0)
    if len(buckets) != 1:
        out, lse = q.new_empty(q.shape, dtype=acc), q.new_empty(q.shape[:2], dtype=acc)
    for bucket in buckets:
        rows, keys = bucket.queries(q.device), bucket.keys(q.device)
        part, part_lse = kernels.flash_attend(
            rows.pad(q), keys.pad(k), keys.pad(v), scale=plan.scale, causal=bucket.causal, key_mask=keys.mask(bucket)
        )
        part, part_lse = rows.unpad(part), rows.unpad(part_lse[..., None])[..., 0]
        if len(buckets) == 1:
            return part, part_lse
        if bucket.causal:  # these come first and cover every row once
            out[rows.index], lse[rows.index] = part.to(acc), part_lse
        else:
            joint = torch.logaddexp(lse[rows.index], part_lse)
            kept = out[rows.index] * (lse[rows.index] - joint).exp()[..., None]
            out[rows.index] = kept.add_(part * (part_lse - joint).exp()[..., None])
            lse[rows.index] = joint
    return out, lse


def trunk_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: TrunkPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) through the trunk keys, from the joint `out` and `lse`; may be wider than q, k, v."""
    if plan.windowed() or kernels.choose(q) == "plain":
        low, high = layout.intervals(plan.runs, plan.offset, plan.window)
        return kernels.interval_attend_backward(grad, q, k, v, out, lse, low, high, scale=plan.scale)
    acc = kernels.accumulation_dtype(q.dtype)
    buckets = layout.buckets(plan.runs, mask_keys=not q.is_cuda)
    alone = len(buckets) == 1 and len(buckets[0].queries(q.device)) == q.shape[0] == k.shape[0]
    dq, dk, dv = (x.new_zeros(0 if alone else x.shape, dtype=acc) for x in (q, k, v))
    for bucket in buckets:
        rows, keys = bucket.queries(q.device), bucket.keys(q.device)
        parts = kernels.flash_attend_backward(
            rows.pad(grad, zero=True),
            rows.pad(q),
            keys.pad(k),
            keys.pad(v),
            rows.pad(out),
            rows.pad(lse[..., None])[..., 0],
            scale=plan.scale,
            causal=bucket.causal,
            key_mask=keys.mask(bucket),
        )
        if alone:
            return rows.unpad(parts[0]).to(acc), keys.unpad(parts[1]).to(acc), keys.unpad(parts[2]).to(acc)
        rows.add(dq, parts[0])
        keys.add(dk, parts[1])
        keys.add(dv, parts[2])
    return dq, dk, dv
