"""Attention of block drafters (DFlash, DSpark): a block of B slots at each anchor sees the trunk before it and itself.

Anchor a is a row of the trunk; slot o of its block stands at position a + o. It sees (SEMANTICS.md section 2)
    trunk rows s <= a - 1 of its document with (a + o) - s < window, and
    slots o' of its own block: all of them, or o' <= o with `causal`; with a window those with |o - o'| < window
(vLLM makes a window symmetric where attention is not causal, so the same is trained and served; it matters for windows
shorter than a block only). Both are one interval of keys a row, and their joint softmax is two calls of `attend`.
Trunk keys are read where they lie: nothing of size A x T is made.

Three places for the trunk: on one device (`block_attention`), split over ranks with keys and values that travel
(`ring_block_attention`), or with *queries* that travel to the owners of the keys (`moved_block_attention`): there are
few blocks and many trunk rows, so that sends far less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_spec.attention.attend import Work, attend, attend_backward, merge_
from lightning_spec.attention.context import Context
from lightning_spec.attention.exchange import RowExchange
from lightning_spec.attention.kernels import accumulation_dtype
from lightning_spec.attention.ring import ring_backward, ring_forward
from lightning_spec.attention.zigzag import Shard


def block_attention(
    q: Tensor,
    trunk_k: Tensor,
    trunk_v: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    anchors: Tensor,
    lengths: Sequence[int],
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of every slot of every block, on one device.

    Args:
        q: [A, B, H, D], rotated at a + o.  block_k, block_v: [A, B, K, D]; K divides H. A may be 0.
        trunk_k, trunk_v: [T, K, D], rotated at their positions.
        anchors: int64 [A], trunk rows, in any order; ascending is fastest. Keep them on the CPU: they are read there.
            An anchor that is the first row of its document sees its block only.
        lengths: rows of each document of the trunk; they sum to T.
        causal: slot o sees slots o' <= o of its block only.
        window: see above; None for no limit.
        scale: factor on the logits; D ** -0.5 by default.

    Returns:
        [A, B, H, D] in the dtype of q. Differentiable once in all five; saves them by reference, the output and the
        log-sum-exp.

    Raises:
        ValueError: shapes that do not fit together, anchors outside of the trunk, a window below 1.
    """
    _check(q, trunk_k, trunk_v, block_k, block_v, anchors, sum(lengths), sum(lengths), window)
    work = _trunk_work(_bytes(anchors), q.shape[1], tuple(lengths), window)
    return _attend_blocks(_OneDevice(work), q, trunk_k, trunk_v, block_k, block_v, causal, window, scale)


