"""A checkpoint is a directory that is complete or does not count.

    step-00000120/
        tensors/               policy, draft and optimiser, sharded (parallel/sharded.py)
        shared.pt              Lightning's loops, callbacks, schedulers, hyper-parameters: once
        data-rank-00003.pt     random states and data-side state of one data-parallel rank
        complete.json          written last: step, fingerprint, and every file with its size

It is written beside its place under a temporary name and renamed when complete, so a run killed at any moment leaves
either the old checkpoints or the old ones and a new one. A directory without a valid `complete.json` is skipped.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_spec.errors import CheckpointError
from lightning_spec.parallel.groups import DataParallel, speaks_for_data_rank
from lightning_spec.parallel.sharded import NamedPieces, load_pieces, save_pieces

log = logging.getLogger(__name__)

MARKER = "complete.json"
FORMAT = 2
"""1 named the policy's tensors after the layout's parameters; 2 names them as Hugging Face does, in any layout."""
_UNFINISHED = ".unfinished"
_REPLACED = ".replaced"


@dataclass(slots=True)
class Contents:
    """What one rank puts into a checkpoint, or gets out of it.

    `shared` is the same on every rank; `local` belongs to this data-parallel rank and has string keys.
    """

    pieces: NamedPieces
    shared: dict[str, Any]
    local: dict[str, Any]
    fingerprint: dict[str, Any] = field(default_factory=dict)
    step: int = 0


# ---- completeness ----------------------------------------------------------------------------------------------------


def read_marker(folder: str | Path) -> dict[str, Any] | None:
    """The marker of a checkpoint that is complete and of this format; None of torn ones and of any other folder."""
    marker = _any_marker(Path(folder))
    return marker if marker is not None and marker["format"] == FORMAT else None


def _any_marker(folder: Path) -> dict[str, Any] | None:
    """The same, of whatever format."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        files: dict[str, int] = marker["files"]
        good = "format" in marker and all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return marker if good else None


def _other_format(folder: Path) -> str | None:
    """What to say of a complete checkpoint that another version wrote; None of everything else."""
    marker = _any_marker(folder)
    if marker is None or marker["format"] == FORMAT:
        return None
    return (
        f"{folder} is of format {marker['format']}, this version reads format {FORMAT}; use the version that wrote it"
    )


