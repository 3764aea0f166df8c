"""Reading metric records (JSON lines). Light on purpose: the report starts without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def parse_record(line: str) -> dict[str, Any] | None:
    """One record, or None for a line that a crash has torn."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file in the order written; torn lines are left out. No file, no records."""
    file = Path(path)
    if not file.is_file():
        return
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if (record := parse_record(line)) is not None:
                yield record


def by_step(path: str | Path) -> dict[int, dict[str, Any]]:
    """All metrics of each step in one mapping, steps ascending. Where a step was logged twice (a validation that a
    resumed run repeats), the later value counts."""
    merged: dict[int, dict[str, Any]] = {}
    for record in read_records(path):
        merged.setdefault(record["step"], {}).update(record)
    return dict(sorted(merged.items()))


def series(steps: dict[int, dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric where it was logged as a finite number."""
    return [(step, float(row[name])) for step, row in steps.items() if isinstance(row.get(name), (int, float))]
