"""Vocabulary parallelism: which rows of a vocabulary a rank holds, and a softmax whose columns are split over ranks.

Every rank sweeps its own columns and keeps its own maximum m_r and sum s_r = sum exp(z - m_r) of each row. One
all-gather of such scalars a row then gives M = max m_r and S = sum s_r exp(m_r - M) on every rank. They are combined
in the order of the ranks, so that all ranks hold the same bits and decide alike (most likely token, dropped rows).
With the vocabulary on one rank the same formulas give exactly what they give without them: m_r - M is 0 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Rows [start, stop) of a vocabulary of `size` tokens are on this rank; the ranks of `group` hold all, in order."""

    start: int
    stop: int
    size: int
    group: dist.ProcessGroup

    @classmethod
    def split(cls, size: int, group: dist.ProcessGroup) -> VocabShard:
        """This rank's part of a vocabulary cut into equal parts, the last ones shorter or empty: no padding rows."""
        ranks = dist.get_world_size(group)
        each = -(-size // ranks)
        start = min(dist.get_rank(group) * each, size)
        return cls(start, min(start + each, size), size, group)

    @property
    def rows(self) -> int:
        """Tokens on this rank."""
        return self.stop - self.start

    @property
    def ranks(self) -> int:
        """Ranks that hold the vocabulary together."""
        return dist.get_world_size(self.group)

    @property
    def width(self) -> int:
        """Tokens a rank, rounded up: the same number on every rank, so chunk sizes that follow from it are too."""
        return -(-self.size // self.ranks)

    def part(self, target_ids: Tensor) -> Tensor:
        """[k] int64, ascending: the draft ids whose target ids [Vd] are on this rank; k may be 0."""
        return ((target_ids >= self.start) & (target_ids < self.stop)).nonzero().squeeze(1)

    def gather(self, values: Tensor) -> Tensor:
        """[ranks, *] the values of every rank, in the order of the vocabulary; they have one shape."""
        out = values.new_empty(self.ranks, *values.shape)
        dist.all_gather_into_tensor(out.flatten(), values.contiguous().flatten(), group=self.group)
        return out

    def sum_(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place; returns it."""
        dist.all_reduce(values, group=self.group)
        return values


def from_ranks(vocab: VocabShard | None, values: Sequence[Tensor]) -> Sequence[Tensor]:
    """For each of `values` [n], all ranks' [ranks, n]: one all-gather for all of them, none where one rank has all."""
    if vocab is None:
        return [value[None] for value in values]
    return vocab.gather(torch.stack(tuple(values))).unbind(1)


@dataclass(slots=True)
class SplitSoftmax:
    """n softmaxes over a vocabulary split over ranks."""

    top: Tensor
    """[n] M, the largest logit."""
    sum: Tensor
    """[n] S, the sum of exp(z - M)."""
    shift: Tensor
    """[ranks, n] m_r - M, at most 0."""
    factor: Tensor
    """[ranks, n] exp(m_r - M): brings a rank's sums of exp(z - m_r) to the common maximum."""
    winner: Tensor
    """[n] int64, the first rank that has M: of equally likely tokens it holds the lowest id."""

    @classmethod
    def of(cls, maxima: Tensor, sums: Tensor) -> SplitSoftmax:
        """From each rank's m_r and s_r [ranks, n]."""
        top, winner = maxima.max(0)
        shift = maxima - top
        factor = shift.exp()
        return cls(top, (factor * sums).sum(0), shift, factor, winner)

    def divisor(self, vocab: VocabShard | None) -> Tensor:
        """[n, 1] what this rank's exp(z - m_r) are divided by to give its columns of the distribution."""
        rank = 0 if vocab is None else dist.get_rank(vocab.group)
        return (self.sum / self.factor[rank])[:, None]

    def of_winner(self, values: Tensor) -> Tensor:
        """[n] the values [ranks, n] of the rank that holds the most likely token."""
        return values.gather(0, self.winner[None]).squeeze(0)


def maximum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(m [n], its column [n]) of logits [n, w]. Without columns m is the lowest finite number: it never wins, and
    unlike -inf it makes no NaN when it is shifted."""
    if logits.shape[1] == 0:
        lowest = logits.new_full((logits.shape[0],), torch.finfo(logits.dtype).min)
        return lowest, torch.zeros_like(lowest, dtype=torch.int64)
    values, columns = logits.max(1)
    return values, columns


def exponentials_(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turns logits [n, w] into exp(logits - m) in place; returns (m [n], its column [n], their sum [n])."""
    m, column = maximum(logits)
    return m, column, logits.sub_(m[:, None]).exp_().sum(1)
