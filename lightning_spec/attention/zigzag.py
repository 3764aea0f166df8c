"""Zigzag layout: which rows of a packed batch each context-parallel rank holds.

A document of L rows is cut into 2 * size chunks of c = ceil(L / (2 * size)) rows, and rank r holds chunks r and
2 * size - 1 - r of every document, so that causal attention costs each rank about the same. The last chunks are short
or empty where L is not a multiple: ranks hold different numbers of rows, down to none, and no padding row exists.
Source of the split: zigzag ring attention, github.com/zhuzilin/ring-flash-attention.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_spec.attention import layout
from lightning_spec.attention.context import Context
from lightning_spec.attention.layout import Run

_T = TypeVar("_T")


class Zigzag:
    """Split of packed documents over `size` ranks.

    Args:
        lengths: rows of each document, in order; 0 is allowed. T is their sum.
        size: number of ranks.

    Raises:
        ValueError: a negative length or a size below 1.
    """

    def __init__(self, lengths: Sequence[int], size: int) -> None:
        if size < 1 or any(length < 0 for length in lengths):
            raise ValueError(f"bad zigzag layout: lengths {lengths}, {size} ranks")
        self.lengths, self.size = tuple(lengths), size
        self._rows: dict[int, Tensor] = {}

    @property
    def total(self) -> int:
        """T."""
        return sum(self.lengths)

    def chunks(self, document: int) -> list[tuple[int, int]]:
        """[first, last) of the document's 2 * size chunks, counted inside the document."""
        length = self.lengths[document]
        count = -(-length // (2 * self.size))
        return [(min(j * count, length), min((j + 1) * count, length)) for j in range(2 * self.size)]

    def counts(self, rank: int) -> list[int]:
        """Rows of each document on `rank`."""
        held = (rank, 2 * self.size - 1 - rank)
        return [sum(chunks[j][1] - chunks[j][0] for j in held) for chunks in map(self.chunks, range(len(self.lengths)))]

    def rows(self, rank: int) -> Tensor:
        """Global rows that `rank` holds, [T_r] int64, ascending."""
        if rank not in self._rows:
            parts, start = [torch.zeros(0, dtype=torch.int64)], 0
            for document, length in enumerate(self.lengths):
                chunks = self.chunks(document)
                for first, last in (chunks[rank], chunks[-1 - rank]):
                    parts.append(torch.arange(start + first, start + last))
                start += length
            self._rows[rank] = torch.cat(parts)
        return self._rows[rank]

    def runs(self, rank: int) -> tuple[Run, ...]:
        """Runs of consecutive rows of one document: query = first local row, row and document global."""
        return layout.selected_runs(self.lengths, self.rows(rank))

    @cached_property
    def owner(self) -> Tensor:
        """Rank that holds each global row, [T] int64."""
        return self.restore([torch.full_like(self.rows(rank), rank) for rank in range(self.size)])

    @cached_property
    def local_index(self) -> Tensor:
        """Index of each global row on its rank, [T] int64."""
        return self.restore([torch.arange(self.rows(rank).numel()) for rank in range(self.size)])

    def split(self, x: Tensor, rank: int) -> Tensor:
        """The rows of `x` [T, ...] that `rank` holds, [T_r, ...]."""
        self._check(x.shape[0], self.total)
        return x[self.rows(rank).to(x.device)]

    def restore(self, parts: Sequence[Tensor]) -> Tensor:
        """The global [T, ...] of the parts [T_r, ...] of all ranks; the inverse of `split`."""
        self._check(len(parts), self.size)
        whole = parts[0].new_empty((self.total, *parts[0].shape[1:]))
        for rank, part in enumerate(parts):
            rows = self.rows(rank)
            self._check(part.shape[0], rows.numel())
            whole[rows.to(whole.device)] = part
        return whole

    @staticmethod
    def _check(found: int, needed: int) -> None:
        if found != needed:
            raise ValueError(f"the zigzag layout needs {needed} rows or parts, found {found}")


class Shard:
    """This rank's part of one packed micro-batch. It remembers work plans, so keep one a micro-batch, not one a layer.

    Args:
        layout: the split; its size is the context's.
        context: the group.
    """

    def __init__(self, layout: Zigzag, context: Context) -> None:
        if layout.size != context.size:
            raise ValueError(f"a layout for {layout.size} ranks in a group of {context.size}")
        self.layout, self.context = layout, context
        self._plans: dict[Hashable, Any] = {}

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def size(self) -> int:
        return self.context.size

    @property
    def group(self) -> ProcessGroup | None:
        return self.context.group

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each document, whole (global)."""
        return self.layout.lengths

    @property
    def total(self) -> int:
        """T, global."""
        return self.layout.total

    @cached_property
    def rows(self) -> Tensor:
        """Global rows held here, [T_r] int64, ascending."""
        return self.layout.rows(self.rank)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Runs of the rows held here (see `Zigzag.runs`)."""
        return self.layout.runs(self.rank)

    def remember(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """make(), once for each key."""
        if key not in self._plans:
            self._plans[key] = make()
        plan: _T = self._plans[key]
        return plan
