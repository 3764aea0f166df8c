"""Sets up a channel's links: who is where, which transport each source gets, and the exchange that opens both ends.

All of it is collective over the channel's ranks and runs before any schedule; a rank where a part fails makes all ranks
raise the same error.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from lightning_spec.errors import ConfigError, TapError
from lightning_spec.parallel.groups import Ranks, strategy_key
from lightning_spec.parallel.transports.base import Inbox, Outbox, RingShape
from lightning_spec.parallel.transports.board import Board, Member
from lightning_spec.parallel.transports.cuda_ipc import GpuInbox, GpuOutbox, device_uuids
from lightning_spec.parallel.transports.group import Credits, GroupInbox, GroupOutbox, Receiver, say_goodbye
from lightning_spec.parallel.transports.lane import Lane, Listener
from lightning_spec.parallel.transports.local import LocalLink
from lightning_spec.parallel.transports.shared_memory import SharedInbox, SharedOutbox

T = TypeVar("T")

Transport = Literal["auto", "shared_memory", "cuda_ipc", "group"]


@dataclass(frozen=True, slots=True)
class TapSource:
    """A virtual stage that sends one block for each micro-batch."""

    stage: int
    """Virtual stage."""
    rank: int
    """Pipeline rank on which it runs."""
    width: int
    """Columns of its blocks."""


@dataclass(slots=True)
class Links:
    """A rank's ends of the links, by source stage, and what they share."""

    board: Board
    kinds: dict[int, str]
    host: int
    outboxes: dict[int, Outbox] = field(default_factory=dict)
    inboxes: dict[int, Inbox] = field(default_factory=dict)
    lane: Lane | None = None
    listeners: list[Listener] = field(default_factory=list)

    def seal(self) -> None:
        """Both ends are open: close the host's copies of the sources' ends."""
        for box in self.inboxes.values():
            if isinstance(box, SharedInbox | GpuInbox):
                box.seal()

    def hang_up(self) -> None:
        """This rank leaves: every thread that waits here ends, and the others are told. May be called twice."""
        if self.board.closing.is_set():
            return
        self.board.closing.set()
        self.board.leave()
        for listener in self.listeners:
            if listener.ended is None:
                say_goodbye(listener)
        if self.lane is not None:
            self.lane.close([listener.peer for listener in self.listeners])
        for listener in self.listeners:
            listener.join(5.0)

    def close(self) -> None:
        """Let go of everything, once no thread uses it any more. May be called twice."""
        self.hang_up()
        boxes: list[Outbox | Inbox] = [*self.outboxes.values(), *self.inboxes.values()]
        for box in boxes:
            box.close()
        self.board.close()


def describe(ranks: Ranks, device: torch.device, transport: Transport) -> Member:
    """This rank, as the others need to know it."""
    uuids = device_uuids() if device.type == "cuda" else ()
    number = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return Member(
        rank=ranks.rank,
        global_rank=dist.get_rank() if dist.is_initialized() else ranks.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        # With the transport between machines every other rank counts as another machine's.
        machine=f"rank {ranks.rank}" if transport == "group" else machine(),
        device=uuids[number] if device.type == "cuda" else "cpu",
        visible=uuids,
    )


def machine() -> str:
    """The same for two processes that can open each other's memory: one kernel, one PID namespace, one user.

    And one node, as the launcher counts nodes: several that are emulated on one machine stay apart.
    """
    node = next((os.environ[name] for name in ("SLURM_NODEID", "NODE_RANK", "GROUP_RANK") if name in os.environ), "0")
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()} node {node}"
    except OSError:
        return f"{socket.gethostname()} {uuid.uuid4()}"


def choose(source: TapSource, host: int, members: Sequence[Member], transport: Transport) -> str:
    """The transport of one source: "local", "shared_memory", "cuda_ipc" or "group".

    Raises:
        ConfigError: `transport` names one that these two ranks cannot use.
    """
    if source.rank == host:
        return "local"
    one, other = members[source.rank], members[host]
    together = one.machine == other.machine
    possible = {
        "shared_memory": together and one.device == other.device == "cpu",
        "cuda_ipc": together and "cpu" not in (one.device, other.device) and other.device in one.visible,
        "group": True,
    }
    if transport == "auto":
        return next(kind for kind, can in possible.items() if can)
    if not possible[transport]:
        raise ConfigError(
            f"no {transport} between {one} and {other}",
            found=transport,
            needed="auto or group",
            key=strategy_key("tap_transport"),
        )
    return transport


