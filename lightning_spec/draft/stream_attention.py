"""Attention of a chunk of anchors over trunk keys that were gathered before and are constants to the chunk.

The gradients of the trunk keys add up over chunks and passes in float32 buffers, beside autograd: as leaves they would
be summed in the keys' own dtype, in as many tensors as there are chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_spec.attention import layout
from lightning_spec.attention.attend import Work, attend, attend_backward
from lightning_spec.attention.branch import branch_backward, merge_branch


class ChunkView:
    """Which trunk keys the anchors of a chunk see.

    Args:
        rows: int64 [R], ascending global rows of the anchors; at least one.
        first: global row at which the first anchor's document begins. Keys before it are never seen.
        lengths: rows of each document.
    """

    def __init__(self, rows: Tensor, first: int, lengths: Sequence[int]) -> None:
        self.rows, self.lengths = rows, lengths
        self.keys = slice(first, int(rows[-1]) + 1)
        self._last: tuple[Tensor, Work] | None = None

    def work(self, index: Tensor) -> Work:
        """Work of the anchors at `index` over the rows `keys` of the trunk; remembered for the same index tensor."""
        if self._last is None or self._last[0] is not index:
            first, last = self.keys.start, self.keys.stop
            runs = [
                replace(run, row=run.row - first, document=run.document - first)
                for run in layout.selected_runs(self.lengths, self.rows[index])
            ]
            self._last = index, Work.of_runs(runs, last - first)
        return self._last[1]


class StreamAttention:
    """`PassAttention` of one layer.

    Args:
        view: the chunk's anchors.
        gradients: (dk, dv), [T, K, D] float32 or float64, to which the trunk's gradients are added; None without grad.
    """

    def __init__(self, view: ChunkView, gradients: tuple[Tensor, Tensor] | None) -> None:
        self.view, self.gradients = view, gradients
        # So that the backward of a pass runs even where the trunk's projections alone are trained.
        self.switch = torch.zeros((), device=view.rows.device, requires_grad=gradients is not None)

    def __call__(
        self,
        q: Tensor,
        trunk_k: Tensor,
        trunk_v: Tensor,
        branch_k: Sequence[Tensor],
        branch_v: Sequence[Tensor],
        rows: Tensor | None,
    ) -> Tensor:
        if rows is None:
            raise ValueError("a chunk has no trunk of its own: its rows must be named")
        out: Tensor = _Chunk.apply(self, self.view.work(rows), trunk_k, trunk_v, self.switch, q, *branch_k, *branch_v)
        return out


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        attention: StreamAttention,
        work: Work,
        trunk_k: Tensor,
        trunk_v: Tensor,
        switch: Tensor,
        q: Tensor,
        *branch: Tensor,
    ) -> Tensor:
        keys, scale, half = attention.view.keys, q.shape[-1] ** -0.5, len(branch) // 2
        out, lse = attend(q, trunk_k[keys], trunk_v[keys], work, scale=scale)
        if half:
            out, lse = merge_branch(q, branch[:half], branch[half:], out, lse, scale)
        out = out.to(q.dtype).contiguous()
        ctx.save_for_backward(trunk_k, trunk_v, q, out, lse, *branch)
        ctx.attention, ctx.work, ctx.scale = attention, work, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        trunk_k, trunk_v, q, out, lse, *branch = ctx.saved_tensors
        keys, half = ctx.attention.view.keys, len(branch) // 2
        d_k, d_v = ctx.attention.gradients
        dq, _, _ = attend_backward(
            grad,
            q,
            trunk_k[keys],
            trunk_v[keys],
            out,
            lse,
            ctx.work,
            scale=ctx.scale,
            into=(d_k[keys], d_v[keys]),
        )
        grads = branch_backward(grad, q, branch[:half], branch[half:], out, lse, dq, ctx.scale)
        return (*(None,) * 4, torch.zeros_like(ctx.attention.switch), dq.to(q.dtype), *grads)
