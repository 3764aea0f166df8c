"""Weights from the trainer to an engine on the same machine: buckets in shared memory, written once, read in place.

A bucket is one file on a memory file system. The trainer copies (and casts) each tensor straight into it; the engine
maps it and loads from the mapping. Buckets are cut between layers, so that tensors which an engine fuses (q, k, v;
gate, up) arrive together, and no bucket is ever written twice, so that a loader may hold on to what it has mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_spec.errors import EngineError
from lightning_spec.rollout.engine import NamedTensors, TensorSpec

BACKEND = "lightning_spec_shm"
"""Name under which vLLM knows our transfer."""
PREFIX = "lightning-spec-weights-"
SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 64
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        size = DTYPES[self.dtype].itemsize
        for extent in self.shape:
            size *= extent
        return size


class Bucket:
    """A file of tensors that another process can map. `close` removes the file; mappings of it stay valid."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.path = folder / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # The lock says that the writer lives: `sweep` leaves locked files alone.
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            # Sparse: pages are taken when a tensor is added.
            self.capacity = max(capacity, ALIGNMENT)
            os.ftruncate(self._fd, self.capacity)
            self._arena = torch.from_file(str(self.path), shared=True, size=self.capacity, dtype=torch.uint8)
        except BaseException:
            self.close()
            raise
        self.slots: list[Slot] = []
        self.used = 0

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy a tensor in, as `dtype`; returns the copy, which lies in the bucket."""
        slot = Slot(name, NAMES[dtype], tuple(tensor.shape), self.used)
        if slot.nbytes:
            try:
                # Without this a full memory file system is a SIGBUS, not an error.
                os.posix_fallocate(self._fd, slot.offset, slot.nbytes)
            except OSError as error:
                raise EngineError(f"no room for {slot.nbytes} bytes in {self.path.parent}: {error}") from error
        view = self._arena[slot.offset : slot.offset + slot.nbytes].view(dtype).view(slot.shape)
        view.copy_(tensor.detach())
        self.slots.append(slot)
        self.used = -(-(slot.offset + slot.nbytes) // ALIGNMENT) * ALIGNMENT
        return view

    def manifest(self) -> dict[str, Any]:
        """What a reader needs, in plain values."""
        slots = [(slot.name, slot.dtype, list(slot.shape), slot.offset) for slot in self.slots]
        return {"path": str(self.path), "capacity": self.capacity, "slots": slots}

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_bucket(manifest: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Map a bucket; the tensors are views of the mapping and keep it alive."""
    arena = torch.from_file(manifest["path"], shared=True, size=manifest["capacity"], dtype=torch.uint8)
    tensors = []
    for fields in manifest["slots"]:
        slot = Slot(fields[0], fields[1], tuple(fields[2]), fields[3])
        flat = arena[slot.offset : slot.offset + slot.nbytes]
        tensors.append((slot.name, flat.view(DTYPES[slot.dtype]).view(slot.shape)))
    return tensors


def bucket_folder(needed: int) -> Path:
    """A memory file system with room for `needed` bytes, else the temporary folder."""
    with contextlib.suppress(OSError):
        if os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > needed:
            return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def sweep(folders: Iterable[Path] = (SHARED_MEMORY,), older_than_s: float = 10.0) -> int:
    """Remove buckets whose writer has died. Returns how many."""
    removed = 0
    for folder in folders:
        for path in folder.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime < older_than_s:
                    continue  # may be about to take its lock
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    removed += 1
                finally:
                    os.close(fd)
    return removed


def layer_of(name: str) -> str:
    """The unit that stays in one bucket: everything up to the first layer number, or the tensor itself."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return name


def stream(
    tensors: NamedTensors,
    wanted: Mapping[str, TensorSpec],
    dtypes: Mapping[str, torch.dtype],
    limit: int | None,
    sums: dict[str, int] | None = None,
) -> Generator[Bucket, None, None]:
    """Cut a stream of tensors into buckets of about `limit` bytes (None: one bucket), never inside a layer.

    Args:
        tensors: already checked against `wanted`; may raise at its end when tensors are missing. In that case nothing
            of the last bucket is yielded.
        dtypes: what each tensor is stored as.
        sums: filled with the checksum of each tensor as the trainer holds it, cast to its stored dtype.
    """
    remaining: dict[str, int] = {}
    for name in wanted:
        remaining[layer_of(name)] = remaining.get(layer_of(name), 0) + 1
    total = 0
    for name, spec in wanted.items():
        total += Slot(name, NAMES[dtypes[name]], spec.shape, 0).nbytes + ALIGNMENT
    folder = bucket_folder(total if limit is None else min(total, 2 * limit))
    bucket: Bucket | None = None
    open_layers: set[str] = set()
    try:
        for name, tensor in tensors:
            bucket = bucket or Bucket(folder, total)
            if sums is not None:
                sums[name] = checksum(tensor.detach().to(dtypes[name]))
            bucket.add(name, tensor, dtypes[name])
            layer = layer_of(name)
            remaining[layer] -= 1
            (open_layers.add if remaining[layer] else open_layers.discard)(layer)
            if limit is not None and bucket.used >= limit and not open_layers:
                yield bucket
                bucket.close()
                bucket = None
        if bucket is not None:
            yield bucket
    finally:
        if bucket is not None:
            bucket.close()


_MIX = (-7046029254386353131, -4658895280553007687)  # odd 64-bit constants (splitmix64)


def checksum(tensor: Tensor, shape: tuple[int, ...] | None = None, start: tuple[int, int] = (0, 0)) -> int:
    """An order-sensitive checksum that shards add up to: the sum over elements of mix(bits, place), modulo 2^64.

    Args:
        tensor: at most two-dimensional; anything larger is flattened behind its first dimension.
        shape: shape of the whole tensor when `tensor` is a shard of it.
        start: row and column of the shard's first element in the whole.

    Zeros of both signs and subnormal numbers count as 0: a matrix product with the identity, which is how packed
    weights are read back, does not keep them.
    """
    if not tensor.numel():
        return 0  # a worker's part of a head that another one counts
    shape = tuple(tensor.shape) if shape is None else shape
    width = 1
    for extent in shape[1:]:
        width *= extent
    rows = tensor.detach().reshape(tensor.shape[0], -1) if tensor.dim() else tensor.detach().reshape(1, 1)
    columns = torch.arange(rows.shape[1], device=rows.device, dtype=torch.int64) + start[1]
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    step = max(1, (1 << 22) // max(1, rows.shape[1]))
    for first in range(0, rows.shape[0], step):
        part = rows[first : first + step]
        if part.is_floating_point():
            part = torch.where(part.abs() < torch.finfo(part.dtype).tiny, torch.zeros_like(part), part)
        bits = part.contiguous().view(_INTEGERS[part.element_size()]).to(torch.int64)
        place = torch.arange(first, first + part.shape[0], device=rows.device, dtype=torch.int64) + start[0]
        mixed = (bits ^ (place[:, None] * width + columns) * _MIX[0]) * _MIX[1]
        total += ((mixed ^ (mixed >> 29)) * _MIX[0]).sum()
    return int(total) & 0xFFFFFFFFFFFFFFFF


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
