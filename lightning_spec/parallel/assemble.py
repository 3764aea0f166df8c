"""Whole named tensors out of what the ranks of a model hold of them, one bucket at a time.

A refit, an export and an engine's start need each tensor whole on one rank, in the order of a dense checkpoint. All
ranks agree once on a plan (which rank sends which rectangle, in which bucket); every run then only moves data, point to
point: one message from each rank that has something for a bucket. Beside what it yields, a rank holds one bucket.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_spec.parallel.groups import Ranks
from lightning_spec.parallel.placement import Placement
from lightning_spec.parallel.rectangle import Rectangle, cover, strips

BUCKET_BYTES = 256 << 20
_ALIGNMENT = 16
"""Bytes: a message mixes dtypes, and each part has to start where its dtype may."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A whole tensor as all ranks agree on it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def matrix(self) -> tuple[int, int]:
        """[rows, what one row holds]: how rectangles see it."""
        return (self.shape[0] if self.shape else 1), prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class _Pick:
    """A rectangle that one rank has to give: the `strip`-th of its `entry`-th parameter."""

    name: str
    rank: int
    entry: int
    strip: int
    rectangle: Rectangle


@dataclass(slots=True)
class _Message:
    """Rectangles from one rank to another, and the byte where each lies in the buffer."""

    picks: tuple[_Pick, ...]
    starts: tuple[int, ...]
    nbytes: int


@dataclass(slots=True)
class _Bucket:
    """What this rank does for one bucket."""

    names: list[str] = field(default_factory=list)
    sends: dict[int, _Message] = field(default_factory=dict)
    receives: dict[int, _Message] = field(default_factory=dict)
    picks: dict[str, list[_Pick]] = field(default_factory=dict)
    """By tensor, for a target."""


