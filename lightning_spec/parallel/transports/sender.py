"""A source's side of a link: sends now where there is room, otherwise from a thread, in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_spec.errors import TapError
from lightning_spec.parallel.transports.base import Header, Outbox
from lightning_spec.parallel.transports.board import Board, Wait


@dataclass(slots=True)
class Sent:
    """Counts since the last `take_counts`."""

    blocks: int = 0
    bytes: int = 0
    deferred: int = 0
    seconds_waiting: float = 0.0


class Sender:
    """`put` never waits: a block that finds no free slot, or earlier blocks in front of it, is copied and queued.

    Args:
        host: pipeline rank of the other end.
        slots: landing slots of the link, for errors.
        bound_s: longest wait for one slot.
    """

    def __init__(self, outbox: Outbox, board: Board, host: int, slots: int, bound_s: float) -> None:
        self._outbox, self._board, self._host, self._slots, self._bound_s = outbox, board, host, slots, bound_s
        self._queue: deque[tuple[Header, Tensor]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: TapError | None = None
        self._counts = Sent()
        self._closing = False

    def put(self, header: Header, parts: Sequence[Tensor]) -> None:
        self._counts.blocks += 1
        self._counts.bytes += header.rows * header.width * parts[0].element_size()
        # Only the writer's thread empties the queue, and a block stays in it until it is written.
        if not self._queue and self._outbox.try_write(header, parts):
            return
        block = self._outbox.keep(parts)
        self._counts.deferred += 1
        with self._changed:
            self._queue.append((header, block))
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name=f"tap-writer-{header.stage}", daemon=True)
            self._thread.start()

    def flush(self, wait: Wait) -> None:
        """Return when everything that was put lies in its slot.

        Raises:
            TapError: the writer's thread gave up, or as `Wait.tick`.
        """
        while True:
            with self._changed:
                if self._error is not None:
                    raise self._error
                if not self._queue:
                    return
                self._changed.wait(0.02)
            wait.tick()

    @property
    def error(self) -> TapError | None:
        """What made the writer's thread give up."""
        return self._error

    def take_counts(self) -> Sent:
        counts, self._counts = self._counts, Sent()
        return counts

    def stop(self) -> None:
        """End the thread as soon as it looks around; `join` waits for that."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                header, block = self._queue[0]
            try:
                self._write_one(header, block)
            except TapError as error:
                self._give_up(error)
                return
            except Exception as error:  # a closed file, a broken transport
                wait = self._wait(header)
                self._give_up(wait.error(f"{type(error).__name__}: {error}"))
                return
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()

    def _write_one(self, header: Header, block: Tensor) -> None:
        wait, start = self._wait(header), time.perf_counter()
        self._outbox.wait_for_slot(wait)
        self._counts.seconds_waiting += time.perf_counter() - start
        self._outbox.write(header, block, wait)

    def _wait(self, header: Header) -> Wait:
        place = f"step {header.step}, put of stage {header.stage}, micro-batch {header.micro}"
        slot = (header.stamp - 1) % self._slots

        def overdue() -> str:
            return f"slot {slot} of stage {header.stage} still unconsumed after {self._bound_s:g} s"

        return Wait(self._board, self._bound_s, self._host, place, overdue)

    def _give_up(self, error: TapError) -> None:
        with self._changed:
            self._error = error
            self._queue.clear()
            self._changed.notify_all()
