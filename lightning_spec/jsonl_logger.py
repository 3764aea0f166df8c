"""Metrics as JSON lines: one object a step, appended and flushed, so that a killed run loses nothing it logged.

A resumed run continues the same file: records past the restored step are dropped first, since those steps happen again.
"""

from __future__ import annotations

import json
import math
import os
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_spec.records import parse_record


class JSONLLogger(Logger):
    """Writes `metrics.jsonl` into the run's folder.

    Args:
        dir: the run's folder; also where the command saves the run's configuration.
        name: name of the run in its records.
        filename: name of the file.
    """

    def __init__(self, dir: str, name: str = "run", filename: str = "metrics.jsonl") -> None:
        super().__init__()
        self._dir = Path(dir)
        self._name = name
        self.path = self._dir / filename

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self._dir)

    @property
    def log_dir(self) -> str:
        return str(self._dir)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        # The whole configuration is in config.yaml beside the metrics.
        return

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        record: dict[str, Any] = {"step": 0 if step is None else int(step), "wall": round(time.time(), 3)}
        for name, value in sorted(metrics.items()):
            if name in ("epoch", "step"):
                continue
            number = float(value)
            record[name] = number if math.isfinite(number) else repr(number)
        self._dir.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")
            out.flush()
            os.fsync(out.fileno())

    @rank_zero_only
    def complete(self, metrics: Mapping[str, float]) -> bool:
        """Write the record of `metrics` (which name their `step`) unless the file has it; returns whether it did.

        For a run killed after a step's checkpoint was complete and before the step's metrics were written.
        """
        if "step" not in metrics:
            return False
        step, names = int(metrics["step"]), set(metrics) - {"step", "epoch"}
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []
        records = [record for line in lines if (record := parse_record(line)) is not None]
        if any(record["step"] == step and names <= record.keys() for record in records):
            return False
        self.log_metrics(metrics, step)
        return True

    @rank_zero_only
    def truncate_after(self, step: int) -> int:
        """Drop records of steps after `step` (-1 drops all) and a torn last line; returns how many lines went.

        The rest is written beside the file and swapped in, so nothing is lost to a crash here either.
        """
        if not self.path.is_file():
            return 0
        text = self.path.read_text(encoding="utf-8")
        lines = text.splitlines()
        kept = [line for line in lines if (record := parse_record(line)) is not None and record["step"] <= step]
        if len(kept) == len(lines) and text.endswith("\n"):
            return 0
        beside = self.path.with_suffix(".partial")
        beside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(beside, self.path)
        return len(lines) - len(kept)
