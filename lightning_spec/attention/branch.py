"""Branch attention: one softmax over the trunk (causal, shared by all passes) and the row's own branch (SEMANTICS 3).

Pass i of an EAGLE-3 draft with test-time-training passes sees, at anchor row t, the trunk keys of rows s <= t of its
document and the i keys k[t, 1..i] that the row itself made in passes 1..i. The trunk goes through a flash kernel that
returns its log-sum-exp; the branch's i logits a row are merged into it exactly. The backward starts from the *merged*
output and log-sum-exp: merging outside of an attention function loses the gradient of the log-sum-exp, which leaves
the forward exact and dq wrong by a fifth. Source: arXiv 2609.07108 (branch attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_spec.attention import layout
from lightning_spec.attention.attend import Work, attend, attend_backward, kernel_of, triton
from lightning_spec.attention.packed import check_shapes

_BRANCH_CHUNK = 1 << 17
"""Elements of q in one chunk of rows of the branch arithmetic on a CPU: its temporaries then stay in cache."""


def branch_attention(
    q: Tensor,
    trunk_k: Tensor,
    trunk_v: Tensor,
    branch_k: Sequence[Tensor],
    branch_v: Sequence[Tensor],
    lengths: Sequence[int],
    *,
    scale: float | None = None,
    window: int | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Attention of pass i = len(branch_k): trunk keys of the same document up to the row, and the row's branch.

    Args:
        q: [R, H, D], rotated at position t + i. R = T, or the number of `rows`.
        trunk_k, trunk_v: [T, K, D] of pass 0, rotated at t; K divides H.
        branch_k, branch_v: i tensors [R, K, D], of passes 1..i (the last is this pass's own), rotated at t + j.
        lengths: rows of each document of the trunk; they sum to T.
        scale: factor on the logits; D ** -0.5 by default.
        window: sliding window W: trunk key s is seen when (t + i) - s < W, branch key j when i - j < W.
        rows: [R] int64, strictly ascending trunk rows t that the rows of q and of the branch belong to; None: all T.
            Pick them once, e.g. the rows that pass 0 is scored on, and use them in all passes.

    Returns:
        [R, H, D] in the dtype of q. Differentiable once in q, trunk and branch; saves its inputs by reference, the
        output and the log-sum-exp.

    Raises:
        ValueError: shapes that do not fit together, rows not ascending or out of range, a window below 1.
    """
    check_branch(q, trunk_k, trunk_v, branch_k, branch_v, lengths, window, rows)
    runs = layout.whole_documents(tuple(lengths)) if rows is None else layout.selected_runs(lengths, rows)
    passes = len(branch_k)
    work = Work.of_runs(runs, trunk_k.shape[0], passes, window)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    # Branch keys outside of the window get no gradient and need not be held.
    first = 0 if window is None else max(0, passes - window)
    return _Branch.apply(work, scale, q, trunk_k, trunk_v, *branch_k[first:], *branch_v[first:])


def check_branch(
    q: Tensor,
    trunk_k: Tensor,
    trunk_v: Tensor,
    branch_k: Sequence[Tensor],
    branch_v: Sequence[Tensor],
    lengths: Sequence[int],
    window: int | None,
    rows: Tensor | None,
) -> None:
    """Raises ValueError where the arguments of `branch_attention` do not fit together."""
    total = trunk_k.shape[0]
    check_shapes(q, trunk_k, trunk_v, lengths, total if rows is None else rows.numel(), window)
    shape = (q.shape[0], *trunk_k.shape[1:])
    if len(branch_k) != len(branch_v) or any(x.shape != shape for x in (*branch_k, *branch_v)):
        found = [tuple(x.shape) for x in (*branch_k, *branch_v)]
        raise ValueError(f"branch_k and branch_v must be equally many tensors of shape {shape}, found {found}")
    if rows is not None and rows.numel() and (bool((rows.diff() <= 0).any()) or rows[0] < 0 or rows[-1] >= total):
        raise ValueError(f"rows must be strictly ascending and inside 0..{total - 1}")