def complete_checkpoints(folder: str | Path) -> list[Path]:
    """All complete checkpoints directly under `folder`, oldest step first. Completeness counts, not the name."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        marker = read_marker(path) if path.is_dir() else None
        if marker is not None:
            # A checkpoint on its way out ranks below a new one of the same step.
            found.append(((int(marker["step"]), not path.name.endswith(_REPLACED), float(marker["time"])), path))
    return [path for _, path in sorted(found)]


def latest_complete(folder: str | Path) -> Path | None:
    """The complete checkpoint with the highest step under `folder`, or None. Torn ones are skipped with a warning.

    Raises:
        CheckpointError: `folder` or all complete ones in it are of another format: a run would start anew without a
            word.
    """
    folder = Path(folder)
    if other := _other_format(folder):
        raise CheckpointError(other)
    complete = complete_checkpoints(folder)
    others = []
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_dir() and path not in complete and (path / "tensors").is_dir():
                others.append(_other_format(path))
                log.warning("skipping %s", others[-1] or f"the torn checkpoint {path}")
    if not complete and (foreign := [text for text in others if text]):
        raise CheckpointError(f"no checkpoint to resume from: {foreign[-1]}")
    return complete[-1] if complete else None


def remove_checkpoint(folder: str | Path) -> None:
    """Delete a checkpoint directory; its marker goes first, so that a half-deleted one never counts."""
    folder = Path(folder)
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


# ---- save and load ---------------------------------------------------------------------------------------------------


def save_checkpoint(folder: str | Path, contents: Contents, data: DataParallel) -> None:
    """Write one checkpoint. Collective over the world; returns on every rank when it is in place."""
    folder = Path(folder)
    beside = folder.with_name(folder.name + _UNFINISHED)
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    dist.barrier()
    save_pieces(beside / "tensors", contents.pieces)
    if first:
        torch.save(contents.shared, beside / "shared.pt")
    if speaks_for_data_rank():
        torch.save(contents.local, beside / f"data-rank-{data.rank:05d}.pt")
    dist.barrier()
    if first:
        _write_marker(beside, contents, data.size)
        _put_in_place(beside, folder)
    dist.barrier()


def _write_marker(folder: Path, contents: Contents, data_ranks: int) -> None:
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    marker = {
        "format": FORMAT,
        "step": contents.step,
        "time": time.time(),
        "data_ranks": data_ranks,
        "fingerprint": contents.fingerprint,
        "files": files,
    }
    with open(folder / MARKER, "w") as handle:
        json.dump(marker, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())


def _put_in_place(beside: Path, folder: Path) -> None:
    replaced = folder.with_name(folder.name + _REPLACED)
    if folder.exists():
        # Two renames: at every moment one complete copy exists under one of the names.
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(folder, replaced)
    os.replace(beside, folder)
    if replaced.exists():
        remove_checkpoint(replaced)
    handle = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_checkpoint(
    folder: str | Path,
    make_pieces: Callable[[dict[str, Any]], NamedPieces],
    fingerprint: dict[str, Any],
    data: DataParallel,
    *,
    partial: bool = False,
    weights_only: bool = False,
) -> Contents:
    """Read a checkpoint: tensors into the given pieces, in place, and the rest returned. Collective.

    When the data-parallel size changed, `local` is empty on every rank: data positions cannot be split anew here. What
    `shared` holds of them is the first rank's.

    Args:
        make_pieces: called with `shared` before the tensors are read; gives the pieces to fill.
        fingerprint: what must equal the checkpoint's.
        partial: more tensors in the checkpoint than asked for are fine.
        weights_only: torch.load's; False unpickles whatever the checkpoint holds, so load only your own.

    Raises:
        CheckpointError: not a complete checkpoint, or one of another policy or draft; names what differs.
    """
    folder = Path(folder)
    marker = read_marker(folder)
    if marker is None:
        if other := _other_format(folder):
            raise CheckpointError(other)
        raise CheckpointError(
            f"{folder} is not a complete checkpoint; resume from `latest_complete` of its parent ({folder.parent})"
        )
    if differences := _differences(marker["fingerprint"], fingerprint):
        raise CheckpointError(f"{folder} belongs to another run: {'; '.join(differences)}")
    shared = torch.load(folder / "shared.pt", map_location="cpu", weights_only=weights_only)
    local: dict[str, Any] = {}
    if marker["data_ranks"] == data.size:
        local = torch.load(folder / f"data-rank-{data.rank:05d}.pt", map_location="cpu", weights_only=weights_only)
    elif dist.get_rank() == 0:
        log.warning(
            "%s was saved by %d data-parallel ranks and is loaded by %d: random states start anew, data positions are "
            "the first rank's",
            folder,
            marker["data_ranks"],
            data.size,
        )
    pieces = make_pieces(shared)
    with torch.no_grad():
        load_pieces(folder / "tensors", pieces, partial=partial)
    return Contents(pieces, shared, local, marker["fingerprint"], int(marker["step"]))


def _differences(saved: Any, needed: Any, path: str = "") -> list[str]:
    """Dotted names of the entries that differ, with both values."""
    # Tuples come back from JSON as lists.
    needed = json.loads(json.dumps(needed)) if not path else needed
    if isinstance(saved, dict) and isinstance(needed, dict):
        out = []
        for key in sorted({*saved, *needed}):
            out += _differences(saved.get(key), needed.get(key), f"{path}.{key}" if path else key)
        return out
    return [] if saved == needed else [f"{path} is {saved!r} in the checkpoint, {needed!r} here"]
