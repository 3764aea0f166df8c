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

from lightning_spec.loss.chunks import exact_math, math_dtype, rows_per_chunk

OutOfVocabulary = Literal["renormalise", "drop"]


@dataclass(slots=True)
class ChunkStatistics:
    """What a row loss may use of one chunk of n rows; it must not change p and q."""

    p: Tensor
    """[n, Vd] the policy's distribution on the draft's vocabulary (renormalised there)."""
    q: Tensor
    """[n, Vd] the draft's distribution."""
    cross_entropy: Tensor
    """[n] -sum p log q."""
    teacher_top: Tensor
    """[n] int64, the policy's most likely token, a target id."""
    draft_top: Tensor
    """[n] int64, the draft's most likely token, a draft id."""
    alpha: Tensor
    """[n] sum_v min(p, q) with the policy's distribution as it is, not renormalised."""
    mass: Tensor | None
    """[n] the policy's probability of the draft's vocabulary; None: it is the whole vocabulary."""


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


Index = slice | Tensor


@dataclass(slots=True)
class Group:
    """Draft rows with distinct teachers in one block: `rows` of the draft, and their `places` in the block."""

    rows: Index
    places: Index
    count: int


def sweep(
    loss: RowLoss,
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    weight: Tensor,
    ids: Tensor | None,
    teacher_rows: Tensor | None,
    scored: Tensor,
    *,
    need_hidden: bool,
    d_head: Tensor | None,
) -> Swept:
    """Loss and gradients of the `scored` rows (bool [R]); the other arguments as in `DraftLoss.__call__`.

    Args:
        need_hidden: whether to form the gradient of `hidden`.
        d_head: [Vd, C] in the math dtype; the head's gradient is added to it. None: it is not needed.
    """
    device, dtype = hidden.device, math_dtype(hidden, head)
    R, Vd, V = hidden.shape[0], head.shape[0], teacher_head.shape[0]
    out = Swept(
        total=torch.zeros((), dtype=torch.float64, device=device),
        each=torch.zeros(R, dtype=dtype, device=device),
        agree=torch.zeros(R, dtype=torch.bool, device=device),
        alpha=torch.zeros(R, dtype=dtype, device=device),
        valid=scored.clone(),
        d_hidden=torch.zeros_like(hidden, dtype=dtype) if need_hidden else None,
    )
    chunk = loss.chunk or rows_per_chunk(max(V, Vd), dtype, device, mebibytes=4)
    W, W_teacher = head.detach().to(dtype), teacher_head.to(dtype)
    teacher = _Teacher(loss, W_teacher, ids)
    z_buffer, scratch_buffer, picked = (_Buffer(Vd, dtype, device) for _ in range(3))
    with exact_math(device):
        for block, groups in blocks(scored, teacher_rows, chunk):
            teacher.read(teacher_hidden[block].to(dtype))
            for group in groups:
                rows, n = group.rows, group.count
                h, w = hidden[rows].to(dtype), weight[rows].to(dtype)
                p, teacher_top, mass, known = teacher.at(group.places, picked)
                z, scratch = z_buffer.rows(n), scratch_buffer.rows(n)
                torch.mm(h, W.T, out=z)
                stats = _statistics(p, z, scratch, teacher_top, mass)
                out.alpha[rows] = stats.alpha
                draft_top = stats.draft_top if ids is None else ids[stats.draft_top]
                out.agree[rows] = draft_top == teacher_top
                each = loss.rows(stats, scratch if need_hidden or d_head is not None else None)
                if known is not None:
                    out.valid[rows] = known
                    w, each = w * known, each * known
                out.each[rows] = each
                out.total += torch.dot(w.to(torch.float64), each.to(torch.float64))
                # The row weight scales the [n, C] side of each product: cheaper than the [n, V] gradient.
                if out.d_hidden is not None:
                    out.d_hidden[rows] = (scratch @ W).mul_(w[:, None])
                if d_head is not None:
                    d_head.addmm_(scratch.T, h * w[:, None])
    return out


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


class _Buffer:
    """Rows of one allocation that grows to the largest request."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.empty(0, width, dtype=dtype, device=device)

    def rows(self, count: int) -> Tensor:
        if count > self.data.shape[0]:
            self.data = self.data.new_empty(count, self.data.shape[1])
        return self.data[:count]


class _Teacher:
    """The policy's distribution at one block of its rows.

    Here and in `_statistics` are the only reductions over the vocabulary before the row losses: under vocabulary
    parallelism m_p, m_q are all-reduced by max there, and S_p, S_q, d by sum (and the row losses' own sums).
    """

    def __init__(self, loss: RowLoss, head: Tensor, ids: Tensor | None) -> None:
        self.head, self.ids, self.temperature = head, ids, loss.teacher_temperature
        self.present: Tensor | None = None
        if ids is not None and loss.out_of_vocab == "drop":
            self.present = torch.zeros(head.shape[0], dtype=torch.bool, device=head.device).index_fill_(0, ids, True)
        self.buffer = _Buffer(head.shape[0], head.dtype, head.device)
        self.p = self.top = torch.empty(0)
        self.mass: Tensor | None = None

    def read(self, hidden: Tensor) -> None:
        """Form the distributions at `hidden` [n, Ct]."""
        tau = self.buffer.rows(hidden.shape[0])
        torch.mm(hidden, self.head.T, out=tau)
        if self.temperature != 1.0:
            tau /= self.temperature
        if self.ids is None:
            _, self.top, total = _exponentials_(tau)
            self.p = tau.div_(total)
            return
        # The restricted distribution has its own maximum: relative to the full one all of it may underflow to 0.
        self.p = tau.index_select(1, self.ids)
        m_full, self.top, s_full = _exponentials_(tau)
        m_p, _, s_p = _exponentials_(self.p)
        self.mass = ((m_p - m_full).exp_() * s_p / s_full).squeeze(1)
        self.p.div_(s_p)

    def at(self, places: Index, picked: _Buffer) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(p [n, Vd], top [n], mass [n] or None, known [n] or None: the row is not dropped) at rows of the block."""
        top = self.top[places]
        mass = None if self.mass is None else self.mass[places]
        known = None if self.present is None else self.present[top]
        if isinstance(places, slice):
            return self.p[places], top, mass, known
        p = torch.index_select(self.p, 0, places, out=picked.rows(places.numel()))
        return p, top, mass, known


def _exponentials_(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turns [n, V] logits into exp(logits - m) in place; returns (m [n, 1], argmax [n], S [n, 1])."""
    m, top = logits.max(1, keepdim=True)
    e = logits.sub_(m).exp_()
    return m, top.squeeze(1), e.sum(1, keepdim=True)


def _statistics(p: Tensor, z: Tensor, scratch: Tensor, teacher_top: Tensor, mass: Tensor | None) -> ChunkStatistics:
    """Overwrites the draft's logits z [n, Vd] (with q) and scratch [n, Vd]."""
    m_q, draft_top = z.max(1, keepdim=True)
    z.sub_(m_q)
    d = torch.mul(p, z, out=scratch).sum(1)
    q = z.exp_()
    s_q = q.sum(1, keepdim=True)
    q.div_(s_q)
    p_full = p if mass is None else torch.mul(p, mass[:, None], out=scratch)
    alpha = torch.minimum(p_full, q, out=scratch).sum(1)
    return ChunkStatistics(p, q, s_q.squeeze(1).log_() - d, teacher_top, draft_top.squeeze(1), alpha, mass)
