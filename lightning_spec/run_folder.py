"""What a run finds in its folder, and leaves there: the checkpoint to go on from, its configuration."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_spec.compose import nearest
from lightning_spec.errors import ConfigError
from lightning_spec.parallel.checkpoint import latest_complete, read_marker


class KeepConfig(SaveConfigCallback):
    """Saves a training run's resolved configuration as config.yaml; keeps the one that was there under a number."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self.overwrite = True
        folder = trainer.log_dir
        if not self.already_saved and trainer.is_global_zero and folder is not None:
            keep_numbered(Path(folder) / self.config_filename)
        super().setup(trainer, pl_module, stage)


def keep_numbered(file: Path) -> None:
    """Rename an existing file to name.1.suffix, name.2.suffix, ...: the first number that is free."""
    if not file.exists():
        return
    number = 1
    while (old := file.with_name(f"{file.stem}.{number}{file.suffix}")).exists():
        number += 1
    file.rename(old)


def resume_path(resume: str, folder: str | Path, asked: str | None) -> str | None:
    """The checkpoint to start from, said in one line.

    Args:
        resume: `auto`, `never` or a path (`run.resume`).
        folder: where `auto` looks.
        asked: `--ckpt_path`; it wins.

    Raises:
        ConfigError: a path that holds no complete checkpoint.
    """
    if asked is None and resume == "never":
        return None
    if asked is None and resume == "auto":
        found = latest_complete(folder)
        _say(f"continuing from {found}" if found else f"no checkpoint in {folder}: starting afresh")
        return str(found) if found is not None else None
    path = Path(asked or resume)
    inside = path if read_marker(path) is not None else latest_complete(path)
    if inside is None:
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(
            "no complete checkpoint there",
            found=str(path),
            needed=nearest(path.name, siblings, "a checkpoint folder"),
            key="ckpt_path" if asked else "run.resume",
        )
    return str(inside)


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)
