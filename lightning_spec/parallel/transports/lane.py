"""A process group of the channel's own, and the threads that listen on it.

The group is made by hand on the pipeline group's store, so that making it concerns its members only and its messages
never mix with the schedule's. Its gloo half carries headers and credits (and the data of CPU tensors), its NCCL half
the data of GPU tensors, on a stream of its own.

Gloo notices at once when the other end's process dies. It has no way to cancel a receive, but a receive that times out
closes the group's connections, which is what `Lane.close` wants: waiting threads return with an error.

The NCCL half has NOT YET RUN ON A GPU; the rest is the same code on both.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_spec.parallel.transports.board import Board

_DATA, _NOTHING = 1, 2  # message tags; those of small messages are their users'
_FOREVER = timedelta(days=7)
"""A listener waits through rollouts, saving and whatever else lies between two steps."""


class Lane:
    """One rank's view of the group. Making it needs all ranks at the same time.

    Args:
        store: of the pipeline group, with a prefix of this channel's own.
        seconds: bound for connecting, and for a message once the other end is ready for it.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, seconds: float) -> None:
        self.device = device
        self._limit = timedelta(seconds=seconds)
        self._small: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, self._limit)
        self._large: Any = self._small
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._limit
            self._large = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
            self._stream = torch.cuda.Stream(device)

    def send_small(self, values: Tensor, to: int, tag: int) -> dist.Work:
        """Start sending a CPU tensor; it and the handle must live until it has arrived."""
        return self._small.send([values], to, tag)

    def receive_small(self, values: Tensor, source: int, tag: int) -> None:
        """Wait for a small message, without a bound."""
        self._small.recv([values], source, tag).wait(_FOREVER)

    def send(self, block: Tensor, to: int, after: torch.cuda.Event | None) -> None:
        """Send a contiguous block and wait until it may be forgotten; `after`: when it has been computed."""
        if self._stream is None:
            self._large.send([block], to, _DATA).wait(self._limit)
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            self._large.send([block], to, _DATA).wait()
            self._stream.synchronize()

    def receive(self, shape: tuple[int, int], dtype: torch.dtype, source: int) -> Tensor:
        """A block, complete."""
        if self._stream is None:
            block = torch.empty(shape, dtype=dtype)
            if block.numel():
                self._large.recv([block], source, _DATA).wait(self._limit)
            return block
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            block = torch.empty(shape, dtype=dtype, device=self.device)
            if block.numel():
                self._large.recv([block], source, _DATA).wait()
                self._stream.synchronize()
        return block

    def say(self, values: Tensor, to: int, tag: int) -> None:
        """A last small message; gives up soon if nobody listens."""
        with contextlib.suppress(RuntimeError):
            self.send_small(values, to, tag).wait(timedelta(seconds=1))

    def close(self, peers: Iterable[int]) -> None:
        """Close the connections: this rank's waits for `peers` end, and all waits of others for this rank.

        To be called once. A receive from a peer that has closed already fails without closing anything, hence each.
        """
        for peer in peers:
            with contextlib.suppress(RuntimeError):
                self._small.recv([torch.zeros(1)], peer, _NOTHING).wait(timedelta(milliseconds=1))
        if self._stream is not None:
            self._large.abort()


class Listener(ABC):
    """A thread that takes another rank's messages until that rank says goodbye, or the connection ends."""

    def __init__(self, lane: Lane, board: Board, peer: int) -> None:
        self.lane, self.board, self.peer = lane, board, peer
        self.news = threading.Condition()
        """Notified after each message."""
        self.ended: str | None = None
        """Why no more messages come."""
        self._thread = threading.Thread(target=self._run, name=f"tap-listener-{peer}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @abstractmethod
    def take_one(self) -> bool:
        """Wait for a message and deal with it; False: it was a goodbye.

        Raises:
            ValueError: the message breaks the rules.
        """

    @abstractmethod
    def reached(self) -> str:
        """What came last, in words."""

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        member = self.board.members[self.peer]
        try:
            while self.take_one():
                with self.news:
                    self.news.notify_all()
            why = f"{member} has closed the channel"
        except Exception as error:
            fault = "breaks the rules" if isinstance(error, ValueError) else "is lost"
            why = f"the connection to {member} {fault} after {self.reached()} ({first_sentence(error)})"
            if not self.board.closing.is_set():
                self.board.fail(f"TapChannel, {self.board.me}: {why}")
        with self.news:
            self.ended = why
            self.news.notify_all()


def first_sentence(error: BaseException) -> str:
    """Of an error's text, without the library's file names."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rpartition("] ")[2].partition(". ")[0]
