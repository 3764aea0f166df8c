"""The link of a source that runs on the host's own rank (interleaved stages): a queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from lightning_spec.parallel.transports.base import Header, Inbox, Outbox, spread
from lightning_spec.parallel.transports.board import Wait


class LocalLink(Outbox, Inbox):
    """Both ends. A block is copied once, when it is put: its parts may alias activations, and `get` gives it away."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[Header, Tensor]] = deque()

    def try_write(self, header: Header, parts: Sequence[Tensor]) -> bool:
        block = parts[0].new_empty((header.rows, header.width))
        spread(block, parts)
        self._blocks.append((header, block))
        return True

    def wait_for_slot(self, wait: Wait) -> None:
        raise AssertionError("a local link never waits for a slot")

    def write(self, header: Header, block: Tensor, wait: Wait) -> None:
        raise AssertionError("a local link never defers a block")

    def arrived(self) -> Header | None:
        return self._blocks[0][0] if self._blocks else None

    def wait(self, wait: Wait) -> Header:
        header = self.arrived()
        if header is None:
            # The block would be put by the very thread that asks for it: it can never come.
            raise wait.error("its source is this rank itself and has put nothing")
        return header

    def take(self, header: Header) -> Tensor:
        return self._blocks.popleft()[1]

    def close(self) -> None:
        self._blocks.clear()
