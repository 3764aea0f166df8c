"""The link between machines: messages on a process group of the channel's own, with a thread at each end.

A source sends a block only when it has a credit, so no message waits for long in a communicator, and both ends always
have a receive posted: the host for headers, the source for credits.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_spec.parallel.transports.base import Header, Inbox, Outbox, RingShape
from lightning_spec.parallel.transports.board import SLICE_S, Board, Wait
from lightning_spec.parallel.transports.lane import Lane, Listener, first_sentence

_HEADER, _CREDIT = 16, 17  # message tags
_GOODBYE = -1
"""As the stamp of a header or the stage of a credit: this rank leaves in good order."""


class Credits(Listener):
    """The source's thread: counts the credits that the host gives to this rank's stages."""

    def __init__(self, lane: Lane, board: Board, host: int, stages: Mapping[int, RingShape]) -> None:
        super().__init__(lane, board, host)
        self._left = {stage: shape.slots for stage, shape in stages.items()}
        self.sending = threading.Lock()
        """Held while a header and its data are sent, so that those of two stages do not mix."""

    def take_one(self) -> bool:
        stage = torch.zeros(1, dtype=torch.int64)
        self.lane.receive_small(stage, self.peer, _CREDIT)
        if stage.item() == _GOODBYE:
            return False
        with self.news:
            self._left[int(stage.item())] += 1
        return True

    def reached(self) -> str:
        with self.news:
            return f"credits {self._left} (by stage)"

    def wait_for_one(self, stage: int, wait: Wait) -> None:
        """Return when the stage has a credit.

        Raises:
            TapError: as `Outbox.wait_for_slot`.
        """
        while True:
            with self.news:
                if self._left[stage]:
                    return
                if self.ended is None:
                    self.news.wait(SLICE_S)
                ended = self.ended if not self._left[stage] else None
            wait.tick()
            if ended is not None:
                raise wait.error(ended)

    def use(self, stage: int) -> None:
        with self.news:
            self._left[stage] -= 1


class GroupOutbox(Outbox):
    """The source's end. All blocks go through the writer's thread: even a send that need not wait is waited for."""

    def __init__(self, credits: Credits, stage: int) -> None:
        self._credits, self._stage = credits, stage
        self._made: deque[torch.cuda.Event] = deque()

    def try_write(self, header: Header, parts: Sequence[Tensor]) -> bool:
        return False

    def keep(self, parts: Sequence[Tensor]) -> Tensor:
        block = super().keep(parts)
        if block.is_cuda:
            made = torch.cuda.Event()
            made.record()
            self._made.append(made)
        return block

    def wait_for_slot(self, wait: Wait) -> None:
        self._credits.wait_for_one(self._stage, wait)

    def write(self, header: Header, block: Tensor, wait: Wait) -> None:
        after = self._made.popleft() if self._made else None
        lane, host = self._credits.lane, self._credits.peer
        self._credits.use(self._stage)
        try:
            with self._credits.sending:
                raw = _as_tensor(header)
                posted = lane.send_small(raw, host, _HEADER)
                if block.numel():
                    lane.send(block, host, after)
                posted.wait()
        except RuntimeError as error:
            wait.tick()  # another rank's failure comes first
            raise wait.error(
                f"the connection to {wait.board.members[host]} is lost ({first_sentence(error)})"
            ) from error

    def close(self) -> None:
        self._made.clear()  # the lane is its owner's to close


class GroupInbox(Inbox):
    """The host's end of one stage's link, filled by the `Receiver` of the stage's rank.

    A landing slot is memory that is taken when a block comes and handed to whoever reads it, so nothing is copied;
    there are never more of them than credits.
    """

    def __init__(self, shape: RingShape, stage: int) -> None:
        self.shape, self.stage = shape, stage
        self.memory = shape.bytes
        self.blocks: deque[tuple[Header, Tensor]] = deque()
        self.receiver: Receiver
        """Set by the receiver, which is made when both ends are there."""
        self._credits: deque[tuple[dist.Work, Tensor]] = deque(maxlen=2 * shape.slots)

    def arrived(self) -> Header | None:
        with self.receiver.news:
            return self.blocks[0][0] if self.blocks else None

    def wait(self, wait: Wait) -> Header:
        while True:
            with self.receiver.news:
                if self.blocks:
                    return self.blocks[0][0]
                if self.receiver.ended is None:
                    self.receiver.news.wait(SLICE_S)
                ended = self.receiver.ended if not self.blocks else None
            wait.tick()
            if ended is not None:
                raise wait.error(ended)

    def take(self, header: Header) -> Tensor:
        with self.receiver.news:
            _, block = self.blocks.popleft()
        if block.is_cuda:  # made on the lane's stream; its memory must not go back there before we have read it
            block.record_stream(torch.cuda.current_stream(block.device))
        stage = torch.tensor([self.stage])
        with contextlib.suppress(RuntimeError):  # the source has closed; nobody needs the credit
            # Kept until it must have arrived: the source cannot have used more credits than it got.
            self._credits.append((self.receiver.lane.send_small(stage, self.receiver.peer, _CREDIT), stage))
        return block

    def close(self) -> None:
        self.blocks.clear()
        self._credits.clear()


class Receiver(Listener):
    """The host's thread for one source rank: takes that rank's blocks, of all its stages, in the order of sending."""

    def __init__(self, lane: Lane, board: Board, source: int, inboxes: Iterable[GroupInbox]) -> None:
        super().__init__(lane, board, source)
        self._inboxes = {inbox.stage: inbox for inbox in inboxes}
        for inbox in self._inboxes.values():
            inbox.receiver = self
        self._last: Header | None = None

    def take_one(self) -> bool:
        raw = torch.zeros(7, dtype=torch.int64)
        self.lane.receive_small(raw, self.peer, _HEADER)
        header = Header(*raw.tolist())
        if header.stamp == _GOODBYE:
            return False
        inbox = self._inboxes.get(header.stage)
        if inbox is None:
            raise ValueError(f"it sends blocks of stage {header.stage}, which is not on its rank")
        shape = inbox.shape
        if not 0 <= header.rows <= shape.rows or (header.width, header.kind) != (shape.width, str(shape.dtype)):
            raise ValueError(f"stage {header.stage} sends a block that does not fit its slots: {header}")
        if len(inbox.blocks) >= shape.slots:
            raise ValueError(f"all {shape.slots} slots of stage {header.stage} still unconsumed at {header}")
        block = self.lane.receive((header.rows, header.width), shape.dtype, self.peer)
        with self.news:
            inbox.blocks.append((header, block))
        self._last = header
        return True

    def reached(self) -> str:
        last = self._last
        if last is None:
            return f"no block of stages {sorted(self._inboxes)}"
        return f"step {last.step}, stage {last.stage}, micro-batch {last.micro}"


def say_goodbye(listener: Listener) -> None:
    """Tell the other end's thread that this rank leaves in good order."""
    if isinstance(listener, Credits):
        listener.lane.say(_as_tensor(Header(_GOODBYE, 0, 0, 0, 0, 0, 0)), listener.peer, _HEADER)
    else:
        listener.lane.say(torch.tensor([_GOODBYE]), listener.peer, _CREDIT)


def _as_tensor(header: Header) -> Tensor:
    return torch.tensor(
        [header.stamp, header.step, header.stage, header.micro, header.rows, header.width, header.dtype]
    )
