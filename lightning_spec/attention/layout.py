"""Which keys the rows of a packed batch see, and how rows are grouped into few kernel calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_WASTE = 1.3
"""A bucket may cost this many times its unpadded work; then a new one is opened. A guess, not tuned."""
_CALL_COST = 64 * 64
"""Score elements that one more kernel call is worth. A guess, not tuned."""


Item = tuple[int, int, int, int]
"""Query rows and the key rows they see: (q_first, q_count, k_first, k_count)."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of one document among the query rows."""

    query: int
    """Index of its first query row."""
    row: int
    """Index of its first row in the trunk."""
    count: int
    document: int
    """Index of the document's first row in the trunk."""


class Rows:
    """One side of a bucket: the rows of its items in a packed tensor, and in the padded batch [B, H, L, X] of a kernel.

    Items of equal length that follow one another are a view of the packed tensor. Others are gathered, and padded with
    repeats of the item's last row: against keys of the same item its exponentials stay at most 1, so a zero gradient
    makes everything that padding adds to a backward exactly 0, and nothing of another document is read.
    """

    def __init__(self, firsts: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        self.items, self.width, self.count = len(counts), max(counts), sum(counts)
        self.index: slice | Tensor
        self.dense = all(
            count == self.width and first == firsts[0] + n * count
            for n, (first, count) in enumerate(zip(firsts, counts, strict=True))
        )
        if self.dense:
            self.index = slice(firsts[0], firsts[0] + self.count)
            return
        first, count = torch.tensor(firsts)[:, None], torch.tensor(counts)[:, None]
        column = torch.arange(self.width)
        self.real = column < count
        self.slots = tuple(index.to(device) for index in self.real.nonzero(as_tuple=True))
        self.index = (first + column)[self.real].to(device)
        self.padded = (first + torch.minimum(column, count - 1)).flatten().to(device)
        self.real = self.real.to(device)

    def __len__(self) -> int:
        return self.count

    def pad(self, x: Tensor, zero: bool = False) -> Tensor:
        """[rows, H, X] -> [B, H, L, X]; padding is 0 with `zero`."""
        if self.dense:
            return x[self.index].unflatten(0, (self.items, self.width)).transpose(1, 2)
        padded = x.index_select(0, self.padded).unflatten(0, (self.items, self.width))
        if zero:
            padded[~self.real] = 0
        return padded.transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        """[B, H, L, X] -> [count, H, X] in the order of `index`."""
        rows = x.transpose(1, 2)
        return rows.flatten(0, 1) if self.dense else rows[self.slots]

    def add(self, total: Tensor, x: Tensor) -> None:
        """Add [B, H, L, X] to the rows of a packed tensor; items may share rows."""
        if isinstance(self.index, slice):
            total[self.index].unflatten(0, (self.items, self.width)).add_(x.transpose(1, 2))
        else:
            total.index_add_(0, self.index, self.unpad(x).to(total.dtype))

    def mask(self, bucket: Bucket) -> Tensor | None:
        """[B, 1, 1, L], True at real rows; None where no query row can see padding (causal, or none there)."""
        return None if bucket.causal or self.count == self.items * self.width else self.real[:, None, None]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Work items (query rows x key rows) of similar size: one kernel call on a padded batch.

    Item b pairs `q_count[b]` query rows from `q_first[b]` with `k_count[b]` trunk rows from `k_first[b]`; causal items
    have equal counts and row r sees keys 0..r, others see all keys.
    """

    causal: bool
    q_first: tuple[int, ...]
    q_count: tuple[int, ...]
    k_first: tuple[int, ...]
    k_count: tuple[int, ...]

    def queries(self, device: torch.device) -> Rows:
        return _rows(self.q_first, self.q_count, device)

    def keys(self, device: torch.device) -> Rows:
        return _rows(self.k_first, self.k_count, device)


@lru_cache(maxsize=128)
def _rows(firsts: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> Rows:
    return Rows(firsts, counts, device)


@lru_cache(maxsize=32)
def whole_documents(lengths: tuple[int, ...]) -> tuple[Run, ...]:
    """Runs of a batch in which every row is a query row."""
    runs, start = [], 0
    for length in lengths:
        if length:
            runs.append(Run(start, start, length, start))
        start += length
    return tuple(runs)


def selected_runs(lengths: Sequence[int], rows: Tensor) -> tuple[Run, ...]:
    """Runs of the ascending trunk rows `rows` [R]: split where a row is skipped or a document begins."""
    if rows.numel() == 0:
        return ()
    rows = rows.detach().cpu()
    starts = torch.tensor([0, *lengths]).cumsum(0)
    documents = torch.searchsorted(starts[1:], rows, right=True)
    new = torch.ones(rows.numel(), dtype=torch.bool)
    new[1:] = (rows[1:] != rows[:-1] + 1) | (documents[1:] != documents[:-1])
    firsts = new.nonzero().flatten()
    counts = torch.diff(firsts, append=torch.tensor([rows.numel()]))
    columns = (firsts, rows[firsts], counts, starts[documents[firsts]])
    return tuple(Run(*item) for item in zip(*(column.tolist() for column in columns), strict=True))


@lru_cache(maxsize=64)
def buckets(causal: tuple[Item, ...], full: tuple[Item, ...], mask_keys: bool = True) -> tuple[Bucket, ...]:
    """Kernel calls for the causal items, then for the full ones.

    `mask_keys`: whether the kernel can mask keys, so that full items with different numbers of keys may share a call.
    """
    return tuple(_grouped(list(causal), True, True) + _grouped(list(full), False, mask_keys))


def _grouped(items: list[Item], causal: bool, pad_keys: bool) -> list[Bucket]:
    groups: list[list[Item]] = []
    work = q_width = k_width = 0
    for item in sorted(items, key=lambda item: (item[3], item[1], item[0])):
        item_work = item[1] * item[3]
        wider = max(q_width, item[1]), max(k_width, item[3])
        padded = wider[0] * wider[1] * (len(groups[-1]) + 1) if groups else 0
        fits = groups and padded <= _WASTE * (work + item_work) + _CALL_COST and (pad_keys or item[3] == k_width)
        if fits:
            groups[-1].append(item)
            work, (q_width, k_width) = work + item_work, wider
        else:
            groups.append([item])
            work, q_width, k_width = item_work, item[1], item[3]
    return [Bucket(causal, *zip(*sorted(group), strict=True)) for group in groups]


def intervals(runs: Sequence[Run], offset: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Key interval [low, high) of each query row, [R] int64 each: causal, same document, `(t + offset) - s < window`.

    The interval is empty where the window has moved past the row itself.
    """
    if not runs:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    counts = torch.tensor([run.count for run in runs])
    first = torch.tensor([run.row - run.query for run in runs])
    row = torch.arange(int(counts.sum())) + first.repeat_interleave(counts)
    low = torch.tensor([run.document for run in runs]).repeat_interleave(counts)
    if window is not None:
        low = torch.maximum(low, row + offset - window + 1)
    high = row + 1
    return torch.minimum(low, high), high


def longest_reach(runs: Sequence[Run]) -> int:
    """Largest distance from a query row to the first row of its document."""
    return max((run.row + run.count - 1 - run.document for run in runs), default=0)
