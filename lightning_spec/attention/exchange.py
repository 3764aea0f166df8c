"""Rows that move between context-parallel ranks: by lists, all to everyone, and summed back to their owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_spec.attention.context import Context
from lightning_spec.attention.kernels import accumulation_dtype
from lightning_spec.attention.zigzag import Shard


class RowExchange:
    """Brings rows to the ranks that want them: one all-to-all with exact counts, differentiable.

    Args:
        have: for each rank, the row ids it holds, int64, disjoint over ranks and >= 0.
        want: for each rank, the row ids it wants, in any order, repeats allowed. All ranks give the same lists.
        context: the group.

    Raises:
        ValueError: a row is held twice, or wanted and held by nobody.
    """

    def __init__(self, have: Sequence[Tensor], want: Sequence[Tensor], context: Context) -> None:
        if len(have) != context.size or len(want) != context.size:
            raise ValueError(f"{len(have)} lists held and {len(want)} wanted, in a group of {context.size}")
        self.context = context
        held, wanted = torch.cat([x.cpu() for x in have]), torch.cat([x.cpu() for x in want])
        if held.numel() != held.unique().numel() or (held.numel() and held.min() < 0):
            raise ValueError("rows must be held by one rank each, and be >= 0")
        owner = torch.full((1 + int(torch.cat((held, wanted, held.new_zeros(1))).max()),), -1)
        local = owner.clone()
        for rank, rows in enumerate(have):
            owner[rows.cpu()] = rank
            local[rows.cpu()] = torch.arange(rows.numel())
        if wanted.numel() and (wanted.min() < 0 or owner[wanted].min() < 0):
            raise ValueError("a wanted row is held by nobody")
        ranks = range(context.size)
        mine = [rows.cpu()[owner[rows.cpu()] == context.rank] for rows in want]
        self.rows, self.wanted = have[context.rank].numel(), want[context.rank].numel()
        self.send = [rows.numel() for rows in mine]
        self.send_rows = local[torch.cat(mine)]
        """Local rows in the order of sending."""
        source = owner[want[context.rank].cpu()]
        self.receive = [int((source == rank).sum()) for rank in ranks]
        self.places = torch.argsort(source, stable=True)
        """Where each arriving row belongs in the result."""

    def apply(self, x: Tensor) -> Tensor:
        """x [len(have[rank]), ...] -> [len(want[rank]), ...]. All ranks take part, forward and backward.

        The backward is the transposed exchange: gradients return to the rows' owners, those of repeats are summed.
        """
        if x.shape[0] != self.rows:
            raise ValueError(f"this rank has {self.rows} rows, found {x.shape[0]}")
        result: Tensor = _Exchange.apply(x, self)
        return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: RowExchange) -> Tensor:
        ctx.plan = plan
        arrived = plan.context.all_to_all(x[plan.send_rows.to(x.device)], plan.send, plan.receive)
        result = torch.empty_like(arrived)
        result[plan.places.to(x.device)] = arrived
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: RowExchange = ctx.plan
        arrived = plan.context.all_to_all(grad[plan.places.to(grad.device)], plan.receive, plan.send)
        total = grad.new_zeros((plan.rows, *grad.shape[1:]), dtype=accumulation_dtype(grad.dtype))
        total.index_add_(0, plan.send_rows.to(grad.device), arrived.to(total.dtype))
        return total.to(grad.dtype), None


def gather_rows(x: Tensor, shard: Shard) -> Tensor:
    """Every rank's rows [T_r, ...] in global order, [T, ...], on every rank. No gradient.

    Pairwise hops, so that beside the result only one part is held.
    """
    context, layout = shard.context, shard.layout
    if x.shape[0] != shard.rows.numel():
        raise ValueError(f"this rank has {shard.rows.numel()} rows, found {x.shape[0]}")
    x = x.detach().contiguous()
    whole = x.new_empty((layout.total, *x.shape[1:]))
    whole[shard.rows.to(x.device)] = x
    for step in range(1, context.size):
        source = context.next(-step)
        rows = layout.rows(source).to(x.device)
        part = x.new_empty((rows.numel(), *x.shape[1:]))
        context.post([(x, context.next(step))], [(part, source)]).wait()
        whole[rows] = part
    return whole


def reduce_scatter_rows(x: Tensor, shard: Shard) -> Tensor:
    """The sum over ranks of their x [T, ...], of which each rank gets its own rows, [T_r, ...]. No gradient.

    Partial sums travel along the ring, so that beside `x` only two parts are held; each rank sends T - T_next rows.
    Give float32 or float64: sums are made in the dtype of `x`, in an order that depends on the owner of the row.
    """
    context, layout = shard.context, shard.layout
    if x.shape[0] != layout.total:
        raise ValueError(f"all {layout.total} rows are needed, found {x.shape[0]}")
    x = x.detach()
    # The sum for rank d starts at rank d + 1 and ends at d.
    total = x[layout.rows(context.next(-1)).to(x.device)]
    for step in range(2, context.size + 1):
        mine = x[layout.rows(context.next(-step)).to(x.device)]
        arriving = torch.empty_like(mine)
        context.post([(total, context.next())], [(arriving, context.next(-1))]).wait()
        total = mine.add_(arriving)
    return total


def gather_rows_with_grad(x: Tensor, shard: Shard) -> Tensor:
    """`gather_rows` whose backward is `reduce_scatter_rows`, summed in float32 (float64 for float64)."""
    result: Tensor = _Gather.apply(x, shard)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return gather_rows(x, shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = reduce_scatter_rows(grad.to(accumulation_dtype(grad.dtype)), ctx.shard)
        return total.to(grad.dtype), None
