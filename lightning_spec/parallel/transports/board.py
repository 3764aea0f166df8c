"""What the ranks of a channel know of each other while they wait: the first failure, and who is still alive.

Nothing here is a collective. Ranks of one machine share a few bytes of memory and watch each other's processes; ranks
of several machines also share a key of the group's store.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lightning_spec.errors import TapError

_TEXT = 8192
"""Most bytes of a failure's text."""
_KEY = "failure"
_STORE_EVERY_S = 0.2
SLICE_S = 0.05
"""A wait looks around this often."""


@dataclass(frozen=True, slots=True)
class Member:
    """A rank of the channel, as the others see it."""

    rank: int
    """Pipeline rank."""
    global_rank: int
    host: str
    pid: int
    machine: str
    """Ranks with the same value see each other's processes and can share memory."""
    device: str
    """"cpu", or the UUID of its GPU."""
    visible: tuple[str, ...] = ()
    """UUIDs of the GPUs that this process can open."""

    def __str__(self) -> str:
        return f"pipeline rank {self.rank} (global rank {self.global_rank}, host {self.host}, pid {self.pid})"


class Board:
    """The shared memory of one machine's ranks, and the store's key where there are more machines.

    Layout of the memory: 8 bytes length of the first failure's text (0: none), the text, one byte a pipeline rank that
    is set when the rank has left in good order. Reads and writes hold a file lock, which orders them on any processor
    and which the kernel drops with the process that holds it.
    """

    def __init__(self, me: Member, members: Sequence[Member], store: dist.Store | None) -> None:
        """Opens this machine's memory if this rank is the machine's first; others call `join`.

        Args:
            store: where other machines' ranks are told; None if there are none.
        """
        self.me, self.members = me, tuple(members)
        self.closing = threading.Event()
        self._store = store
        self._store_seen = 0.0
        self._text: str | None = None
        self._peers = [member for member in members if member.machine == me.machine]
        self._file = -1
        self._started: dict[int, str] = {}
        self._guard = threading.Lock()
        if self._peers[0].rank == me.rank and hasattr(os, "memfd_create"):
            # A file without a name: nothing is left behind, however the processes end.
            self._file = os.memfd_create("tap-board")
            os.ftruncate(self._file, 8 + _TEXT + len(members))

    @property
    def offer(self) -> int:
        """The file's number in this process, for `join` of the machine's other ranks; -1 if another rank made it."""
        return self._file

    def join(self, offers: Sequence[int]) -> None:
        """Open what the machine's first rank made (`offers` by pipeline rank) and watch its other processes."""
        first = self._peers[0]
        if self._file < 0 and offers[first.rank] >= 0:
            self._file = open_of(first.pid, offers[first.rank], os.O_RDWR)
        for peer in self._peers:
            if peer.pid != self.me.pid:
                self._started[peer.rank] = started(peer.pid)

    def fail(self, text: str) -> str:
        """Tell all ranks; returns the text that all of them see, which is the first one given by any."""
        if self._text is None:
            text = text.encode()[:_TEXT].decode(errors="ignore")
            if self._store is not None:
                with contextlib.suppress(RuntimeError):  # a store that is gone cannot tell anyone
                    text = self._store.compare_set(_KEY, "", text).decode()
            self._text = self._write(text)
        return self._text

    def failure(self) -> str | None:
        """The first failure that any rank told of; cheap."""
        if self._text is None:
            self._text = self._read()
        if self._text is None and self._store is not None and time.monotonic() - self._store_seen > _STORE_EVERY_S:
            self._store_seen = time.monotonic()
            with contextlib.suppress(RuntimeError):
                if self._store.check([_KEY]):
                    self._text = self._write(self._store.get(_KEY).decode())
        return self._text

    def gone(self) -> Member | None:
        """A rank of this machine whose process ended without leaving the channel."""
        for rank, when in self._started.items():
            pid = self.members[rank].pid
            # A process that leaves ends right after it said so: look at its end first, then at what it said.
            if (when == "" or started(pid) != when) and not self.left(rank):
                return self.members[rank]
        return None

    def state(self, rank: int) -> str:
        """In words, for an error: is that rank alive?"""
        member = self.members[rank]
        if member.machine != self.me.machine:
            return f"{member} is on another machine"
        if self.left(rank):
            return f"{member} has closed the channel"
        gone = self.gone()
        return f"{member} is {'gone' if gone is not None and gone.rank == rank else 'alive'}"

    def leave(self) -> None:
        """This rank's process may end from now on."""
        if self._file >= 0:
            with self._locked():
                os.pwrite(self._file, b"\1", 8 + _TEXT + self.me.rank)

    def close(self) -> None:
        self.leave()
        self._started.clear()
        self._text = self._read() if self._text is None else self._text
        with self._guard:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1
        self._store = None

    def left(self, rank: int) -> bool:
        """Whether a rank of this machine has closed the channel in good order."""
        if self._file < 0:
            return False
        with self._locked():
            return os.pread(self._file, 1, 8 + _TEXT + rank) == b"\1"

    def _write(self, text: str) -> str:
        if self._file < 0:
            return text
        with self._locked():
            length = int.from_bytes(os.pread(self._file, 8, 0), "little")
            if length:
                return os.pread(self._file, length, 8).decode()
            raw = text.encode()
            os.pwrite(self._file, len(raw).to_bytes(8, "little") + raw, 0)
        return text

    def _read(self) -> str | None:
        if self._file < 0:
            return None
        with self._locked():
            length = int.from_bytes(os.pread(self._file, 8, 0), "little")
            return os.pread(self._file, length, 8).decode() if length else None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # The file lock belongs to this board's opening of the file; threads that share it take turns by the guard.
        with self._guard:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