def together(ranks: Ranks, what: str, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank; returns every rank's result on all.

    Raises:
        TapError: on all ranks, with the first failure's text, where it failed on any.
    """
    mine: tuple[Any, str | None]
    try:
        mine = work(), None
    except Exception as error:
        mine = None, f"{type(error).__name__}: {error}"
    every: list[tuple[Any, str | None]] = ranks.gather(mine)
    for rank, (_, text) in enumerate(every):
        if text is not None:
            raise TapError(f"TapChannel, {what} failed on pipeline rank {rank}: {text}")
    return [result for result, _ in every]


def connect(
    ranks: Ranks,
    members: Sequence[Member],
    sources: Sequence[TapSource],
    host: int,
    shapes: Mapping[int, RingShape],
    *,
    device: torch.device,
    bound_s: float,
    transport: Transport,
) -> Links:
    """Open this rank's ends of all links. Collective; on an error everything that was opened is closed.

    Raises:
        TapError: some rank could not open an end (on all ranks).
        ConfigError: `transport` cannot be used between two of the ranks (on all ranks).
    """
    kinds = {source.stage: choose(source, host, members, transport) for source in sources}
    name = together(ranks, "naming the channel", lambda: f"tap-{uuid.uuid4()}")[0]
    store = None
    if len({member.machine for member in members}) > 1:
        store = dist.PrefixStore(name, ranks.cpu_group.get_group_store())
    links = Links(Board(members[ranks.rank], members, store), kinds, host)
    opener = _Opener(links, ranks.rank, sources, shapes, device, bound_s)
    try:
        if store is not None and "group" in kinds.values():
            # One after the other on a rank, at once on all: connecting needs every member.
            lanes = together(ranks, "connecting the channel's group", lambda: opener.connect_lane(store, ranks.size))
            assert all(lanes)
        offers = together(ranks, "making the landing slots", opener.make)
        together(ranks, "opening the landing slots", lambda: opener.join(offers))
        links.seal()
    except BaseException:
        links.close()
        raise
    return links


class _Opener:
    """The parts of `connect`, each run on every rank at the same time."""

    def __init__(
        self,
        links: Links,
        rank: int,
        sources: Sequence[TapSource],
        shapes: Mapping[int, RingShape],
        device: torch.device,
        bound_s: float,
    ) -> None:
        self.links, self.rank, self.sources, self.shapes = links, rank, sources, shapes
        self.device, self.bound_s = device, bound_s

    def connect_lane(self, store: dist.Store, size: int) -> bool:
        self.links.lane = Lane(store, self.rank, size, self.device, self.bound_s)
        return True

    def make(self) -> tuple[int, dict[int, Any]]:
        """The host makes the landing slots; returns what the other ends need to open them."""
        links, offers = self.links, {}
        for source in self.sources if self.rank == links.host else ():
            stage, shape, kind = source.stage, self.shapes[source.stage], links.kinds[source.stage]
            if kind == "local":
                links.inboxes[stage] = links.outboxes[stage] = LocalLink()
            elif kind == "group":
                links.inboxes[stage] = GroupInbox(shape, stage)
            else:
                box = SharedInbox(shape) if kind == "shared_memory" else GpuInbox(shape, self.device)
                links.inboxes[stage], offers[stage] = box, box.offer
        return links.board.offer, offers

    def join(self, offers: Sequence[tuple[int, dict[int, Any]]]) -> None:
        """Sources open their ends, and both ends of a group's links start to listen."""
        links = self.links
        links.board.join([board for board, _ in offers])
        grouped: dict[int, list[int]] = {}  # stages by the rank of their source
        for source in self.sources:
            kind = links.kinds[source.stage]
            if kind == "group":
                grouped.setdefault(source.rank, []).append(source.stage)
            elif kind != "local" and source.rank == self.rank:
                offer = offers[links.host][1][source.stage]
                shared = kind == "shared_memory"
                links.outboxes[source.stage] = SharedOutbox(offer) if shared else GpuOutbox(offer, self.device)
        for rank, stages in grouped.items():
            self._listen(rank, stages)
        for listener in links.listeners:
            listener.start()

    def _listen(self, source: int, stages: Sequence[int]) -> None:
        links = self.links
        assert links.lane is not None
        if source == self.rank:
            shapes = {stage: self.shapes[stage] for stage in stages}
            credits = Credits(links.lane, links.board, links.host, shapes)
            links.listeners.append(credits)
            links.outboxes.update({stage: GroupOutbox(credits, stage) for stage in stages})
        elif links.host == self.rank:
            boxes = [box for box in links.inboxes.values() if isinstance(box, GroupInbox) and box.stage in stages]
            links.listeners.append(Receiver(links.lane, links.board, source, boxes))
