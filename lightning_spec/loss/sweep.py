"""The sweep behind every draft loss: teacher and draft distributions of a few rows at a time, their loss and gradients.

Nothing of size [R, V] is kept. The teacher is swept in blocks of its rows: a block's distribution is formed once and
read by every draft row that it teaches (row t teaches pass i of anchor t - 1 - i, so N passes share it).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from lightning_spec.loss.chunks import exact_math
from lightning_spec.loss.distributions import Buffer, ChunkStatistics, Index, Teacher, label_columns, statistics
from lightning_spec.loss.heads import Heads

OutOfVocabulary = Literal["renormalise", "drop"]


class RowLoss(Protocol):
    """What the sweep needs of a draft loss."""

    teacher_temperature: float
    out_of_vocab: OutOfVocabulary
    chunk: int | None

    def rows(self, stats: ChunkStatistics, dz: Tensor | None) -> Tensor: ...


@dataclass(slots=True)
class Swept:
    """Of R draft rows. Rows that are not `valid` have 0 and False everywhere, but alpha and agree of dropped ones."""

    total: Tensor
    """float64 scalar, sum of weight * each."""
    each: Tensor
    """[R], unweighted loss."""
    agree: Tensor
    """bool [R]."""
    alpha: Tensor
    """[R]."""
    valid: Tensor
    """bool [R]."""
    d_hidden: Tensor | None
    """[R, C], the gradient of `total`."""
    label_prob: Tensor
    """[R] q(label); 0 where there is no label, or the draft lacks it."""


@dataclass(slots=True)
class LowRank:
    """A low-rank addition to the draft's logits, z += rows @ table.T, and buffers for its gradients (None: not needed).

    Gradients of `total` are added to the buffers. With a split vocabulary `table` is the rank's rows, as the draft's
    head is, and what is added to `d_rows` is complete on each rank.
    """

    rows: Tensor
    """[R, r]."""
    table: Tensor
    """[Vd, r]."""
    d_rows: Tensor | None = None
    """[R, r], in the math dtype."""
    d_table: Tensor | None = None
    """[Vd, r], in the math dtype."""


@dataclass(slots=True)
class Group:
    """Draft rows with distinct teachers in one block: `rows` of the draft, and their `places` in the block."""

    rows: Index
    places: Index
    count: int


def sweep(
    loss: RowLoss,
    hidden: Tensor,
    heads: Heads,
    teacher_hidden: Tensor,
    weight: Tensor,
    teacher_rows: Tensor | None,
    scored: Tensor,
    *,
    need_hidden: bool,
    d_head: Tensor | None,
    labels: Tensor | None = None,
    bias: LowRank | None = None,
) -> Swept:
    """Loss and gradients of the `scored` rows (bool [R]); the other arguments as in `DraftLoss.__call__`.

    With the vocabulary split over ranks, all of them call with the same rows. They talk once for each block of teacher
    rows, once (the overlap losses twice) for each chunk of draft rows, and at the end sum alpha and the gradients of
    `hidden` and of the bias's rows, so that everything returned is complete on each.

    Args:
        need_hidden: whether to form the gradient of `hidden`.
        d_head: [Vd, C] in the math dtype; the head's gradient is added to it. None: it is not needed.
        labels: int64 [R], target ids, -1: none.
        bias: added to the draft's logits.
    """
    device, W, vocab = hidden.device, heads.draft, heads.vocab
    dtype, R = W.dtype, hidden.shape[0]
    out = Swept(
        total=torch.zeros((), dtype=torch.float64, device=device),
        each=torch.zeros(R, dtype=dtype, device=device),
        agree=torch.zeros(R, dtype=torch.bool, device=device),
        alpha=torch.zeros(R, dtype=dtype, device=device),
        valid=scored.clone(),
        d_hidden=torch.zeros_like(hidden, dtype=dtype) if need_hidden else None,
        label_prob=torch.zeros(R, dtype=dtype, device=device),
    )
    columns = None if labels is None else label_columns(labels, scored, heads)
    added = None if bias is None else _Added(bias, dtype)
    need_dz = need_hidden or d_head is not None or (added is not None and added.needs_dz)
    teacher = Teacher(heads, loss.teacher_temperature, loss.out_of_vocab == "drop")
    z_buffer, scratch_buffer = (Buffer(W.shape[0], dtype, device) for _ in range(2))
    with exact_math(device):
        for block, groups in blocks(scored, teacher_rows, loss.chunk or heads.chunk(mebibytes=4)):
            teacher.read(teacher_hidden[block].to(dtype))
            for group in groups:
                rows, n = group.rows, group.count
                h, w = hidden[rows].to(dtype), weight[rows].to(dtype)
                taught = teacher.at(group.places)
                z, scratch = z_buffer.rows(n), scratch_buffer.rows(n)
                torch.mm(h, W.T, out=z)
                if added is not None:
                    added.add_(z, rows)
                stats = statistics(taught, z, scratch, heads, None if columns is None else columns[rows])
                out.alpha[rows] = stats.own_alpha
                out.agree[rows] = stats.draft_top == stats.teacher_top
                if stats.label is not None:
                    out.label_prob[rows] = stats.label.logprob.exp() * stats.label.known
                each = loss.rows(stats, scratch if need_dz else None)
                if taught.known is not None:
                    out.valid[rows] = taught.known
                    w, each = w * taught.known, each * taught.known
                out.each[rows] = each
                out.total += torch.dot(w.to(torch.float64), each.to(torch.float64))
                # The row weight scales the [n, C] side of each product: cheaper than the [n, V] gradient.
                if out.d_hidden is not None:
                    out.d_hidden[rows] = (scratch @ W).mul_(w[:, None])
                if d_head is not None:
                    d_head.addmm_(scratch.T, h * w[:, None])
                if added is not None:
                    added.backward(scratch, rows, w)
    if vocab is not None and R:
        vocab.sum_(out.alpha)
        if out.d_hidden is not None:
            vocab.sum_(out.d_hidden)
        if added is not None and added.d_rows is not None:
            vocab.sum_(added.d_rows)
    if bias is not None and bias.d_rows is not None and added is not None and added.d_rows is not None:
        bias.d_rows += added.d_rows
    return out


class _Added:
    """A `LowRank` in the math dtype during one sweep."""

    def __init__(self, bias: LowRank, dtype: torch.dtype) -> None:
        self.rows, self.table, self.dtype = bias.rows.detach(), bias.table.detach().to(dtype), dtype
        # Its own: the buffer may hold another sweep's gradient, which must not be summed over ranks once more.
        self.d_rows = None if bias.d_rows is None else torch.zeros_like(bias.d_rows)
        self.d_table = bias.d_table

    @property
    def needs_dz(self) -> bool:
        return self.d_rows is not None or self.d_table is not None

    def add_(self, z: Tensor, rows: Index) -> None:
        z.addmm_(self.rows[rows].to(self.dtype), self.table.T)

    def backward(self, dz: Tensor, rows: Index, weight: Tensor) -> None:
        """From the gradient of the logits, dz [n, Vd], and the row weights [n]."""
        if self.d_rows is not None:
            self.d_rows[rows] = (dz @ self.table).mul_(weight[:, None])
        if self.d_table is not None:
            self.d_table.addmm_(dz.T, self.rows[rows].to(self.dtype) * weight[:, None])


def blocks(scored: Tensor, teacher_rows: Tensor | None, size: int) -> Iterator[tuple[Index, list[Group]]]:
    """Cut the teacher rows that are needed into blocks of at most `size`, and each block's draft rows into groups.

    A group holds the k-th draft row of every teacher row of its block that has so many, in the order of the teacher
    rows: with passes, one pass's rows. Yields (teacher rows, groups).
    """
    rows = scored.nonzero().squeeze(1)
    if not rows.numel():
        return
    if teacher_rows is None:
        used, place = rows, torch.arange(rows.numel(), device=rows.device)
    else:
        used, place = teacher_rows[rows].unique(return_inverse=True)
        order = place.argsort(stable=True)
        rows, place = rows[order], place[order]
    count = -(-used.numel() // size)
    size = -(-used.numel() // count)
    turn = torch.arange(rows.numel(), device=rows.device) - torch.searchsorted(place, place)
    key = (place // size) * (int(turn.max()) + 1) + turn
    order = key.argsort(stable=True)
    rows, place, key = rows[order], place[order], key[order]
    sizes = key.unique_consecutive(return_counts=True)[1].tolist()
    owners = (place[torch.tensor([0, *sizes[:-1]], device=rows.device).cumsum(0)] // size).tolist()
    first = group = 0
    for block in range(count):
        groups = []
        while group < len(sizes) and owners[group] == block:
            part = slice(first, first + sizes[group])
            groups.append(Group(_compact(rows[part]), _compact(place[part] - block * size), sizes[group]))
            first, group = part.stop, group + 1
        yield _compact(used[block * size : (block + 1) * size]), groups


def _compact(index: Tensor) -> Index:
    """A slice where the index is consecutive: nothing is copied then."""
    first, count = int(index[0]), index.numel()
    if int(index[-1]) - first == count - 1 and bool((index.diff() == 1).all()):
        return slice(first, first + count)
    return index
