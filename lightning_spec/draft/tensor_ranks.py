"""The tensor-parallel ranks of a draft: its weights are on each of them, rows and the vocabulary are divided.

Megatron shards the weights of a layer. A draft is one layer or few, so that would save little memory, and cost two
all-reduces of every row's state in every pass and layer. Rows, on the other hand, are independent of each other given
the trunk keys: ranks that divide the rows need no message between the fusion of the taps and the loss, in all passes.
The loss needs every row on every rank that holds a part of the vocabulary: one gather of states per chunk of rows.
So every rank has all weights, makes a share of their gradients, and the shares are summed with those of data and
context parallelism.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_spec.loss.vocab import VocabShard


class TensorRanks:
    """This rank among those that share its rows.

    Args:
        vocab: of the micro-batch; None: the rank is alone.
    """

    def __init__(self, vocab: VocabShard | None) -> None:
        self.group = None if vocab is None else vocab.group
        self.size = 1 if vocab is None else dist.get_world_size(vocab.group)
        self.rank = 0 if vocab is None else dist.get_rank(vocab.group)

    def cut(self, count: int, rank: int | None = None) -> slice:
        """The consecutive rows out of `count` that are this rank's (or another one's)."""
        per, rank = self._per(count), self.rank if rank is None else rank
        return slice(min(rank * per, count), min((rank + 1) * per, count))

    def share(self, states: Tensor) -> Tensor:
        """The same rows [R, ...]; gradients reach this rank's `cut` of them alone."""
        if self.size == 1:
            return states
        mine = self.cut(states.shape[0])
        return torch.cat([states[: mine.start].detach(), states[mine], states[mine.stop :].detach()])

    def stack(self, part: Tensor, most: int) -> Tensor:
        """Every rank's rows on every rank, [size * most, ...]: rank r's begin at r * most. No gradient.

        Args:
            part: [n, ...], n at most `most`, which is equal on all ranks. What follows the n rows is not defined.
        """
        part = part.detach()
        if self.size == 1 or not most:
            return part
        if part.shape[0] < most:
            part = torch.cat([part, part.new_empty(most - part.shape[0], *part.shape[1:])])
        every = part.new_empty(self.size * most, *part.shape[1:])
        dist.all_gather_into_tensor(every, part.contiguous(), group=self.group)
        return every

    def gather(self, part: Tensor, count: int) -> Tensor:
        """[count, ...] of the ranks' `cut`s [n, ...]."""
        return self.stack(part, self._per(count))[:count]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's `cut` of the sum over ranks of x [T, ...]. Give float32 or float64."""
        if self.size == 1 or not x.shape[0]:
            return x
        count, per = x.shape[0], self._per(x.shape[0])
        short = per * self.size - count
        if short:
            x = torch.cat([x, x.new_zeros(short, *x.shape[1:])])
        total = x.new_empty(per, *x.shape[1:])
        dist.reduce_scatter_tensor(total, x.contiguous(), group=self.group)
        mine = self.cut(count)
        return total[: mine.stop - mine.start]

    def _per(self, count: int) -> int:
        return -(-count // self.size)
