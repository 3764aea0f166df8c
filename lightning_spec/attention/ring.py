"""Attention over packed documents that are split zigzag over the ranks of a context-parallel group (SEMANTICS.md 3).

Queries stay; keys and values (unexpanded kv heads, one buffer, in the dtype of the input) come by block after block,
the next one under way while the current one is computed, and are merged by log-sum-exp. Causal work is trimmed, not
masked: every query row sees one interval of each block. In the backward they come by again and their gradients, in
float32, go home; the branch's backward runs while the last of them are under way. Without windows blocks travel along a
ring; with windows each rank is sent just the rows it sees (`hops`). No rank ever holds all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_spec.attention import layout
from lightning_spec.attention.attend import Work, attend, attend_backward, merge_
from lightning_spec.attention.branch import branch_backward, check_branch, merge_branch
from lightning_spec.attention.context import Context, pack
from lightning_spec.attention.hops import DirectHops, Hops, RingHops
from lightning_spec.attention.kernels import accumulation_dtype
from lightning_spec.attention.layout import Item, Run
from lightning_spec.attention.zigzag import Shard


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, shard: Shard, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """`packed_attention` of the whole batch, of which this rank holds the rows of `shard`.

    Args:
        q: [T_r, H, D];  k, v: [T_r, K, D]; K divides H. T_r may be 0.
        shard: the layout and the group. All ranks of it must call, and must run the backward.
        scale, window: as in `packed_attention`.

    Returns:
        [T_r, H, D] in the dtype of q; differentiable once.

    Raises:
        ValueError: shapes that do not fit together, or a window below 1.
    """
    return ring_branch_attention(q, k, v, (), (), shard, scale=scale, window=window)


def ring_branch_attention(
    q: Tensor,
    trunk_k: Tensor,
    trunk_v: Tensor,
    branch_k: Sequence[Tensor],
    branch_v: Sequence[Tensor],
    shard: Shard,
    *,
    scale: float | None = None,
    window: int | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """`branch_attention` of the whole batch, of which this rank holds the trunk rows of `shard`.

    Args:
        q: [R, H, D], R = T_r or the number of `rows`; R and T_r may be 0.
        trunk_k, trunk_v: [T_r, K, D].
        branch_k, branch_v: i tensors [R, K, D]; i is the same on all ranks.
        shard: the layout and the group. All ranks of it must call, and must run the backward.
        scale, window: as in `branch_attention`.
        rows: [R] int64, strictly ascending local rows that the rows of q belong to; None: all T_r.

    Returns:
        [R, H, D] in the dtype of q. Differentiable once; saves its inputs by reference, the output, the log-sum-exp.

    Raises:
        ValueError: shapes that do not fit together, rows not ascending or out of range, a window below 1.
    """
    check_local(q, trunk_k, trunk_v, branch_k, branch_v, shard, window, rows)
    passes = len(branch_k)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    first = 0 if window is None else max(0, passes - window)  # branch keys before it are outside of the window
    plan = _causal_plan(shard, rows, passes, window)
    result: Tensor = _Ring.apply(plan, scale, q, trunk_k, trunk_v, *branch_k[first:], *branch_v[first:])
    return result


def check_local(
    q: Tensor,
    trunk_k: Tensor,
    trunk_v: Tensor,
    branch_k: Sequence[Tensor],
    branch_v: Sequence[Tensor],
    shard: Shard,
    window: int | None,
    rows: Tensor | None,
) -> None:
    """Raises ValueError where the tensors of this rank do not fit its shard: before any message, so nobody hangs in it.

    (The other ranks still wait for this one until the group's timeout.)
    """
    check_branch(q, trunk_k, trunk_v, branch_k, branch_v, (shard.rows.numel(),), window, rows)


@dataclass(frozen=True, slots=True)
class Step:
    """Part of a sweep: the query rows that see something of a block, and what they see."""

    rows: slice
    work: Work

    @classmethod
    def of(cls, work: Work) -> Step:
        """`work` without the query rows before the first and after the last that see something."""
        if work.given is not None:
            seeing = (work.given[1] > work.given[0]).nonzero().flatten()
            if not seeing.numel():
                return cls(slice(0, 0), Work(0, work.keys))
            rows = slice(int(seeing[0]), int(seeing[-1]) + 1)
            return cls(rows, Work.of_intervals(work.given[0][rows], work.given[1][rows], work.keys))
        items = (*work.causal, *work.full)
        first = min((item[0] for item in items), default=0)
        last = max((item[0] + item[1] for item in items), default=0)
        causal, full = (tuple((i[0] - first, *i[1:]) for i in kind) for kind in (work.causal, work.full))
        return cls(slice(first, last), Work(last - first, work.keys, causal, full))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is computed in each step of a sweep, and how the blocks travel."""

    steps: tuple[Step, ...]
    hops: Hops

    @classmethod
    def of(cls, works: Sequence[Work], hops: Hops) -> Plan:
        if any(work.keys != keys for work, keys in zip(works, hops.keys, strict=True)):
            raise ValueError(f"works over {[work.keys for work in works]} keys, blocks of {list(hops.keys)}")
        return cls(tuple(map(Step.of, works)), hops)


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, works: Sequence[Work], context: Context, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks, which travel along the ring.

    Args:
        q: [R, H, D];  k, v: this rank's [T_r, K, D].
        works: for each step s, what q sees of the rows of rank (rank - s) % size (its `keys` is their number).

    Returns:
        out [R, H, D] and lse [R, H] in the accumulation dtype; rows that see nothing have out = 0 and lse = -inf.
    """
    return forward(q, k, v, Plan.of(works, RingHops([work.keys for work in works], context)), scale)


def ring_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    works: Sequence[Work],
    context: Context,
    *,
    scale: float,
) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
    """Backward of `ring_forward` from the output and log-sum-exp of the *joint* softmax.

    Returns:
        dq [R, H, D] and a function that waits for (dk, dv) [T_r, K, D] of this rank's keys, all in the accumulation
        dtype. Compute what else there is (the branch) before calling it: the last hop is under way.
    """
    return backward(grad, q, k, v, out, lse, Plan.of(works, RingHops([work.keys for work in works], context)), scale)


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float) -> tuple[Tensor, Tensor]:
    """`ring_forward` by a plan."""
    acc = accumulation_dtype(q.dtype)
    out, lse = q.new_zeros(q.shape, dtype=acc), q.new_full(q.shape[:2], -torch.inf, dtype=acc)
    for number, (step, block) in enumerate(zip(plan.steps, plan.hops.blocks(pack(k, v)), strict=True)):
        if step.work.empty:
            continue
        part, part_lse = attend(q[step.rows], block[0], block[1], step.work, scale=scale)
        if number == 0:
            out[step.rows], lse[step.rows] = part.to(acc), part_lse
        else:
            merge_(out, lse, part, part_lse, step.rows)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan, scale: float
) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
    """`ring_backward` by a plan."""
    acc = accumulation_dtype(q.dtype)
    dq, gradients = q.new_zeros(q.shape, dtype=acc), plan.hops.gradients()
    for number, (step, block) in enumerate(zip(plan.steps, plan.hops.blocks(pack(k, v)), strict=True)):
        if step.work.empty:
            gradients.add(number, torch.zeros_like(block, dtype=acc))
            continue
        at = step.rows
        part, dk, dv = attend_backward(grad[at], q[at], block[0], block[1], out[at], lse[at], step.work, scale=scale)
        dq[at] += part
        gradients.add(number, pack(dk, dv))

    def home() -> tuple[Tensor, Tensor]:
        dk, dv = gradients.home().unbind(0)
        return dk, dv

    return dq, home


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, scale: float, q: Tensor, k: Tensor, v: Tensor, *branch: Tensor) -> Tensor:
        out, lse = forward(q, k, v, plan, scale)
        half = len(branch) // 2
        if half:
            out, lse = merge_branch(q, branch[:half], branch[half:], out, lse, scale)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, *branch)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *branch = ctx.saved_tensors
        dq, home = backward(grad, q, k, v, out, lse, ctx.plan, ctx.scale)
        half = len(branch) // 2
        grads = branch_backward(grad, q, branch[:half], branch[half:], out, lse, dq, ctx.scale)
        dk, dv = home()
        return None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *grads


def _causal_plan(shard: Shard, rows: Tensor | None, offset: int, window: int | None) -> Plan:
    """Plan of causal attention with a window that has moved by `offset` rows; made once for each selection of rows."""
    if window is not None and window - offset >= max(shard.lengths, default=0):
        window = None  # it hides nothing, on any rank
    offset = 0 if window is None else offset
    chosen = None if rows is None else rows.cpu().numpy().tobytes()
    return shard.remember(("ring", chosen, offset, window), lambda: _make_plan(shard, rows, offset, window))


def _make_plan(shard: Shard, rows: Tensor | None, offset: int, window: int | None) -> Plan:
    context, parts = shard.context, [shard.layout.rows(rank) for rank in range(shard.size)]
    sources = [context.next(-step) for step in range(context.size)]
    hops: Hops
    if window is None:
        blocks = [parts[source] for source in sources]
        hops = RingHops([block.numel() for block in blocks], context)
    else:
        seen = shard.remember(("seen", window - offset), lambda: _seen_rows(shard, window - 1 - offset))
        blocks = [shard.rows, *(seen[shard.rank][source] for source in sources[1:])]
        wanted = [shard.layout.local_index[seen[context.next(step)][shard.rank]] for step in range(context.size)]
        hops = DirectHops(wanted, [block.numel() for block in blocks], context)
    local = torch.arange(shard.rows.numel()) if rows is None else rows.cpu()
    runs = layout.selected_runs(shard.lengths, shard.rows[local])
    works = [_work(runs, block, offset, window) for block in blocks[1:]]
    if not _hides(runs, offset, window):  # by local rows both chunks are one: order is all that causal work needs
        own = Work.of_runs(layout.selected_runs(shard.layout.counts(shard.rank), local), shard.rows.numel())
    else:
        own = Work.among(*layout.intervals(runs, offset, window), shard.rows)
    return Plan.of([own, *works], hops)


def _work(runs: Sequence[Run], block: Tensor, offset: int, window: int | None) -> Work:
    """What query rows in `runs` (global rows) see of the keys of another rank: `block`, [keys] ascending global rows.

    The keys of a query row are an interval of global rows; since a block is ascending, they are one of its rows, too.
    A run's own rows are in no block, so that all its rows see the same keys where no window is in force.
    """
    if _hides(runs, offset, window):
        return Work.among(*layout.intervals(runs, offset, window), block)
    ends = torch.tensor([(run.document, run.row) for run in runs], dtype=torch.int64).view(-1, 2)
    full: list[Item] = []
    for run, (low, high) in zip(runs, torch.searchsorted(block, ends).tolist(), strict=True):
        if high <= low:
            continue
        before = full[-1] if full else (0, 0, 0, 0)
        if before[2:] == (low, high - low) and before[0] + before[1] == run.query:  # e.g. both chunks of a document
            full[-1] = (before[0], before[1] + run.count, low, high - low)
        else:
            full.append((run.query, run.count, low, high - low))
    return Work(sum(run.count for run in runs), block.numel(), full=tuple(full))


def _hides(runs: Sequence[Run], offset: int, window: int | None) -> bool:
    """Whether the window hides a key from any of the query rows."""
    return window is not None and layout.longest_reach(runs) + offset >= window


def _seen_rows(shard: Shard, reach: int) -> list[list[Tensor]]:
    """seen[rank][owner]: global rows of `owner` that some row of `rank` sees, 1 to `reach` rows back, ascending."""
    seen = []
    for rank in range(shard.size):
        ends = torch.zeros(shard.total + 1, dtype=torch.int64)
        for run in shard.layout.runs(rank):
            ends[max(run.document, run.row - max(reach, 0))] += 1
            ends[run.row] -= 1
        rows = (ends.cumsum(0)[:-1] > 0).nonzero().flatten()
        owner = shard.layout.owner[rows]
        seen.append([rows[owner == source] for source in range(shard.size)])
    return seen
