"""Writes policy and draft in the formats that other programs load, at the end of a run and on request."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from callbacks.speaker import writes_with_first


class ExportCallback(pl.Callback):
    """Exports the policy as a Hugging Face folder and the draft as a folder that vLLM loads, when training ends.

    Args:
        folder: gets `policy/` and `draft/`; null exports nothing.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = Path(folder) if folder is not None else None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.folder is not None:
            export(trainer, pl_module, self.folder)


def export(trainer: pl.Trainer, module: Any, folder: str | Path) -> Path:
    """Write `folder/policy` and, where there is a draft, `folder/draft`; each appears whole or not at all.

    Every rank calls it; rank 0 writes. Where the model is split, the ranks that hold it with rank 0 send their parts, a
    bucket of tensors at a time.
    """
    folder = Path(folder)
    if writes_with_first(trainer):
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "policy", module.export_policy, trainer.is_global_zero)
        if module.draft is not None:
            _replace(folder / "draft", module.export_draft, trainer.is_global_zero)
    trainer.strategy.barrier("export")
    return folder


def _replace(target: Path, write: Callable[[Path], Any], first: bool) -> None:
    """Write beside the target, then swap: on the first rank. The others' part of `write` is to send."""
    beside = target.with_name(f".{target.name}.partial")
    if not first:
        write(beside)
        return
    shutil.rmtree(beside, ignore_errors=True)
    write(beside)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    beside.rename(target)
    shutil.rmtree(old, ignore_errors=True)