class Assembler:
    """The plan of an assembly, made once; `run` carries it out as often as wanted.

    Args:
        mine: this rank's parameters (or gradients), each with one of the named tensors that it holds rows of.
        ranks: together they hold every tensor; construction and `run` are collective over them.
        targets: ranks (of `ranks`) that get the tensors.
        bucket_bytes: of whole tensors assembled at a time. The members of one module (q, k, v, o; gate, up, down; an
            expert) are never cut apart, so that an engine which fuses them gets them together.

    Raises:
        ValueError: the ranks disagree about a tensor, or hold less than the whole of it; every rank raises.
    """

    def __init__(
        self,
        mine: Iterable[tuple[Placement, Tensor]],
        ranks: Ranks,
        *,
        targets: Sequence[int] = (0,),
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        pairs = list(mine)
        self._ranks, self._targets = ranks, tuple(targets)
        self._placements = [placement for placement, _ in pairs]
        self._dtypes = [tensor.dtype for _, tensor in pairs]
        self._strips = [strips(placement, tensor.shape) for placement, tensor in pairs]
        self._device = _device(ranks, [tensor for _, tensor in pairs])
        held = [
            (placement.name, placement.shape, tensor.dtype, [strip.rectangle for strip in parts])
            for (placement, tensor), parts in zip(pairs, self._strips, strict=True)
        ]
        every = ranks.gather(held)
        self.tensors: dict[str, TensorInfo] = _agreed(every)
        """Every tensor, in the order in which `run` yields them."""
        holders: dict[str, list[_Pick]] = defaultdict(list)
        for rank, entries in enumerate(every):
            for entry, (name, _, _, rectangles) in enumerate(entries):
                for number, rectangle in enumerate(rectangles):
                    holders[name].append(_Pick(name, rank, entry, number, rectangle))
        self._buckets = [self._plan(names, holders) for names in _cut(self.tensors, bucket_bytes)]
        if ranks.size > 1 and self._device.type == "cuda":
            # NCCL wants every rank of a group in its first call; a bucket may have work for some of them only.
            dist.all_reduce(torch.zeros(1, device=self._device), group=ranks.group)

    @property
    def yields(self) -> bool:
        """Whether this rank gets the tensors."""
        return self._ranks.rank in self._targets

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each whole tensor."""
        return {name: info.nbytes for name, info in self.tensors.items()}

    @torch.no_grad()
    def run(self, mine: Iterable[tuple[Placement, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Each whole tensor and its name on a target; nothing on the other ranks, which have to iterate all the same.

        A rank that stops early leaves the others waiting: `drain` what is left, also after a failure. A tensor may
        share memory with the parameter: use or copy it before the next optimiser step.

        Args:
            mine: as at construction, in the same order; the values may have changed.

        Raises:
            ValueError: other parameters than the plan was made for.
        """
        pairs = list(mine)
        if [(p, t.dtype) for p, t in pairs] != list(zip(self._placements, self._dtypes, strict=True)):
            raise ValueError("the plan was made for other parameters; make a new Assembler")
        values = [_matrix(tensor) for _, tensor in pairs]
        for bucket in self._buckets:
            received = self._exchange(bucket, values)
            for name in bucket.names if self.yields else ():
                yield name, self._whole(name, bucket.picks[name], values, received)

    # ---- the plan ---------------------------------------------------------------------------------------------------

    def _plan(self, names: list[str], holders: dict[str, list[_Pick]]) -> _Bucket:
        rank = self._ranks.rank
        bucket = _Bucket(names)
        between: dict[tuple[int, int], list[_Pick]] = defaultdict(list)
        for name in names:
            for target in self._targets:
                own_first = sorted(holders[name], key=lambda pick: pick.rank != target)
                rows, width = self.tensors[name].matrix
                chosen, holes = cover([pick.rectangle for pick in own_first], rows, width)
                if holes:
                    raise ValueError(f"{name} {self.tensors[name].shape}: no rank holds {holes[0]}")
                picks = [own_first[number] for number in chosen]
                for pick in picks:
                    if pick.rank != target:
                        between[pick.rank, target].append(pick)
                if target == rank:
                    bucket.picks[name] = picks
        for (source, target), picks in between.items():
            if source == rank:
                bucket.sends[target] = self._message(picks)
            if target == rank:
                bucket.receives[source] = self._message(picks)
        return bucket

    def _message(self, picks: list[_Pick]) -> _Message:
        starts, size = [], 0
        for pick in picks:
            starts.append(size)
            nbytes = pick.rectangle.elements * self.tensors[pick.name].dtype.itemsize
            size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return _Message(tuple(picks), tuple(starts), size)

    # ---- carrying it out --------------------------------------------------------------------------------------------

    def _exchange(self, bucket: _Bucket, values: list[Tensor]) -> dict[_Pick, Tensor]:
        """Send and receive a bucket's messages; what arrived, by rectangle, as views of the messages."""
        group, ops = self._ranks.group, []
        packed: dict[tuple[_Pick, ...], Tensor] = {}
        for target, message in bucket.sends.items():
            if message.picks not in packed:
                packed[message.picks] = self._pack(message, values)
            ops.append(dist.P2POp(dist.isend, packed[message.picks], group=group, group_peer=target))
        received: dict[_Pick, Tensor] = {}
        for source, message in bucket.receives.items():
            buffer = torch.empty(message.nbytes, dtype=torch.uint8, device=self._device)
            ops.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=source))
            received |= self._views(message, buffer)
        if ops:
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            if self._device.type == "cuda":
                # NCCL's wait does not hold this thread: without a bound a sender would fill its memory with messages.
                torch.cuda.current_stream(self._device).synchronize()
        return received

    def _views(self, message: _Message, buffer: Tensor) -> dict[_Pick, Tensor]:
        views = {}
        for pick, start in zip(message.picks, message.starts, strict=True):
            dtype = self.tensors[pick.name].dtype
            flat = buffer[start : start + pick.rectangle.elements * dtype.itemsize].view(dtype)
            views[pick] = flat.view(pick.rectangle.rows, pick.rectangle.columns)
        return views

    def _pack(self, message: _Message, values: list[Tensor]) -> Tensor:
        buffer = torch.empty(message.nbytes, dtype=torch.uint8, device=self._device)
        for pick, view in self._views(message, buffer).items():
            self._copy(pick, values, view)
        return buffer

    def _copy(self, pick: _Pick, values: list[Tensor], out: Tensor) -> None:
        """A rectangle of this rank's into `out` [rows, columns]."""
        for start, count, to in self._strips[pick.entry][pick.strip].runs:
            out[to : to + count] = values[pick.entry][start : start + count]

    def _whole(self, name: str, picks: list[_Pick], values: list[Tensor], received: dict[_Pick, Tensor]) -> Tensor:
        info = self.tensors[name]
        if len(picks) == 1:
            (pick,) = picks
            strip = self._strips[pick.entry][pick.strip] if pick.rank == self._ranks.rank else None
            if strip is None:
                return received[pick].view(info.shape)
            if len(strip.runs) == 1:
                ((start, count, _),) = strip.runs
                return values[pick.entry][start : start + count].reshape(info.shape)
        out = torch.empty(info.matrix, dtype=info.dtype, device=self._device)
        for pick in picks:
            part = pick.rectangle.of(out)
            if pick.rank == self._ranks.rank:
                self._copy(pick, values, part)
            else:
                part.copy_(received[pick])
        return out.view(info.shape)


