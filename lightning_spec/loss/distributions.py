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


def statistics(taught: Taught, z: Tensor, scratch: Tensor, heads: Heads) -> ChunkStatistics:
    """Overwrites the draft's logits z [n, Vd] (with q) and scratch [n, Vd]."""
    p, mass = taught.p, taught.mass
    m, column = maximum(z)
    z.sub_(m[:, None])
    d = torch.mul(p, z, out=scratch).sum(1)
    q = z.exp_()
    found = from_ranks(heads.vocab, [m, q.sum(1), d, heads.names(column).to(m.dtype)])
    softmax = SplitSoftmax.of(found[0], found[1])
    q.div_(softmax.divisor(heads.vocab))
    # sum p (z - M) from the ranks' sum p (z - m_r): all terms have one sign, so nothing cancels.
    d = (found[2] + taught.shares * softmax.shift).sum(0)
    p_full = p if mass is None else torch.mul(p, mass[:, None], out=scratch)
    return ChunkStatistics(
        p=p,
        q=q,
        cross_entropy=softmax.sum.log() - d,
        teacher_top=taught.top,
        draft_top=softmax.of_winner(found[3]).to(torch.int64),
        mass=mass,
        own_alpha=torch.minimum(p_full, q, out=scratch).sum(1),
        vocab=heads.vocab,
    )
