"""A folder of safetensors files in Hugging Face's layout: read and written one tensor at a time, faults named."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_spec.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
"""The format's own bound on a header, in bytes."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies and what it is, as its file's header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class TensorFolder:
    """The tensors of one checkpoint folder. Opening it reads headers only and checks that every file is whole.

    Raises CheckpointError, naming files and tensors, when a file is missing, truncated or not safetensors, or when the
    index and the files disagree.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.entries: dict[str, TensorEntry] = {}
        index = self.folder / INDEX
        if index.is_file():
            self._open_index(index)
        elif (self.folder / SINGLE).is_file():
            self.entries.update(read_header(self.folder / SINGLE))
        else:
            raise CheckpointError(f"{self.folder} holds neither {SINGLE} nor {INDEX}")

    def _open_index(self, index: Path) -> None:
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}") from error
        files: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(file, []).append(name)
        for file, names in files.items():
            path = self.folder / file
            if not path.is_file():
                raise CheckpointError(f"{index.name} names {file}, which is not there; it holds {some(names)}")
            found = read_header(path)
            lost = [name for name in names if name not in found]
            if lost:
                raise CheckpointError(f"{index.name} places {some(lost)} in {file}, which does not hold them")
            self.entries.update({name: found[name] for name in names})

    def read(
        self, names: Sequence[str], parts: Mapping[str, tuple[slice, ...]] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors one at a time, in the order given, or the rectangles of them in `parts`. At most one file is
        open."""
        handle, opened = None, None
        for name in names:
            entry = self.entries[name]
            try:
                if entry.file != opened:
                    handle, opened = safe_open(entry.file, framework="pt"), entry.file
                assert handle is not None
                part = (parts or {}).get(name)
                yield name, handle.get_tensor(name) if part is None else handle.get_slice(name)[part]
            except SafetensorError as error:
                raise CheckpointError(f"cannot read {name} from {entry.file}: {error}") from error


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The header of one safetensors file, checked against the file's size so that a cut-off file names its losses."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
        if length > _MAX_HEADER or 8 + length > size:
            raise CheckpointError(f"{path} is not a whole safetensors file: {size} bytes, its header is torn")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items()}
            entries = {
                name: TensorEntry(path, tuple(entry["shape"]), str(entry["dtype"])) for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{path} is not a safetensors file: {error!r}") from error
    torn = [name for name, end in ends.items() if end > size]
    if torn:
        raise CheckpointError(
            f"{path} is truncated: {size} bytes of {max(ends.values())}; the data of {some(torn)} is not all there"
        )
    return entries


def write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    """Write `tensors` into `folder` as they come, one file or several with an index, holding one file's tensors in
    memory at most."""
    files: list[Path] = []
    names: list[list[str]] = []
    held: dict[str, Tensor] = {}
    filled = total = 0

    def flush() -> None:
        nonlocal filled
        # Their number is part of the files' names and is known at the end only.
        files.append(folder / f"{len(files) + 1:05d}.safetensors.part")
        names.append(list(held))
        save_file(held, files[-1], metadata={"format": "pt"})
        held.clear()
        filled = 0

    for name, tensor in tensors:
        if held and filled + tensor.nbytes > max_shard_bytes:
            flush()
        # A copy: what comes may share memory with a buffer that the next tensor overwrites.
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        filled += tensor.nbytes
        total += tensor.nbytes
    flush()
    weight_map: dict[str, str] = {}
    for number, (path, inside) in enumerate(zip(files, names, strict=True), start=1):
        file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / file)
        weight_map.update(dict.fromkeys(inside, file))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


@contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """A new empty folder beside `target` to fill; it takes the target's place when the body ends without an error.

    The old folder, if any, is moved aside first and removed last: a run killed in between leaves a whole folder under
    one of the two names, never a mixture.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.new-", dir=target.parent))
    try:
        yield fresh
        fresh.chmod(0o755)
        for path in [*fresh.iterdir(), fresh]:
            _sync(path)
        aside = None
        if target.exists():
            aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
            target.rename(aside / "it")
        fresh.rename(target)
        _sync(target.parent)
        if aside is not None:
            shutil.rmtree(aside)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def some(names: Iterable[str], limit: int = 6) -> str:
    """Names for an error message: the first few, and how many more."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