class _Branch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, work: Work, scale: float, q: Tensor, trunk_k: Tensor, trunk_v: Tensor, *branch: Tensor
    ) -> Tensor:
        half = len(branch) // 2
        branch_k, branch_v = branch[:half], branch[half:]
        if half and kernel_of(q, work) == "triton":  # one kernel: the merge is its epilogue
            out, lse = triton().attend(q, trunk_k, trunk_v, work, scale=scale, branch_k=branch_k, branch_v=branch_v)
        else:
            out, lse = attend(q, trunk_k, trunk_v, work, scale=scale)
            if half:
                out, lse = merge_branch(q, branch_k, branch_v, out, lse, scale)
        out = out.to(q.dtype).contiguous()
        ctx.save_for_backward(q, trunk_k, trunk_v, out, lse, *branch)
        ctx.work, ctx.scale = work, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, trunk_k, trunk_v, out, lse, *branch = ctx.saved_tensors
        half = len(branch) // 2
        branch_k, branch_v = branch[:half], branch[half:]
        given = (grad, q, trunk_k, trunk_v, out, lse, ctx.work)
        if half and kernel_of(q, ctx.work) == "triton":
            dq, dk, dv, grads = triton().attend_backward(*given, scale=ctx.scale, branch_k=branch_k, branch_v=branch_v)
        else:
            dq, dk, dv = attend_backward(*given, scale=ctx.scale)
            grads = branch_backward(grad, q, branch_k, branch_v, out, lse, dq, ctx.scale)
        return None, None, dq.to(q.dtype), dk.to(trunk_k.dtype), dv.to(trunk_v.dtype), *grads


def merge_branch(
    q: Tensor, branch_k: Sequence[Tensor], branch_v: Sequence[Tensor], out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Merge the branch keys into the trunk's (out, lse); returns the joint ones, the output in the dtype of q."""
    acc = lse.dtype
    joint = torch.empty_like(q)
    joint_lse = torch.empty_like(lse)
    for rows in _row_chunks(q):
        q_rows = _grouped(q[rows].to(acc), branch_k[0].shape[1])
        logits = [_grouped(lse[rows, :, None], branch_k[0].shape[1])]
        logits += [(q_rows * k[rows, :, None].to(acc)).sum(-1, keepdim=True) * scale for k in branch_k]
        stacked = torch.cat(logits, dim=-1)
        total = torch.logsumexp(stacked, dim=-1, keepdim=True)
        weights = (stacked - total).exp_()
        merged = _grouped(out[rows].to(acc), branch_k[0].shape[1]) * weights[..., :1]
        for j, v in enumerate(branch_v, start=1):
            merged.addcmul_(weights[..., j : j + 1], v[rows, :, None].to(acc))
        joint[rows] = merged.flatten(1, 2).to(q.dtype)
        joint_lse[rows] = total.flatten(1)
    return joint, joint_lse


def branch_backward(
    grad: Tensor,
    q: Tensor,
    branch_k: Sequence[Tensor],
    branch_v: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    scale: float,
) -> list[Tensor]:
    """Gradients of branch_k then branch_v; adds the branch's part to `dq` in place."""
    acc = lse.dtype
    grads_k, grads_v = [torch.empty_like(k) for k in branch_k], [torch.empty_like(v) for v in branch_v]
    if not branch_k:
        return []
    kv_heads = branch_k[0].shape[1]
    for rows in _row_chunks(q):
        q_rows, do = _grouped(q[rows].to(acc), kv_heads), _grouped(grad[rows].to(acc), kv_heads)
        delta = (do * _grouped(out[rows].to(acc), kv_heads)).sum(-1, keepdim=True)
        lse_rows = _grouped(lse[rows, :, None], kv_heads)
        dq_rows = _grouped(dq[rows], kv_heads)
        for j, (k, v) in enumerate(zip(branch_k, branch_v, strict=True)):
            k_rows, v_rows = k[rows, :, None].to(acc), v[rows, :, None].to(acc)
            weight = ((q_rows * k_rows).sum(-1, keepdim=True) * scale).sub_(lse_rows).exp_()
            grads_v[j][rows] = (weight * do).sum(2).to(v.dtype)
            ds = (do * v_rows).sum(-1, keepdim=True).sub_(delta).mul_(weight).mul_(scale)
            dq_rows.addcmul_(ds, k_rows)
            grads_k[j][rows] = (ds * q_rows).sum(2).to(k.dtype)
    return grads_k + grads_v


def _row_chunks(q: Tensor) -> list[slice]:
    rows = q.shape[0]
    step = rows if q.device.type != "cpu" else max(1, _BRANCH_CHUNK // (q.shape[1] * q.shape[2]))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, max(step, 1))]


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[rows, H, X] -> [rows, K, g, X], a view."""
    return x.unflatten(1, (kv_heads, -1))
