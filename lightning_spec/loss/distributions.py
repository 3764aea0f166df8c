"""Teacher and draft distributions of a few rows, with their common statistics: the sums over the vocabulary.

With the vocabulary split over ranks each holds its columns of p and q; what is summed over the vocabulary is complete,
by one all-gather of scalars for a block of teacher rows and one for a chunk of draft rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_spec.loss.heads import Heads
from lightning_spec.loss.vocab import SplitSoftmax, VocabShard, exponentials_, from_ranks, maximum

Index = slice | Tensor


@dataclass(slots=True)
class Label:
    """The rollout's own token at n rows, under the draft's distribution."""

    column: Tensor
    """[n] int64, its column of q, -1 where it has none here (on another rank, or nowhere)."""
    known: Tensor
    """[n] bool: the row has a label, and the draft has that token (on some rank)."""
    logprob: Tensor
    """[n] log q(label), from logits, so finite where q underflows to 0; 0 where it is not `known`."""


@dataclass(slots=True)
class ChunkStatistics:
    """What a row loss may use of one chunk of n rows; it must not change p and q. Vd: the draft's tokens held here."""

    p: Tensor
    """[n, Vd] the policy's distribution on the draft's vocabulary (renormalised there)."""
    q: Tensor
    """[n, Vd] the draft's distribution."""
    cross_entropy: Tensor
    """[n] -sum p log q."""
    teacher_top: Tensor
    """[n] int64, the policy's most likely token, a target id."""
    draft_top: Tensor
    """[n] int64, the draft's most likely token, a target id."""
    mass: Tensor | None
    """[n] the policy's probability of the draft's vocabulary; None: it is the whole vocabulary."""
    own_alpha: Tensor
    """[n] this rank's part of `alpha`."""
    vocab: VocabShard | None = None
    label: Label | None = None
    """None: no labels were given."""
    overlap: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    """What the overlap losses have in common (see `draft.py`), once one of them has formed it."""
    _alpha: Tensor | None = field(default=None, repr=False)

    @property
    def alpha(self) -> Tensor:
        """[n] sum_v min(p, q) with the policy's distribution as it is, not renormalised. Under vocabulary parallelism
        reading it is a collective."""
        if self._alpha is None:
            (self._alpha,) = self.sum(self.own_alpha)
        return self._alpha

    def sum(self, *parts: Tensor) -> list[Tensor]:
        """Complete sums over the vocabulary, each [n], from this rank's; one collective for all of `parts`, added in
        the order of the ranks. Every rank must call it alike."""
        if self.vocab is None:
            return list(parts)
        return list(self.vocab.gather(torch.stack(parts)).sum(0).unbind(0))


class Buffer:
    """Rows of one allocation that grows to the largest request."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.empty(0, width, dtype=dtype, device=device)

    def rows(self, count: int) -> Tensor:
        if count > self.data.shape[0]:
            self.data = self.data.new_empty(count, self.data.shape[1])
        return self.data[:count]


@dataclass(slots=True)
class Taught:
    """The policy's distribution at n rows."""

    p: Tensor
    """[n, Vd]."""
    top: Tensor
    """[n] int64, target ids."""
    shares: Tensor
    """[ranks, n] the part of p, which sums to 1, that each rank holds."""
    mass: Tensor | None
    """[n], or None: the draft's vocabulary is the whole one."""
    known: Tensor | None
    """[n] bool: the draft has the most likely token; None: that does not matter."""


