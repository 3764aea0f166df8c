"""Sharded tensors on disk: every rank writes its pieces, and any other cut of the same tensors reads them back.

A `Piece` says which part of a named global tensor a rank holds. Storage, de-duplication of replicas and the arithmetic
of overlaps are torch's distributed checkpoint; its planners are extended here only to speak of pieces, so that a rank
may hold any rectangular part (a range of a flattened parameter, a tensor-parallel slice) without a device mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, pieces: dict[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, piece) for name, piece in self._pieces.items()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        # Torch looks for overlaps; a hole (a range that no rank holds) would be read back as whatever was there.
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            held = sum(chunk.sizes.numel() for chunk in entry.chunks)
            if held != entry.size.numel():
                raise ValueError(f"{name}: the ranks hold {held} of {entry.size.numel()} elements")
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._pieces[write_item.index.fqn].tensor


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, pieces: dict[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, piece in self._pieces.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, [piece.chunk])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self._pieces[read_item.dest_index.fqn].tensor
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(axis, start, length)
        return tensor


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


def save_pieces(folder: Path, pieces: dict[str, Piece]) -> None:
    """Write the pieces of all ranks into an empty folder. Collective.

    Raises:
        CheckpointError: the ranks' pieces overlap or leave a hole, or a rank failed to write.
    """
    with _as_checkpoint_error(f"cannot save {folder}"):
        dcp.save({}, storage_writer=FileSystemWriter(folder), planner=_SavePlanner(pieces), no_dist=_alone())


def load_pieces(folder: Path, pieces: dict[str, Piece], *, partial: bool = False) -> None:
    """Fill the given pieces in place, whatever cut they were saved in. Collective.

    Args:
        partial: tensors in the folder that nobody asks for are fine (weights without optimiser state).

    Raises:
        CheckpointError: names or global shapes differ; lists the first few.
    """
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    faults = [f"missing {name}" for name in pieces if name not in saved]
    for name, piece in pieces.items():
        entry = saved.get(name)
        if isinstance(entry, TensorStorageMetadata) and tuple(entry.size) != piece.shape:
            faults.append(f"{name}: saved {tuple(entry.size)}, needed {piece.shape}")
    # Judged together: a rank that raised alone would leave the others waiting, and a sharded optimiser's rank holds
    # only some of the names.
    asked, faults = _union(set(pieces)), sorted(_union(set(faults)))
    if not partial:
        faults += [f"surplus {name}" for name in saved if name not in asked]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(f"the tensors of {folder} are not this run's: {'; '.join(faults[:5])}{more}")
    with _as_checkpoint_error(f"cannot load {folder}"):
        dcp.load({}, storage_reader=FileSystemReader(folder), planner=_LoadPlanner(pieces), no_dist=_alone())