def assembled(
    mine: Iterable[tuple[Placement, Tensor]],
    ranks: Ranks,
    *,
    targets: Sequence[int] = (0,),
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """One run of an `Assembler`, whose arguments these are. Where it is done again and again, keep the Assembler."""
    pairs = list(mine)
    return Assembler(pairs, ranks, targets=targets, bucket_bytes=bucket_bytes).run(pairs)


def drain(tensors: Iterable[tuple[str, Tensor]] | None) -> None:
    """Take what is left of a stream and drop it, so that the ranks which send it are not left waiting. A stream that
    has ended, also by its own error, is left as it is."""
    for _ in tensors if tensors is not None else ():
        continue


def _device(ranks: Ranks, tensors: list[Tensor]) -> torch.device:
    """Where messages and results lie: a rank that holds nothing has only the group to go by."""
    if tensors:
        return tensors[0].device
    nccl = ranks.size > 1 and dist.get_backend(ranks.group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _matrix(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.reshape(tensor.shape[0] if tensor.dim() else 1, prod(tensor.shape[1:]))


def _agreed(every: list[list[tuple[str, tuple[int, ...], torch.dtype, Any]]]) -> dict[str, TensorInfo]:
    """Every rank's tensors, in checkpoint order.

    Raises:
        ValueError: two ranks give one name another shape or dtype.
    """
    found: dict[str, TensorInfo] = {}
    for rank, entries in enumerate(every):
        for name, shape, dtype, _ in entries:
            info = TensorInfo(tuple(shape), dtype)
            if found.setdefault(name, info) != info:
                raise ValueError(f"{name}: rank {rank} holds a part of {info}, another rank of {found[name]}")
    return {name: found[name] for name in checkpoint_order(found)}


def checkpoint_order(names: Iterable[str]) -> list[str]:
    """The names as a dense checkpoint lists them, from the order in which the ranks list theirs.

    Names are a tree. Numbered children (layers, experts) come by number, whoever holds them, and all others as they
    were first seen: with ranks in pipeline order the embedding comes first, and the final norm and the head last.
    """
    names = list(names)
    seen: dict[str, int] = {}
    keys: dict[str, list[tuple[int, int]]] = {}
    for name in names:
        parts = name.split(".")
        keys[name] = [
            (1, int(part)) if part.isdigit() else (0, seen.setdefault(".".join(parts[: depth + 1]), len(seen)))
            for depth, part in enumerate(parts)
        ]
    return sorted(names, key=lambda name: keys[name])


def _cut(tensors: dict[str, TensorInfo], limit: int) -> list[list[str]]:
    """Neighbours in buckets of about `limit` bytes; a module's tensors stay together."""
    buckets: list[list[str]] = []
    module, used = None, limit
    for name, info in tensors.items():
        owner = name.rsplit(".", 2)[0]
        if used >= limit and owner != module:
            buckets.append([])
            used = 0
        buckets[-1].append(name)
        module, used = owner, used + info.nbytes
    return buckets