def ring_block_attention(
    q: Tensor,
    trunk_k: Tensor,
    trunk_v: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    anchors: Tensor,
    shard: Shard,
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """`block_attention` with the trunk split over the ranks of `shard`: its keys and values travel around the ring.

    Args:
        q, block_k, block_v: of this rank's own anchors; A differs by rank and may be 0.
        trunk_k, trunk_v: [T_r, K, D], the trunk rows of this rank.
        anchors: int64 [A], *global* trunk rows of this rank's blocks; they need not be rows that this rank holds.
        shard: the layout and the group. All ranks must call, and must run the backward.
    """
    _check(q, trunk_k, trunk_v, block_k, block_v, anchors, shard.rows.numel(), shard.total, window)
    key, slots = _bytes(anchors), q.shape[1]

    def make() -> list[Work]:
        low, high = trunk_intervals(anchors, slots, shard.lengths, window)
        context = shard.context
        return [Work.among(low, high, shard.layout.rows(context.next(-step))) for step in range(context.size)]

    works = shard.remember(("blocks on the ring", key, slots, window), make)
    return _attend_blocks(_Ring(works, shard.context), q, trunk_k, trunk_v, block_k, block_v, causal, window, scale)


def moved_block_attention(
    q: Tensor,
    trunk_k: Tensor,
    trunk_v: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    anchors: Tensor,
    shard: Shard,
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
    everyone: Sequence[Tensor] | None = None,
) -> Tensor:
    """`ring_block_attention` by moving queries: each goes to the ranks that hold keys it sees; partial results return.

    Sent per slot and rank that it goes to: H D elements there and H (D + 1) float32 back; in the backward 2 H D
    elements and H float32 there, H D float32 back. Keys and values never move; each rank keeps the queries it got for
    the backward. Arguments as in `ring_block_attention`, and

    Args:
        everyone: the anchors of every rank (`anchors` is everyone[rank]), where the caller knows them; None gathers
            them here, which is two small messages a call.
    """
    _check(q, trunk_k, trunk_v, block_k, block_v, anchors, shard.rows.numel(), shard.total, window)
    everyone = _gathered(anchors, q.device, shard.context) if everyone is None else [x.cpu() for x in everyone]
    if len(everyone) != shard.size or not torch.equal(everyone[shard.rank], anchors.cpu()):
        raise ValueError("everyone must hold the anchors of each rank, and those of this rank where they belong")
    key = ("moved blocks", tuple(map(_bytes, everyone)), q.shape[1], window)
    moved = shard.remember(key, lambda: _Moved(everyone, q.shape[1], window, shard))
    return _attend_blocks(moved, q, trunk_k, trunk_v, block_k, block_v, causal, window, scale)


def trunk_intervals(
    anchors: Tensor, slots: int, lengths: Sequence[int], window: int | None = None
) -> tuple[Tensor, Tensor]:
    """(low, high), int64 [A * slots] each: the global trunk rows that slot o of anchor a sees, row a * slots + o."""
    anchors = anchors.detach().cpu()
    starts = torch.tensor([0, *lengths]).cumsum(0)
    low = starts[torch.searchsorted(starts[1:], anchors, right=True)][:, None].expand(-1, slots)
    if window is not None:
        low = torch.maximum(low, anchors[:, None] + torch.arange(slots) - window + 1)
    high = anchors[:, None].expand(-1, slots)
    return torch.minimum(low, high).flatten(), high.flatten()


@lru_cache(maxsize=64)
def slot_work(blocks: int, slots: int, causal: bool, window: int | None) -> Work:
    """What each slot sees of the `blocks * slots` slots: those of its block that the mask allows."""
    rows = blocks * slots
    if window is not None and window < slots:
        first, o = torch.arange(blocks)[:, None] * slots, torch.arange(slots)
        ends = o + 1 if causal else (o + window).clamp(max=slots)
        return Work.of_intervals((first + (o - window + 1).clamp(min=0)).flatten(), (first + ends).flatten(), rows)
    items = tuple((first, slots, first, slots) for first in range(0, rows, slots)) if rows else ()
    return Work(rows, rows, causal=items) if causal else Work(rows, rows, full=items)


class _Trunk(Protocol):
    """Where the trunk's keys and values are, and how they meet the queries [R, H, D]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """out [R, H, D] and lse [R, H] over the trunk, in the accumulation dtype; and a tensor to keep."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kept: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
        """dq [R, H, D] from the joint out and lse, and a function that waits for this rank's (dk, dv)."""


class _OneDevice:
    def __init__(self, work: Work) -> None:
        self.work = work

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor | None]:
        return *attend(q, k, v, self.work, scale=scale), None

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kept: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
        dq, dk, dv = attend_backward(grad, q, k, v, out, lse, self.work, scale=scale)
        return dq, lambda: (dk, dv)


class _Ring:
    def __init__(self, works: Sequence[Work], context: Context) -> None:
        self.works, self.context = works, context

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor | None]:
        return *ring_forward(q, k, v, self.works, self.context, scale=scale), None

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kept: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
        return ring_backward(grad, q, k, v, out, lse, self.works, self.context, scale=scale)


