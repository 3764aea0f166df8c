"""Sharded tensors on disk: every rank writes its pieces, and any other cut of the same tensors reads them back.

A `Piece` says which part of a named global tensor a rank holds; a rank may hold several of one tensor. Storage,
de-duplication of replicas and the arithmetic of overlaps are torch's distributed checkpoint; its planners are extended
here only to speak of pieces, so that a rank may hold any rectangles (the q rows of a fused projection, what a range of
a flattened parameter covers) without a device mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_spec.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a global tensor: `tensor` starts at `offset` of a tensor of shape `shape`."""

    tensor: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        return cls(tensor.detach(), (0,) * tensor.ndim, tuple(tensor.shape))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offset), self.tensor.shape)


NamedPieces = Sequence[tuple[str, Piece]]
"""What one rank holds: the tensors' names, with a rectangle each."""


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, pieces: NamedPieces) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        # A rank that holds the same rectangle twice (a tied copy beside its original) writes one of them.
        self._items = {(n, p.offset, p.tensor.shape, p.tensor.dtype): (n, p) for n, p in pieces}
        self._tensors = {(name, piece.offset): piece.tensor for name, piece in pieces}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, piece) for name, piece in self._items.values()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _check_agreement(all_plans)
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.index.offset is not None
        return self._tensors[write_item.index.fqn, tuple(write_item.index.offset)]


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, pieces: NamedPieces) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces: dict[str, list[Piece]] = {}
        for name, piece in pieces:
            self._pieces.setdefault(name, []).append(piece)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, pieces in self._pieces.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, [piece.chunk for piece in pieces])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        # By place in the list, not by offset: two live tensors may want the same rectangle.
        assert read_item.dest_index.index is not None
        tensor = self._pieces[read_item.dest_index.fqn][read_item.dest_index.index].tensor
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(axis, start, length)
        return tensor


def _check_agreement(plans: list[SavePlan]) -> None:
    """What torch lets pass in silence: it keeps one of the pieces that begin at the same place, whatever their sizes,
    takes a tensor's shape and dtype from the piece that it sees first, and on one rank ignores holes, which would be
    read back as whatever was there. Overlaps of other kinds it looks for itself.
    """
    kinds: dict[str, Any] = {}
    held: dict[str, int] = {}
    cuts: dict[tuple[str, Any], torch.Size] = {}
    for item in (item for plan in plans for item in plan.items):
        name, data = item.index.fqn, item.tensor_data
        assert data is not None
        kind = (tuple(data.size), data.properties.dtype)
        if kinds.setdefault(name, kind) != kind:
            raise ValueError(f"{name}: {kinds[name]} on one rank, {kind} on another")
        place, size = (name, data.chunk.offsets), data.chunk.sizes
        if place not in cuts:
            cuts[place], held[name] = size, held.get(name, 0) + size.numel()
        elif cuts[place] != size:
            at = tuple(data.chunk.offsets)
            raise ValueError(f"{name}: pieces of {tuple(cuts[place])} and of {tuple(size)} overlap at {at}")
    for name, (shape, _) in kinds.items():
        if held[name] < prod(shape):
            raise ValueError(f"{name}: the ranks hold {held[name]} of {prod(shape)} elements")


def _write_item(name: str, piece: Piece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, torch.Size(piece.offset)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=piece.chunk,
            properties=TensorProperties.create_from_tensor(piece.tensor),
            size=torch.Size(piece.shape),
        ),
    )


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _union(values: set[str]) -> set[str]:
    if _alone():
        return values
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, values)
    return set().union(*parts)


@contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    # Torch's own is a BaseException: an ordinary `except Exception` would let it through.
    try:
        yield
    except CheckpointException as error:
        ranks = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise CheckpointError(f"{what}: {ranks}") from error


def save_pieces(folder: Path, pieces: NamedPieces) -> None:
    """Write the pieces of all ranks into an empty folder. Collective.

    A rectangle that several ranks hold is taken for a replica: one of them writes it, and the ranks share the bytes
    evenly.

    Raises:
        CheckpointError: pieces overlap without being equal or leave a hole, ranks know a tensor in other shapes or
            dtypes, or a rank failed to write.
    """
    with _as_checkpoint_error(f"cannot save {folder}"):
        dcp.save({}, storage_writer=FileSystemWriter(folder), planner=_SavePlanner(pieces), no_dist=_alone())


def load_pieces(folder: Path, pieces: NamedPieces, *, partial: bool = False) -> None:
    """Fill the given pieces in place, whatever cut they were saved in. Collective.

    Args:
        partial: tensors in the folder that nobody asks for are fine (weights without optimiser state).

    Raises:
        CheckpointError: names or global shapes differ; lists the first few.
    """
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    faults = []
    for name, piece in pieces:
        entry = saved.get(name)
        if entry is None:
            faults.append(f"missing {name}")
        elif isinstance(entry, TensorStorageMetadata) and tuple(entry.size) != piece.shape:
            faults.append(f"{name}: saved {tuple(entry.size)}, needed {piece.shape}")
    # Judged together: a rank that raised alone would leave the others waiting, and a sharded optimiser's rank holds
    # only some of the names.
    asked, faults = _union({name for name, _ in pieces}), sorted(_union(set(faults)))
    if not partial:
        faults += [f"surplus {name}" for name in saved if name not in asked]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(f"the tensors of {folder} are not this run's: {'; '.join(faults[:5])}{more}")
    with _as_checkpoint_error(f"cannot load {folder}"):
        dcp.load({}, storage_reader=FileSystemReader(folder), planner=_LoadPlanner(pieces), no_dist=_alone())
