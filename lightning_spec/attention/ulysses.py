"""Ulysses: an all-to-all trades rows for heads, then each rank attends the whole sequence with its share of the heads.

For few ranks and many heads: both query and kv heads must divide by the number of ranks, and each rank holds all rows
of its heads. Row counts are exact, as the zigzag layout gives them. Source: DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_spec.attention.branch import branch_attention
from lightning_spec.attention.context import Context
from lightning_spec.attention.exchange import gather_rows
from lightning_spec.attention.ring import check_local
from lightning_spec.attention.zigzag import Shard
from lightning_spec.errors import ConfigError


def check_ulysses(heads: int, kv_heads: int, size: int, key: str) -> None:
    """Raise ConfigError when `size` ranks cannot share the heads evenly; it names the sizes that can.

    Args:
        heads, kv_heads: of the attention (per tensor-parallel rank).
        size: context-parallel ranks.
        key: configuration key that asked for ulysses.
    """
    common = gcd(heads, kv_heads)
    if common % size:
        fitting = [n for n in range(1, common + 1) if common % n == 0]
        raise ConfigError(
            "ulysses cannot divide the heads over the context-parallel ranks",
            found=f"{heads} query heads and {kv_heads} kv heads over {size} ranks",
            needed=f"context parallelism of {_either(fitting)} for ulysses, or ring, which divides rows",
            key=key,
        )


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, shard: Shard, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """`ring_attention` by all-to-all; same arguments and result.

    Raises:
        ConfigError: the heads do not divide by the number of ranks.
    """
    return ulysses_branch_attention(q, k, v, (), (), shard, scale=scale, window=window)


def ulysses_branch_attention(
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
    """`ring_branch_attention` by all-to-all; same arguments and result. All ranks give `rows`, or none does.

    Raises:
        ConfigError: the heads do not divide by the number of ranks.
        ValueError: as in `ring_branch_attention`.
    """
    check_local(q, trunk_k, trunk_v, branch_k, branch_v, shard, window, rows)
    check_ulysses(q.shape[1], trunk_k.shape[1], shard.size, "context_parallel")
    trunk = _Places(tuple(shard.layout.rows(rank) for rank in range(shard.size)), shard.context)
    chosen, places = None, trunk
    if rows is not None:
        chosen, places = _selected(rows.to(q.device), trunk, shard)
    whole_k, whole_v = _together((trunk_k, trunk_v), trunk)
    whole_q, *branch = _together((q, *branch_k, *branch_v), places)
    half = len(branch) // 2
    out = branch_attention(
        *(whole_q, whole_k, whole_v, branch[:half], branch[half:], shard.lengths),
        scale=scale,
        window=window,
        rows=chosen,
    )
    result: Tensor = _ToRows.apply(out, places)
    return result


@dataclass(frozen=True)
class _Places:
    """Where the rows of each rank stand in the sequence (the whole one, or the selected rows of it)."""

    of: tuple[Tensor, ...]
    context: Context

    def counts(self) -> list[int]:
        return [rows.numel() for rows in self.of]


def _selected(rows: Tensor, trunk: _Places, shard: Shard) -> tuple[Tensor, _Places]:
    """Global rows that any rank selected, ascending, and where those of each rank stand among them.

    Each rank knows only its own: a mask of known size is gathered, since their numbers are not known either.
    """
    mask = torch.zeros(shard.rows.numel(), dtype=torch.uint8, device=rows.device)
    mask[rows] = 1
    chosen = gather_rows(mask, shard).cpu().bool()
    place = chosen.cumsum(0) - 1
    of = tuple(place[part[chosen[part]]] for part in trunk.of)
    return chosen.nonzero().flatten(), _Places(of, shard.context)


def _together(tensors: Sequence[Tensor], places: _Places) -> list[Tensor]:
    """Each [rows here, heads, D] -> [all rows, heads / size, D], in one message per pair of ranks."""
    size = places.context.size
    if size == 1:
        return list(tensors)
    joint: Tensor = _ToHeads.apply(
        torch.cat([x.unflatten(1, (size, -1)) for x in tensors], dim=2).flatten(1, 2), places
    )
    return list(joint.split([x.shape[1] // size for x in tensors], dim=1))


def _to_heads(x: Tensor, places: _Places) -> Tensor:
    """[rows here, size * h, D] -> [all rows, h, D], the h heads of this rank."""
    context, counts = places.context, places.counts()
    mine, heads = counts[context.rank], x.shape[1] // context.size
    leaving = x.unflatten(1, (context.size, heads)).transpose(0, 1).flatten(0, 1)
    arrived = context.all_to_all(leaving, [mine] * context.size, counts)
    return torch.empty_like(arrived).index_copy_(0, torch.cat(places.of).to(x.device), arrived)


def _to_rows(x: Tensor, places: _Places) -> Tensor:
    """[all rows, h, D] -> [rows here, size * h, D], the inverse of `_to_heads` (and its transpose)."""
    context, counts = places.context, places.counts()
    mine = counts[context.rank]
    arrived = context.all_to_all(x[torch.cat(places.of).to(x.device)], counts, [mine] * context.size)
    return arrived.unflatten(0, (context.size, mine)).transpose(0, 1).flatten(1, 2)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: _Places) -> Tensor:
        ctx.places = places
        return _to_heads(x, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _to_rows(grad, ctx.places), None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: _Places) -> Tensor:
        ctx.places = places
        return _to_rows(x, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _to_heads(grad, ctx.places), None
