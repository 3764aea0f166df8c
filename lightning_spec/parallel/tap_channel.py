"""TapChannel: brings the policy's taps to the rank that hosts the draft, beside Megatron's pipeline schedule.

Taps are detached, so nothing comes back for them; they are made inside forwards that the schedule drives with its own
communication. So each source stage writes its block, one-sided, into a ring of landing slots on the host, over a
channel of its own, and never waits inside a forward: without a free slot the block is copied and a thread waits. The
host reads block by block. Every wait has a bound, and the first failure of any rank ends the waits of all with the same
text.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from lightning_spec.errors import ConfigError, TapError
from lightning_spec.parallel.groups import Ranks, strategy_key
from lightning_spec.parallel.transports.base import DTYPES, Header, RingShape
from lightning_spec.parallel.transports.board import Wait
from lightning_spec.parallel.transports.connect import TapSource, Transport, connect, describe, together
from lightning_spec.parallel.transports.sender import Sender

__all__ = ["TapChannel", "TapSource", "TapStats"]

_WARM = -1
"""Step and micro-batch of the block that warms a link up."""


@dataclass(frozen=True, slots=True)
class TapStats:
    """One step of one rank."""

    blocks_sent: int = 0
    bytes_sent: int = 0
    blocks_received: int = 0
    bytes_received: int = 0
    blocks_deferred: int = 0
    """Puts that found no free slot and went through a thread (always, across machines and between GPUs)."""
    seconds_waiting_credit: float = 0.0
    """Of those threads; forwards do not wait."""
    seconds_waiting_data: float = 0.0
    """Of the host, in `get`."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """What has to be the same on all ranks."""

    sources: tuple[TapSource, ...]
    host: int
    rows: int
    dtype: torch.dtype
    depth: tuple[tuple[int, int], ...]
    bound_s: float
    transport: Transport

    def check(self, size: int) -> None:
        """
        Raises:
            ConfigError: a size or a rank that cannot be.
        """
        stages = [source.stage for source in self.sources]
        depth = dict(self.depth)
        bad: list[tuple[str, object, str, str]] = []
        if len(set(stages)) != len(stages):
            bad.append(("two tap sources on one virtual stage", stages, "one source a stage", "pipeline_layout"))
        ranks = [source.rank for source in self.sources]
        if any(not 0 <= rank < size for rank in (*ranks, self.host)):
            bad.append(("taps of a rank outside the pipeline", [*ranks, self.host], f"0 to {size - 1}", "draft_stage"))
        if self.rows < 1 or any(source.width < 1 for source in self.sources):
            bad.append(("landing slots without room", self.rows, "at least one row and one column", "tap_rows"))
        if any(depth.get(source.stage, 0) < 1 for source in self.sources if source.rank != self.host):
            bad.append(("a tap source without landing slots", depth, "one or more for each source", "pipeline_layout"))
        if self.dtype not in DTYPES:
            bad.append(("taps cannot travel in this dtype", self.dtype, f"one of {DTYPES}", "precision"))
        for what, found, needed, key in bad:
            raise ConfigError(what, found=found, needed=needed, key=strategy_key(key))


class TapChannel:
    """The channel of one pipeline group. Making it is collective; nothing after that is.

    For each source, the n-th `put` is the n-th `get`, also across steps: a source may be steps ahead of the host.

        with channel.step(number):            # on every rank, around a schedule
            ...  channel.put(stage, micro, taps)                  # in the source's forward
            ...  taps = channel.get(stage, micro, rows)           # on the host

    Args:
        sources: all virtual stages that send, the same on every rank.
        host: pipeline rank that reads.
        ranks: the pipeline group.
        rows: rows of the largest block (of all micro-batches there will be).
        dtype: of the blocks.
        depth: landing slots by source stage (see `tap_depth.slots`); not needed for sources on the host's rank.
        bound_s: longest wait for a slot or a block.
        device: where blocks are made and wanted.
        transport: "auto" chooses for each source by where it and the host run.

    Raises:
        ConfigError: the ranks disagree, or sizes that cannot be; on all ranks.
        TapError: a link could not be opened; on all ranks.
    """

    def __init__(
        self,
        sources: Sequence[TapSource],
        host: int,
        ranks: Ranks,
        *,
        rows: int,
        dtype: torch.dtype,
        depth: Mapping[int, int],
        bound_s: float,
        device: torch.device | str = "cpu",
        transport: Transport = "auto",
    ) -> None:
        device = torch.device(device)
        mine = _Settings(tuple(sources), host, rows, dtype, tuple(sorted(depth.items())), bound_s, transport)
        settings, members = zip(*ranks.gather((mine, describe(ranks, device, transport))), strict=True)
        for rank, theirs in enumerate(settings):
            if theirs != settings[0]:
                raise ConfigError(
                    "the pipeline's ranks set up different tap channels",
                    found=f"pipeline rank {rank}: {theirs}",
                    needed=f"as pipeline rank 0: {settings[0]}",
                    key="draft",
                )
        mine.check(ranks.size)
        self.me = members[ranks.rank]
        self.rows, self.dtype, self.bound_s, self.host = rows, dtype, bound_s, host
        self._sources = {source.stage: source for source in sources}
        slots = {source.stage: depth.get(source.stage, 1) for source in sources}
        shapes = {s.stage: RingShape(slots[s.stage], rows, s.width, dtype) for s in sources}
        self._links = connect(
            ranks, members, sources, host, shapes, device=device, bound_s=bound_s, transport=transport
        )
        self._board = self._links.board
        self._senders = {
            stage: Sender(box, self._board, host, slots[stage], bound_s) for stage, box in self._links.outboxes.items()
        }
        self._private: dict[int, deque[tuple[Header, Tensor]]] = {stage: deque() for stage in self._links.inboxes}
        self._stamps = dict.fromkeys([*self._links.outboxes, *self._links.inboxes], 0)
        self._expected = dict.fromkeys(self._links.inboxes, 0)
        self._put: dict[int, set[int]] = {}
        self._read: dict[int, int] = {}
        self._step = _WARM
        self._bytes_received, self._seconds_waiting = 0, 0.0
        self._closed = False
        self.last_stats = TapStats()
        """Of the last finished step."""
        self._warm_up(ranks, device)

    @property
    def memory(self) -> int:
        """Bytes of landing slots that this rank owns."""
        return sum(box.memory for box in self._links.inboxes.values())

    @property
    def transports(self) -> dict[int, str]:
        """By source stage."""
        return dict(self._links.kinds)

    def begin(self, step: int) -> None:
        """A schedule that uses taps starts; on every rank. Step numbers grow.

        Raises:
            TapError: the channel has failed.
        """
        self._wait(f"begin of step {step}").raise_failure()
        if step <= self._step:
            raise ValueError(f"step {step} after step {self._step}: the numbers must grow")
        self._step = step
        self._put = {stage: set() for stage in self._links.outboxes}
        self._read = dict.fromkeys(self._links.inboxes, 0)
        self._bytes_received, self._seconds_waiting = 0, 0.0

    def put(self, stage: int, micro: int, block: Tensor | Sequence[Tensor]) -> None:
        """Send a block to the host; on the source's rank. Never waits, and does not look at `block` afterwards.

        Args:
            block: [rows, width], or parts [rows, *] that lie side by side in it.

        Raises:
            TapError: the block does not fit, this micro-batch's was put before, or the channel has failed.
        """
        place = self._wait(f"step {self._step}, put of stage {stage}, micro-batch {micro}")
        place.raise_failure()
        sender = self._senders.get(stage)
        if sender is None:
            raise ValueError(f"{self.me} sends nothing for stage {stage}, only for {sorted(self._senders)}")
        if sender.error is not None:
            raise sender.error
        parts = [block] if isinstance(block, Tensor) else list(block)
        fault = self._misfit(stage, micro, parts)
        if fault:
            raise place.error(fault)
        self._put[stage].add(micro)
        self._send(stage, micro, parts)

    def get(self, stage: int, micro: int, rows: int) -> Tensor:
        """The next block of a source, [rows, width], on the host, which must be this step's `micro`. Waits for it.

        Raises:
            TapError: it did not come within the bound, it is not the one expected, or the channel has failed.
        """
        place = f"step {self._step}, get of stage {stage}, micro-batch {micro}"
        self._check_receives(stage)
        source = self._sources[stage]

        def overdue() -> str:
            return f"stage {stage} sent nothing for micro-batch {micro} within {self.bound_s:g} s"

        wait = Wait(self._board, self.bound_s, source.rank, place, overdue)
        wait.raise_failure()
        if self._private[stage]:
            header, block = self._private[stage][0]
            self._verify(wait, header, stage, micro, rows)
            self._private[stage].popleft()
        else:
            start = perf_counter()
            header = self._links.inboxes[stage].wait(wait)
            self._seconds_waiting += perf_counter() - start
            self._verify(wait, header, stage, micro, rows)
            block = self._take(stage, header)
        self._read[stage] = self._read.get(stage, 0) + 1
        self._bytes_received += block.nbytes
        return block

    def arrived(self, stage: int, micro: int) -> bool:
        """Whether `get(stage, micro)` would not have to wait; on the host."""
        self._check_receives(stage)
        header = self._private[stage][0][0] if self._private[stage] else self._links.inboxes[stage].arrived()
        return header is not None and (header.step, header.micro) == (self._step, micro)

    def drain(self) -> int:
        """Move what has arrived into private memory, which frees its slots; on the host. Never waits.

        Returns:
            blocks moved; `get` finds them in the same order.
        """
        moved = 0
        for stage, box in self._links.inboxes.items():
            while self._links.kinds[stage] != "local" and (header := box.arrived()) is not None:
                self._verify_ring(self._wait(f"step {self._step}, drain of stage {stage}"), header, stage)
                self._private[stage].append((header, self._take(stage, header)))
                moved += 1
        return moved

    def finish(self) -> TapStats:
        """The schedule has ended; on every rank. Waits until this rank's blocks lie in their slots.

        Raises:
            TapError: a block could not be delivered within the bound, the host has left one unread, or the channel has
                failed.
        """
        wait = self._wait(f"finish of step {self._step}")
        wait.raise_failure()
        for stage, sender in self._senders.items():
            sender.flush(self._wait(f"finish of step {self._step}, blocks of stage {stage}", bound_s=float("inf")))
        self._check_all_read(wait)
        sent = [sender.take_counts() for sender in self._senders.values()]
        self.last_stats = TapStats(
            blocks_sent=sum(one.blocks for one in sent),
            bytes_sent=sum(one.bytes for one in sent),
            blocks_received=sum(self._read.values()),
            bytes_received=self._bytes_received,
            blocks_deferred=sum(one.deferred for one in sent),
            seconds_waiting_credit=sum(one.seconds_waiting for one in sent),
            seconds_waiting_data=self._seconds_waiting,
        )
        return self.last_stats

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """`begin` ... `finish`; an error in between is told to all ranks. The step's figures are in `last_stats`."""
        self.begin(step)
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
        self.finish()

    def fail(self, reason: BaseException | str) -> None:
        """Tell all ranks that this one failed: their waits end with this reason, unless another came first."""
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        self._wait(f"step {self._step}").error(text)

    def check(self) -> None:
        """
        Raises:
            TapError: the channel has failed, or a rank of this machine is gone.
        """
        self._wait(f"step {self._step}").tick()

    def close(self) -> None:
        """Stop the threads and let the memory go; not a collective, may be called twice. Blocks on the way are lost."""
        if self._closed:
            return
        self._closed = True
        for sender in self._senders.values():
            sender.stop()
        self._links.hang_up()
        for sender in self._senders.values():
            sender.join(5.0)
        self._links.close()
        self._private.clear()

    def _check_receives(self, stage: int) -> None:
        if stage not in self._private:
            raise ValueError(f"{self.me} receives nothing from stage {stage}, only from {sorted(self._private)}")

    def _send(self, stage: int, micro: int, parts: Sequence[Tensor]) -> None:
        self._stamps[stage] += 1
        source = self._sources[stage]
        header = Header(
            self._stamps[stage], self._step, stage, micro, parts[0].shape[0], source.width, DTYPES.index(self.dtype)
        )
        self._senders[stage].put(header, parts)

    def _take(self, stage: int, header: Header) -> Tensor:
        self._expected[stage] += 1
        return self._links.inboxes[stage].take(header)

    def _misfit(self, stage: int, micro: int, parts: Sequence[Tensor]) -> str | None:
        """What is wrong with a block that shall be put."""
        rows, width = parts[0].shape[0], sum(part.shape[1] for part in parts)
        if stage not in self._put or micro in self._put[stage]:
            return "this block was already put" if stage in self._put else "put before begin"
        if rows > self.rows:
            return f"a slot holds {self.rows} rows, micro-batch {micro} has {rows}: raise {strategy_key('tap_rows')}"
        if width != self._sources[stage].width or any(part.shape[0] != rows for part in parts):
            shapes = [tuple(part.shape) for part in parts]
            return f"a block of parts {shapes} where [{rows}, {self._sources[stage].width}] is due"
        if any(part.dtype != self.dtype for part in parts):
            return f"a block of {[part.dtype for part in parts]} in a channel of {self.dtype}"
        return None

    def _verify_ring(self, wait: Wait, header: Header, stage: int) -> None:
        """A block that has arrived is the next one of its source and fits its slot."""
        source, next_stamp = self._sources[stage], self._expected[stage] + 1
        found = (header.stamp, header.stage, header.width, header.kind)
        needed = (next_stamp, stage, source.width, str(self.dtype))
        if found != needed or not 0 <= header.rows <= self.rows:
            names = "stamp, stage, width, dtype, rows"
            raise wait.error(
                f"header of stage {stage} does not match: ({names}) found {(*found, header.rows)}, "
                f"needed {needed} and at most {self.rows} rows"
            )

    def _verify(self, wait: Wait, header: Header, stage: int, micro: int, rows: int) -> None:
        if not self._private[stage]:
            self._verify_ring(wait, header, stage)
        found, needed = (header.step, header.micro, header.rows), (self._step, micro, rows)
        if found != needed:
            raise wait.error(
                f"header of stage {stage} does not match: (step, micro-batch, rows) found {found}, needed {needed}"
            )

    def _check_all_read(self, wait: Wait) -> None:
        for stage, box in self._links.inboxes.items():
            header = self._private[stage][0][0] if self._private[stage] else box.arrived()
            if header is not None and header.step <= self._step:
                raise wait.error(f"micro-batch {header.micro} of stage {stage}, step {header.step}, was never read")
        if len(set(self._read.values())) > 1:
            raise wait.error(f"the host read different numbers of blocks: {self._read} (by source stage)")

    def _wait(self, place: str, bound_s: float | None = None) -> Wait:
        bound = self.bound_s if bound_s is None else bound_s
        return Wait(self._board, bound, self.host, place, lambda: "nothing happened within the bound")

    def _warm_up(self, ranks: Ranks, device: torch.device) -> None:
        """One block over every link: no forward pays for a first use, and a link that garbles is noticed now."""

        def send() -> None:
            for stage in self._senders:
                self._send(stage, _WARM, [self._pattern(stage, device)])

        def receive() -> None:
            for stage in self._links.inboxes:
                if not torch.equal(self.get(stage, _WARM, 1), self._pattern(stage, device)):
                    raise TapError(f"the block that warms stage {stage}'s link up arrived with other values")
            self.finish()

        try:
            together(ranks, "sending the first blocks", send)
            together(ranks, "receiving the first blocks", receive)
        except BaseException:
            self.close()
            raise

    def _pattern(self, stage: int, device: torch.device) -> Tensor:
        return (torch.arange(self._sources[stage].width, device=device) % 251 + stage).to(self.dtype)[None]