class _Moved:
    """Queries travel to each rank that holds a key they see, sorted by what they see, and partial results return."""

    def __init__(self, everyone: Sequence[Tensor], slots: int, window: int | None, shard: Shard) -> None:
        bounds = [trunk_intervals(anchors, slots, shard.lengths, window) for anchors in everyone]
        low, high = (torch.cat([bound[side] for bound in bounds]) for side in (0, 1))
        have = list(torch.arange(low.numel()).split([anchors.numel() * slots for anchors in everyone]))
        want, self.work = [], Work(0, 0)
        for rank in range(shard.size):
            work = Work.among(low, high, shard.layout.rows(rank))
            first, last = work.intervals()
            seeing = (last > first).nonzero().flatten()
            want.append(seeing[torch.argsort(last[seeing], stable=True)])
            if rank == shard.rank:
                self.work = Work.of_intervals(first[want[rank]], last[want[rank]], work.keys)
        self.exchange = RowExchange(have, want, shard.context)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor | None]:
        acc = accumulation_dtype(q.dtype)
        visiting = self.exchange.apply(q)
        part, part_lse = attend(visiting, k, v, self.work, scale=scale)
        out, lse = q.new_zeros(q.shape, dtype=acc), q.new_full(q.shape[:2], -torch.inf, dtype=acc)
        for rows, result in self._returned(torch.cat((part.to(acc), part_lse.to(acc)[..., None]), dim=-1)):
            merge_(out, lse, result[..., :-1], result[..., -1], rows)
        return out, lse, visiting

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kept: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
        assert kept is not None
        visiting = self.exchange.apply(torch.cat((grad, out), dim=-1))
        visiting_grad, visiting_out = visiting.chunk(2, dim=-1)
        visiting_lse = self.exchange.apply(lse)
        part, dk, dv = attend_backward(
            visiting_grad.contiguous(), kept, k, v, visiting_out.contiguous(), visiting_lse, self.work, scale=scale
        )
        dq = torch.zeros(q.shape, dtype=part.dtype, device=q.device)
        for rows, result in self._returned(part):
            dq[rows] += result
        return dq, lambda: (dk, dv)

    def _returned(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """x [visiting rows, ...] goes back: for each rank, which rows of this rank visited it, and their results."""
        exchange = self.exchange
        arrived = exchange.context.all_to_all(x[exchange.places.to(x.device)], exchange.receive, exchange.send)
        rows = exchange.send_rows.to(x.device)
        return list(zip(rows.split(exchange.send), arrived.split(exchange.send), strict=True))


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        trunk: _Trunk,
        slots: Work,
        scale: float,
        q: Tensor,
        trunk_k: Tensor,
        trunk_v: Tensor,
        block_k: Tensor,
        block_v: Tensor,
    ) -> Tensor:
        rows, k, v = (x.flatten(0, 1) for x in (q, block_k, block_v))
        out, lse, kept = trunk.forward(rows, trunk_k, trunk_v, scale)
        if rows.shape[0]:
            merge_(out, lse, *attend(rows, k, v, slots, scale=scale))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, trunk_k, trunk_v, block_k, block_v, out, lse, kept)
        ctx.trunk, ctx.slots, ctx.scale = trunk, slots, scale
        return out.view(q.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, trunk_k, trunk_v, block_k, block_v, out, lse, kept = ctx.saved_tensors
        rows, k, v, grad = (x.flatten(0, 1) for x in (q, block_k, block_v, grad))
        dq, home = ctx.trunk.backward(grad, rows, trunk_k, trunk_v, out, lse, kept, ctx.scale)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        if rows.shape[0]:
            part, dk, dv = attend_backward(grad, rows, k, v, out, lse, ctx.slots, scale=ctx.scale)
            dq = dq + part
        trunk_dk, trunk_dv = home()
        return (
            *(None, None, None, dq.to(q.dtype).view(q.shape)),
            *(trunk_dk.to(trunk_k.dtype), trunk_dv.to(trunk_v.dtype)),
            *(dk.to(block_k.dtype).view(block_k.shape), dv.to(block_v.dtype).view(block_v.shape)),
        )


def _attend_blocks(
    trunk: _Trunk,
    q: Tensor,
    trunk_k: Tensor,
    trunk_v: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> Tensor:
    slots = slot_work(q.shape[0], q.shape[1], causal, window)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    result: Tensor = _Blocks.apply(trunk, slots, scale, q, trunk_k, trunk_v, block_k, block_v)
    return result


@lru_cache(maxsize=16)
def _trunk_work(anchors: bytes, slots: int, lengths: tuple[int, ...], window: int | None) -> Work:
    """The layers of a draft share it."""
    rows = torch.frombuffer(bytearray(anchors), dtype=torch.int64) if anchors else torch.zeros(0, dtype=torch.int64)
    return Work.of_intervals(*trunk_intervals(rows, slots, lengths, window), sum(lengths))


def _bytes(anchors: Tensor) -> bytes:
    return anchors.detach().cpu().numpy().tobytes()


def _gathered(anchors: Tensor, device: torch.device, context: Context) -> list[Tensor]:
    """The anchors of every rank, on the CPU."""
    if context.size == 1:
        return [anchors.cpu()]
    ones, count = [1] * context.size, anchors.numel()
    counts = context.all_to_all(torch.full((context.size,), count, device=device), ones, ones).tolist()
    everyone = context.all_to_all(anchors.to(device).repeat(context.size), [count] * context.size, counts)
    return list(everyone.cpu().split(counts))


def _check(
    q: Tensor,
    trunk_k: Tensor,
    trunk_v: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    anchors: Tensor,
    held: int,
    total: int,
    window: int | None,
) -> None:
    shapes = [tuple(x.shape) for x in (q, trunk_k, trunk_v, block_k, block_v)]
    fits = q.dim() == 4 and trunk_k.dim() == 3 and trunk_k.shape == trunk_v.shape and q.shape[-1] == trunk_k.shape[-1]
    if not fits or not block_k.shape == block_v.shape == (*q.shape[:2], *trunk_k.shape[1:]) or q.shape[1] < 1:
        raise ValueError(f"q [A, B, H, D], trunk [T, K, D] twice and block [A, B, K, D] twice do not fit: {shapes}")
    if q.shape[2] % trunk_k.shape[1]:
        raise ValueError(f"{q.shape[2]} query heads do not divide into {trunk_k.shape[1]} kv heads")
    if trunk_k.shape[0] != held:
        raise ValueError(f"the trunk has {trunk_k.shape[0]} rows, expected {held}")
    if anchors.shape != q.shape[:1] or anchors.dtype != torch.int64:
        raise ValueError(f"anchors must be int64 [{q.shape[0]}], found {anchors.dtype} {tuple(anchors.shape)}")
    if anchors.numel() and (anchors.min() < 0 or anchors.max() >= total):
        raise ValueError(f"anchors must be trunk rows 0..{total - 1}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, found {window}")
