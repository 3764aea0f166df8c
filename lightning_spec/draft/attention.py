"""Which attention the passes of a draft run on: one device, the ring, or all-to-all over heads.

All are exact; they differ in where keys and values travel. The streamed engine brings its own (`stream.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lightning_spec.attention.branch import branch_attention
from lightning_spec.attention.ring import ring_branch_attention
from lightning_spec.attention.ulysses import ulysses_branch_attention
from lightning_spec.attention.zigzag import Shard


class PassAttention(Protocol):
    """Attention of one pass of one layer: the trunk up to each row, and the row's branch."""

    def __call__(
        self,
        q: Tensor,
        trunk_k: Tensor,
        trunk_v: Tensor,
        branch_k: Sequence[Tensor],
        branch_v: Sequence[Tensor],
        rows: Tensor | None,
    ) -> Tensor:
        """[R, H, D] of the query rows [R, H, D].

        Args:
            trunk_k, trunk_v: [T, K, D], this rank's rows.  branch_k, branch_v: [R, K, D] of each pass after the first.
            rows: int64 [R], ascending: which of this rank's rows the query rows are. None: every rank's all rows.
        """
        ...


class LocalAttention:
    """One rank holds all rows. `lengths`: rows of each document."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def __call__(
        self,
        q: Tensor,
        trunk_k: Tensor,
        trunk_v: Tensor,
        branch_k: Sequence[Tensor],
        branch_v: Sequence[Tensor],
        rows: Tensor | None,
    ) -> Tensor:
        return branch_attention(q, trunk_k, trunk_v, branch_k, branch_v, self.lengths, rows=_some(rows, trunk_k))


class RingAttention:
    """Keys and values travel around the ring in every pass. Every rank of the shard's group must call."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def __call__(
        self,
        q: Tensor,
        trunk_k: Tensor,
        trunk_v: Tensor,
        branch_k: Sequence[Tensor],
        branch_v: Sequence[Tensor],
        rows: Tensor | None,
    ) -> Tensor:
        return ring_branch_attention(q, trunk_k, trunk_v, branch_k, branch_v, self.shard, rows=_some(rows, trunk_k))


class UlyssesAttention:
    """Every pass trades rows for heads and back. Every rank of the shard's group must call."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def __call__(
        self,
        q: Tensor,
        trunk_k: Tensor,
        trunk_v: Tensor,
        branch_k: Sequence[Tensor],
        branch_v: Sequence[Tensor],
        rows: Tensor | None,
    ) -> Tensor:
        return ulysses_branch_attention(q, trunk_k, trunk_v, branch_k, branch_v, self.shard, rows=rows)


def _some(rows: Tensor | None, trunk: Tensor) -> Tensor | None:
    """None where a rank has selected all its rows. (Not for Ulysses, where the ranks must agree in this.)"""
    return None if rows is None or rows.numel() == trunk.shape[0] else rows
