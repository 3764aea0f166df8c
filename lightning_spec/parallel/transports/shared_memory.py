"""The link between two processes of one machine: a ring in memory that both have mapped, and two pipes as doorbells.

The host makes all three without names (memfd, anonymous pipes), and the source opens them through the host's /proc
entry, so that nothing is left in /dev/shm however a process ends. A byte in the first pipe says "one more block is
stamped", a byte in the second "one more slot is free".

Order of memory: a processor other than x86 may show another core the stamp before the data. Here nobody trusts a stamp
before it has read that block's byte from the pipe, and the kernel's lock of the pipe orders everything that was written
before the byte before everything that is read after it. The stamps are then checked, not waited for.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from lightning_spec.parallel.transports.base import Header, Inbox, Outbox, RingShape, spread
from lightning_spec.parallel.transports.board import Wait, open_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RingOffer:
    """What a source needs to open a ring that the host made; crosses processes by pickling."""

    pid: int
    memory: int
    bell: int
    """Number, in the host's process, of the end that the source writes."""
    credit: int
    """Of the end that the source reads."""
    shape: RingShape
    bytes: int


class _Mapped:
    """The memory of a ring: headers first, then the slots' data."""

    def __init__(self, file: int, size: int, shape: RingShape) -> None:
        # Populated now, so that no forward pays for the first touch of the pages.
        self._map = mmap.mmap(file, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        self.shape = shape

    def header(self, slot: int) -> Header:
        return Header.unpack(self._map[slot * Header.SIZE : (slot + 1) * Header.SIZE])

    def stamp(self, slot: int, header: Header) -> None:
        """Everything but the stamp, then the stamp."""
        raw, at = header.pack(), slot * Header.SIZE
        self._map[at + 8 : at + Header.SIZE] = raw[8:]
        self._map[at : at + 8] = raw[:8]

    def free(self, slot: int) -> None:
        self._map[slot * Header.SIZE : slot * Header.SIZE + 8] = bytes(8)

    def data(self, slot: int, rows: int) -> Tensor:
        """[rows, width]: the slot's block, in place."""
        shape = self.shape
        if rows == 0:
            return torch.empty((0, shape.width), dtype=shape.dtype)
        at = headers_bytes(shape) + slot * shape.elements * shape.dtype.itemsize
        flat = torch.frombuffer(self._map, dtype=shape.dtype, count=rows * shape.width, offset=at)
        return flat.view(rows, shape.width)

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view still lives; the memory goes with it
            self._map.close()


class SharedInbox(Inbox):
    """Makes the ring. `offer` goes to the source; `seal` when the source has opened it."""

    def __init__(self, shape: RingShape, *, data_in_ring: bool = True) -> None:
        size = headers_bytes(shape) + (shape.bytes if data_in_ring else 0)
        memory = os.memfd_create("tap-ring")
        self._source_ends: list[int] = [memory]
        try:
            os.ftruncate(memory, size)
            self._ring = _Mapped(memory, size, shape)
            self._bell, bell = os.pipe()
            credit, self._credit = os.pipe()
        except BaseException:
            os.close(memory)
            raise
        self._source_ends += [bell, credit]
        os.set_blocking(self._bell, False)
        self.memory = size
        self.shape = shape
        self.offer = RingOffer(os.getpid(), memory, bell, credit, shape, size)
        self._rung = self._read = 0
        self._closed = False

    def seal(self) -> None:
        """Close the source's ends here, so that a pipe ends when the source does."""
        for file in self._source_ends:
            os.close(file)
        self._source_ends.clear()

    def arrived(self) -> Header | None:
        return self.peek(0)

    def peek(self, ahead: int) -> Header | None:
        """Header of the block that lies `ahead` blocks behind the next one, if it is here."""
        at = self._read + ahead
        if self._rung <= at:
            self._listen()
        return self._ring.header(at % self.shape.slots) if self._rung > at else None

    def wait(self, wait: Wait) -> Header:
        return self.arrived() or self.wait_until(wait, self.arrived)

    def wait_until(self, wait: Wait, look: Callable[[], Header | None]) -> Header:
        """What `look` finds, which is called again whenever the source may have rung."""
        return _until(wait, self._bell, look, "the source")

    def take(self, header: Header) -> Tensor:
        block = self._ring.data(self._read % self.shape.slots, header.rows).clone()
        self.release()
        return block

    def release(self) -> None:
        """Free the slot that was read, and give its credit."""
        self._ring.free(self._read % self.shape.slots)
        self._read += 1
        with contextlib.suppress(BrokenPipeError):  # the source has closed; nobody needs the credit
            os.write(self._credit, b"\1")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.seal()
        os.close(self._bell)
        os.close(self._credit)
        self._ring.close()

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._rung += len(os.read(self._bell, 65536))


class SharedOutbox(Outbox):
    """Opens the host's ring.

    Raises:
        OSError: the host's process cannot be opened (another user, or another PID namespace).
    """

    def __init__(self, offer: RingOffer) -> None:
        self.shape = offer.shape
        memory = open_of(offer.pid, offer.memory, os.O_RDWR)
        try:
            self._ring = _Mapped(memory, offer.bytes, offer.shape)
        finally:
            os.close(memory)
        self._bell = open_of(offer.pid, offer.bell, os.O_WRONLY)
        self._credit = open_of(offer.pid, offer.credit, os.O_RDONLY | os.O_NONBLOCK)
        self._written = self._freed = 0
        self._closed = False

    @property
    def slot(self) -> int:
        """Where the next block goes."""
        return self._written % self.shape.slots

    def try_write(self, header: Header, parts: Sequence[Tensor]) -> bool:
        if not self._has_slot():
            return False
        spread(self._ring.data(self.slot, header.rows), parts)
        self.publish(header)
        return True

    def wait_for_slot(self, wait: Wait) -> None:
        _until(wait, self._credit, self._has_slot, "the host")

    def write(self, header: Header, block: Tensor, wait: Wait) -> None:
        self._ring.data(self.slot, header.rows).copy_(block)
        self.publish(header)

    def publish(self, header: Header) -> None:
        """Stamp the slot, whose data is complete, and ring."""
        self._ring.stamp(self.slot, header)
        self._written += 1
        with contextlib.suppress(BrokenPipeError):  # the host has closed: the next wait says so
            os.write(self._bell, b"\1")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        os.close(self._bell)
        os.close(self._credit)
        self._ring.close()

    def _has_slot(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._freed += len(os.read(self._credit, 65536))
        # The second test cannot fail while both ends keep the rules; it keeps a wrong count from destroying a block.
        return self._written - self._freed < self.shape.slots and self._ring.header(self.slot).stamp == 0


def headers_bytes(shape: RingShape) -> int:
    """Bytes before the data, a whole number of pages."""
    return -(-shape.slots * Header.SIZE // mmap.PAGESIZE) * mmap.PAGESIZE


def _until(wait: Wait, pipe: int, look: Callable[[], T | None], who: str) -> T:
    """What `look` finds, asked again whenever the pipe speaks or it is time to look around."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while True:
        # Asked before looking: whatever the other end sent before it left is found.
        left = wait.board.left(wait.peer)
        found = look()
        if found:
            return found
        seconds = wait.tick()
        if left:
            raise wait.error(f"{who} has closed the channel ({wait.board.state(wait.peer)})")
        spoke = poll.poll(seconds * 1000)
        if spoke and not spoke[0][1] & select.POLLIN:
            # The other end's pipe is closed; if its process was killed, the kernel shows that a moment later.
            time.sleep(0.002)
