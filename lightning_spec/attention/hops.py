"""How the key/value blocks of the other ranks come by, and how their gradients go home.

Step s of a sweep is about the rows of rank (rank - s) % size. `blocks` yields its keys and values, the next ones
already under way; gradients given to `Return.add` step by step arrive at their owner in `Return.home`. Two ways: along
the ring (whole parts, from neighbour to neighbour), or directly from the owner (only rows that are seen: windows).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_spec.attention.context import Context, Posted

_BLOCKS, _GRADIENTS = 0, 1  # message tags


class Return(Protocol):
    """Gradients on their way home, of one sweep."""

    def add(self, step: int, grads: Tensor) -> None:
        """Hand over this rank's gradients [2, keys[step], K, D] of the block of `step`; the tensor is given away."""

    def home(self) -> Tensor:
        """Gradients of this rank's own keys and values, summed over all ranks: [2, T_r, K, D]."""


class Hops(Protocol):
    @property
    def keys(self) -> Sequence[int]:
        """Rows of the block of each step."""

    def blocks(self, own: Tensor) -> Iterator[Tensor]:
        """Keys and values [2, keys[s], K, D] of steps 0, 1, ..., size - 1; the first is `own`."""

    def gradients(self) -> Return: ...


class RingHops:
    """Whole parts travel around the ring; gradients travel with them, one step behind, home after `size` hops.

    Args:
        keys: rows on the ranks rank, rank - 1, rank - 2, ... (one for each step).
        context: the group.
    """

    def __init__(self, keys: Sequence[int], context: Context) -> None:
        if len(keys) != context.size:
            raise ValueError(f"{len(keys)} steps on a ring of {context.size} ranks")
        self.keys: Sequence[int] = tuple(keys)
        self.context = context

    def blocks(self, own: Tensor) -> Iterator[Tensor]:
        context, current = self.context, own
        for step in range(context.size):
            if step + 1 == context.size:
                yield current
                return
            arriving = own.new_empty((2, self.keys[step + 1], *own.shape[2:]))
            posted = context.post([(current, context.next())], [(arriving, context.next(-1))], _BLOCKS)
            yield current
            posted.wait()
            current = arriving

    def gradients(self) -> RingReturn:
        return RingReturn(self)


class RingReturn:
    def __init__(self, hops: RingHops) -> None:
        self._hops = hops
        self._arriving, self._posted = torch.empty(0), Posted((), ())

    def add(self, step: int, grads: Tensor) -> None:
        hops, context = self._hops, self._hops.context
        if step:
            self._posted.wait()
            grads += self._arriving  # what the ranks before this one found for the same block
        if context.size == 1:
            self._arriving = grads
            return
        self._arriving = grads.new_empty((2, hops.keys[(step + 1) % context.size], *grads.shape[2:]))
        self._posted = context.post([(grads, context.next())], [(self._arriving, context.next(-1))], _GRADIENTS)

    def home(self) -> Tensor:
        self._posted.wait()
        return self._arriving


class DirectHops:
    """Owners send exactly the rows that a rank sees; their gradients return directly.

    Args:
        wanted: wanted[s] are the local rows of this rank that rank + s sees, [n] int64; wanted[0] is not used.
        keys: rows of this rank itself, then the rows that it sees of rank - 1, rank - 2, ...
        context: the group.
    """

    def __init__(self, wanted: Sequence[Tensor], keys: Sequence[int], context: Context) -> None:
        if not len(keys) == len(wanted) == context.size:
            raise ValueError(f"{len(keys)} and {len(wanted)} steps in a group of {context.size} ranks")
        self.wanted, self.context = wanted, context
        self.keys: Sequence[int] = tuple(keys)

    def blocks(self, own: Tensor) -> Iterator[Tensor]:
        context, current = self.context, own
        for step in range(1, context.size):
            leaving = own.index_select(1, self.wanted[step].to(own.device))
            arriving = own.new_empty((2, self.keys[step], *own.shape[2:]))
            posted = context.post([(leaving, context.next(step))], [(arriving, context.next(-step))], _BLOCKS)
            yield current
            posted.wait()
            current = arriving
        yield current

    def gradients(self) -> DirectReturn:
        return DirectReturn(self)


class DirectReturn:
    def __init__(self, hops: DirectHops) -> None:
        self._hops = hops
        self._total = torch.empty(0)
        self._arriving, self._step, self._posted = torch.empty(0), 0, Posted((), ())

    def add(self, step: int, grads: Tensor) -> None:
        if step == 0:
            self._total = grads
            return
        self._settle()
        context = self._hops.context
        self._step = step
        self._arriving = grads.new_empty((2, self._hops.wanted[step].numel(), *grads.shape[2:]))
        self._posted = context.post([(grads, context.next(-step))], [(self._arriving, context.next(step))], _GRADIENTS)

    def home(self) -> Tensor:
        self._settle()
        return self._total

    def _settle(self) -> None:
        self._posted.wait()
        if self._step:
            self._total.index_add_(1, self._hops.wanted[self._step].to(self._total.device), self._arriving)
            self._step = 0
