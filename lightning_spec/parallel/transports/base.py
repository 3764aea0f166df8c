"""The interface of a transport: one link carries the blocks of one source stage, in order, to the host.

Every link is a ring of landing slots that the host owns. A slot's header says what lies in it; `stamp` is the running
number of the block on its link, from 1, and 0 means that the slot is free. The source fills a slot and then stamps it;
the host copies the block out and frees the slot, which is the source's credit for another block.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_spec.parallel.transports.board import Wait

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What a channel carries; a header holds the place in this list."""


@dataclass(frozen=True, slots=True)
class Header:
    """What lies in a landing slot."""

    stamp: int
    step: int
    stage: int
    micro: int
    rows: int
    width: int
    dtype: int

    SIZE: ClassVar[int] = 64
    """Bytes of a header: one cache line, so that headers of two slots do not share one."""
    _FORMAT: ClassVar[struct.Struct] = struct.Struct("<7q8x")

    def pack(self) -> bytes:
        return self._FORMAT.pack(self.stamp, self.step, self.stage, self.micro, self.rows, self.width, self.dtype)

    @classmethod
    def unpack(cls, raw: bytes) -> Header:
        return cls(*cls._FORMAT.unpack(raw))

    @property
    def kind(self) -> str:
        """Its dtype in words, also where the number is not one of ours."""
        return str(DTYPES[self.dtype]) if 0 <= self.dtype < len(DTYPES) else f"unknown dtype {self.dtype}"


@dataclass(frozen=True, slots=True)
class RingShape:
    """A link's landing slots."""

    slots: int
    rows: int
    """Rows of the largest block that fits."""
    width: int
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Of one slot."""
        return self.rows * self.width

    @property
    def bytes(self) -> int:
        """Of all slots' data."""
        return self.slots * self.elements * self.dtype.itemsize


class Outbox(ABC):
    """The source's end of a link. Blocks are [rows, width], or parts [rows, *] that lie side by side."""

    @abstractmethod
    def try_write(self, header: Header, parts: Sequence[Tensor]) -> bool:
        """Send the block now if that needs no waiting; False: it does, hand a copy to a thread that calls `write`."""

    def keep(self, parts: Sequence[Tensor]) -> Tensor:
        """A block of its own [rows, width] for `write`, made on the thread that has just computed `parts`."""
        return torch.cat(list(parts), dim=1) if len(parts) > 1 else parts[0].clone()

    @abstractmethod
    def wait_for_slot(self, wait: Wait) -> None:
        """Return when the next block has a free slot.

        Raises:
            TapError: the bound is over, the host is gone, or the channel has failed.
        """

    @abstractmethod
    def write(self, header: Header, block: Tensor, wait: Wait) -> None:
        """Send what `keep` gave, after `wait_for_slot`; returns when the block may be forgotten."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; no thread may be in `wait_for_slot` or `write`. May be called twice."""


class Inbox(ABC):
    """The host's end of a link."""

    memory: int = 0
    """Bytes of its landing slots."""

    @abstractmethod
    def arrived(self) -> Header | None:
        """Header of the next block if it is here; never waits."""

    @abstractmethod
    def wait(self, wait: Wait) -> Header:
        """Header of the next block, as soon as it is here.

        Raises:
            TapError: the bound is over, the source is gone, or the channel has failed.
        """

    @abstractmethod
    def take(self, header: Header) -> Tensor:
        """The next block [rows, width], a copy; frees its slot. `header` came from `arrived` and fits the ring."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. May be called twice."""


def spread(into: Tensor, parts: Sequence[Tensor]) -> None:
    """Write parts [rows, *] side by side into [rows, width]."""
    column = 0
    for part in parts:
        into[:, column : column + part.shape[1]].copy_(part)
        column += part.shape[1]