class Teacher:
    """The policy's distribution at one block of its rows.

    Args:
        temperature: divides the logits.
        drop: whether it matters that the draft has the most likely token.
    """

    def __init__(self, heads: Heads, temperature: float, drop: bool) -> None:
        self.heads, self.temperature = heads, temperature
        rows, width = heads.teacher.shape[0], heads.draft.shape[0]
        dtype, device = heads.teacher.dtype, heads.teacher.device
        self.present: Tensor | None = None
        if heads.columns is not None and drop:
            # At least one: a rank without tokens still answers for some column, which then loses.
            self.present = torch.zeros(max(1, rows), dtype=torch.bool, device=device)
            self.present[heads.columns] = True
        self.buffer, self.picked = Buffer(rows, dtype, device), Buffer(width, dtype, device)
        self.block: Taught | None = None

    def read(self, hidden: Tensor) -> None:
        """Form the distributions at `hidden` [n, Ct]."""
        heads = self.heads
        tau = self.buffer.rows(hidden.shape[0])
        torch.mm(hidden, heads.teacher.T, out=tau)
        if self.temperature != 1.0:
            tau /= self.temperature
        p = tau if heads.columns is None else tau.index_select(1, heads.columns)
        m, column, s = exponentials_(tau)
        # Ids travel as numbers of the math dtype: whole numbers up to 2^24 are exact in float32.
        parts = [m, s, (column + heads.start).to(m.dtype)]
        if heads.columns is not None:
            # The restricted distribution has its own maximum: relative to the full one all of it may underflow to 0.
            m_p, _, s_p = exponentials_(p)
            parts += [m_p, s_p]
        if self.present is not None:
            parts.append(self.present[column].to(m.dtype))
        found = from_ranks(heads.vocab, parts)
        full = SplitSoftmax.of(found[0], found[1])
        restricted, sums, mass = full, found[1], None
        if heads.columns is not None:
            restricted, sums = SplitSoftmax.of(found[3], found[4]), found[4]
            mass = (restricted.top - full.top).exp_() * restricted.sum / full.sum
        self.block = Taught(
            p.div_(restricted.divisor(heads.vocab)),
            full.of_winner(found[2]).to(torch.int64),
            restricted.factor * sums / restricted.sum,
            mass,
            None if self.present is None else full.of_winner(found[5]) > 0,
        )

    def at(self, places: Index) -> Taught:
        """The distribution at rows of the block; valid until the next call."""
        block = self.block
        assert block is not None
        if isinstance(places, slice):
            p = block.p[places]
        else:
            p = torch.index_select(block.p, 0, places, out=self.picked.rows(places.numel()))
        return Taught(
            p,
            block.top[places],
            block.shares[:, places],
            None if block.mass is None else block.mass[places],
            None if block.known is None else block.known[places],
        )


def statistics(
    taught: Taught, z: Tensor, scratch: Tensor, heads: Heads, columns: Tensor | None = None
) -> ChunkStatistics:
    """Overwrites the draft's logits z [n, Vd] (with q) and scratch [n, Vd].

    Args:
        columns: int64 [n], the label's column of z, -1 where it has none here; None: there are no labels.
    """
    p, mass = taught.p, taught.mass
    m, column = maximum(z)
    z.sub_(m[:, None])
    d = torch.mul(p, z, out=scratch).sum(1)
    at_label = [] if columns is None else _at_label(z, columns)
    q = z.exp_()
    found = from_ranks(heads.vocab, [m, q.sum(1), d, heads.names(column).to(m.dtype), *at_label])
    softmax = SplitSoftmax.of(found[0], found[1])
    q.div_(softmax.divisor(heads.vocab))
    log_sum = softmax.sum.log()
    # sum p (z - M) from the ranks' sum p (z - m_r): all terms have one sign, so nothing cancels.
    d = (found[2] + taught.shares * softmax.shift).sum(0)
    p_full = p if mass is None else torch.mul(p, mass[:, None], out=scratch)
    label = None
    if columns is not None:
        here = found[5]  # 1 on the rank that has the label, 0 on the others
        logprob = (found[4] + here * softmax.shift).sum(0) - log_sum
        known = here.sum(0) > 0
        label = Label(columns, known, torch.where(known, logprob, 0.0))
    return ChunkStatistics(
        p=p,
        q=q,
        cross_entropy=log_sum - d,
        teacher_top=taught.top,
        draft_top=softmax.of_winner(found[3]).to(torch.int64),
        mass=mass,
        own_alpha=torch.minimum(p_full, q, out=scratch).sum(1),
        vocab=heads.vocab,
        label=label,
    )


def _at_label(z: Tensor, columns: Tensor) -> list[Tensor]:
    """z [n, Vd] at the label, 0 where it has no column here, and 1 or 0 for whether it has one; [n] each."""
    here = columns >= 0
    if not z.shape[1]:
        return [z.new_zeros(columns.shape), here.to(z.dtype)]
    values = z.gather(1, columns.clamp(min=0)[:, None]).squeeze(1)
    return [torch.where(here, values, 0.0), here.to(z.dtype)]


def label_columns(labels: Tensor, scored: Tensor, heads: Heads) -> Tensor:
    """int64 [R], the row of the draft's head that each label (a target id, -1: none) has on this rank, or -1.

    Only the `scored` rows' labels are read.

    Raises:
        ValueError: a label outside the vocabulary; the same on every rank.
    """
    labels = torch.where(scored, labels, -1)
    size = heads.teacher.shape[0] if heads.vocab is None else heads.vocab.size
    if labels.numel() and int(labels.max()) >= size:
        raise ValueError(f"label {int(labels.max())} is outside the vocabulary of {size} tokens")
    rows = heads.teacher.shape[0]
    here = (labels >= heads.start) & (labels < heads.start + rows)
    own = torch.where(here, labels - heads.start, 0)
    if heads.columns is not None:
        # At least one, for a rank without tokens.
        places = torch.full((max(1, rows),), -1, dtype=torch.int64, device=labels.device)
        places[heads.columns] = torch.arange(heads.columns.numel(), device=labels.device)
        own = places[own]
    return torch.where(here, own, -1)
