"""One context-parallel group, and the messages inside it: point to point without waiting, and all-to-all.

Every byte that this package sends goes through `Context.post` and `Context.all_to_all`, which count it in `TRAFFIC`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Traffic:
    """Bytes that this process sent to others (not to itself) for context parallelism, since it started."""

    def __init__(self) -> None:
        self.sent = 0


TRAFFIC = Traffic()


class Posted:
    """Messages under way. Their tensors must not be written (sent ones) or read (arriving ones) before `wait`."""

    def __init__(self, handles: Sequence[dist.Work], tensors: Sequence[Tensor]) -> None:
        self._handles, self._tensors = handles, tensors

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        self._handles, self._tensors = (), ()


@dataclass(frozen=True, slots=True)
class Context:
    """A context-parallel group as one of its members sees it."""

    group: ProcessGroup | None
    """None where the group has one member."""
    rank: int
    size: int

    @classmethod
    def single(cls) -> Context:
        """The group of one process, which needs no torch.distributed."""
        return cls(None, 0, 1)

    @classmethod
    def of(cls, group: ProcessGroup | None) -> Context:
        """The view of this process on `group`; None and groups of one member give `single()`.

        Raises:
            ValueError: this process is not in the group.
        """
        if group is None:
            return cls.single()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("this process is not a member of the context-parallel group")
        return cls(group, rank, size) if size > 1 else cls.single()

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int = 0) -> Posted:
        """Start sending (tensor, to rank) and receiving into (tensor, from rank); ranks count inside the group.

        Messages between two ranks arrive in the order of posting, separately for each tag (NCCL ignores the tag: post
        in the same order on all ranks). Both sides must know the sizes; empty tensors are not sent, so a pair of ranks
        that has nothing to exchange does not meet.
        """
        operations, tensors = [], []
        for call, pairs in ((dist.isend, sends), (dist.irecv, receives)):
            for tensor, peer in pairs:
                if not tensor.is_contiguous():
                    raise ValueError("messages must be contiguous")
                tensors.append(tensor)
                if tensor.numel():
                    operations.append(dist.P2POp(call, tensor, group=self.group, tag=tag, group_peer=peer))
        TRAFFIC.sent += sum(tensor.nbytes for tensor, _ in sends)
        return Posted(dist.batch_isend_irecv(operations) if operations else (), tensors)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send the first send[0] rows of `x` to rank 0, the next send[1] to rank 1, ...; returns what arrived.

        Args:
            x: [sum(send), ...], contiguous.
            receive: rows that come from each rank; receive[s] here is send[rank] there.

        Returns:
            [sum(receive), ...]: the rows of rank 0, then of rank 1, ...
        """
        if self.size == 1:
            return x
        arrived = x.new_empty((sum(receive), *x.shape[1:]))
        TRAFFIC.sent += (sum(send) - send[self.rank]) * (x[:1].nbytes if x.shape[0] else 0)
        dist.all_to_all_single(arrived, x.contiguous(), list(receive), list(send), group=self.group)
        return arrived

    def next(self, steps: int = 1) -> int:
        """The rank `steps` further along the ring (negative: back)."""
        return (self.rank + steps) % self.size


def pack(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values [T, K, D] in one buffer [2, T, K, D], so that they travel as one message."""
    return torch.stack((k, v))