class Wait:
    """One wait with a bound: whoever waits calls `tick` again and again and sleeps no longer than it says.

    Args:
        place: where this rank is ("step 3, get of stage 0, micro-batch 2").
        overdue: the error's text when the bound is over.
        peer: pipeline rank that is waited for.
    """

    def __init__(self, board: Board, bound_s: float, peer: int, place: str, overdue: Callable[[], str]) -> None:
        self.board, self.peer, self.place = board, peer, place
        self._overdue = overdue
        self._end = time.monotonic() + bound_s

    @property
    def left(self) -> float:
        """Seconds until the bound."""
        return max(0.0, self._end - time.monotonic())

    def tick(self) -> float:
        """Seconds to sleep at most.

        Raises:
            TapError: the bound is over, a rank failed or is gone, or this rank closes the channel.
        """
        board = self.board
        if board.closing.is_set():
            raise TapError(f"TapChannel, {board.me}, {self.place}: the channel was closed meanwhile")
        self.raise_failure()
        gone = board.gone()
        if gone is not None:
            self.raise_failure()  # it may have told why before it ended
            raise self.error(f"{gone} is gone")
        if self.left == 0.0:
            raise self.error(f"{self._overdue()} ({board.state(self.peer)})")
        return min(SLICE_S, self.left)

    def raise_failure(self) -> None:
        """Raise the channel's failure, if there is one, with this rank's place added."""
        text = self.board.failure()
        if text is not None:
            raise TapError(seen_by(text, self.board.me, self.place))

    def error(self, what: str) -> TapError:
        """The channel's first error: told to all ranks if none was before."""
        mine = f"TapChannel, {self.board.me}, {self.place}: {what}"
        first = self.board.fail(mine)
        return TapError(mine if first == mine else seen_by(first, self.board.me, self.place))


def seen_by(text: str, me: Member, place: str) -> str:
    """Another rank's failure as this rank tells it."""
    return f"{text} [seen by {me}, {place}]"


def open_of(pid: int, file: int, how: int) -> int:
    """Open file number `file` of process `pid`, which must be of this machine and user; returns its number here."""
    return os.open(f"/proc/{pid}/fd/{file}", how)


def started(pid: int) -> str:
    """When a process of this machine started, in the kernel's ticks; "" if it has ended, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *rest = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]
