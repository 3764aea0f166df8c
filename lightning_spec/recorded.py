"""Rollouts on disk: one JSON object a line, exact both ways. For offline distillation and for replay tests."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_spec.batch import Completion, Prompt, Rollout, SpecStats
from lightning_spec.errors import ConfigError
from lightning_spec.sources import read_jsonl


def rollout_to_dict(rollout: Rollout) -> dict[str, Any]:
    """Plain data of a rollout; floats keep every digit when written as JSON."""
    return dataclasses.asdict(rollout)


def rollout_from_dict(row: dict[str, Any]) -> Rollout:
    """Inverse of `rollout_to_dict`, also after a trip through JSON (which turns tuples into lists).

    Raises:
        KeyError, TypeError, ValueError: fields missing, surplus, or of the wrong kind.
    """
    row = dict(row)
    prompt, completion = dict(row.pop("prompt")), dict(row.pop("completion"))
    prompt["tokens"] = _ids(prompt["tokens"])
    prompt["worked"] = None if prompt.get("worked") is None else _ids(prompt["worked"])
    completion["tokens"] = _ids(completion["tokens"])
    completion["logprobs"] = _floats(completion["logprobs"])
    if completion["finish"] not in ("stop", "length"):
        raise ValueError(f"finish is {completion['finish']!r}, not 'stop' or 'length'")
    if completion.get("spec") is not None:
        spec = dict(completion["spec"])
        spec["per_position"] = _ids(spec.get("per_position", ()))
        completion["spec"] = SpecStats(**spec)
    for name in ("old_logprobs", "ref_logprobs"):
        if row.get(name) is not None:
            row[name] = _floats(row[name])
            if len(row[name]) != len(completion["tokens"]):
                raise ValueError(f"{len(completion['tokens'])} tokens but {len(row[name])} {name}")
    return Rollout(Prompt(**prompt), Completion(**completion), **row)


def save_rollouts(path: str | Path, rollouts: Iterable[Rollout]) -> int:
    """Write rollouts as JSON lines, in order; the file appears whole or not at all. Returns how many."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(file.name + ".partial")
    count = 0
    with beside.open("w", encoding="utf-8") as out:
        for rollout in rollouts:
            out.write(json.dumps(rollout_to_dict(rollout), ensure_ascii=False) + "\n")
            count += 1
    os.replace(beside, file)
    return count


def load_rollouts(path: str | Path, key: str = "data.recorded") -> list[Rollout]:
    """Read what `save_rollouts` wrote.

    Raises:
        ConfigError: no such file, or a line that is not a rollout (its number is named).
    """
    rollouts = []
    for line, row in read_jsonl(path, key):
        try:
            rollouts.append(rollout_from_dict(row))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}, line {line} is not a rollout ({type(error).__name__}: {error})",
                found=sorted(row),
                needed="a line that save_rollouts wrote",
                key=key,
            ) from error
    if not rollouts:
        raise ConfigError("no rollouts in the file", found=str(path), needed="at least one", key=key)
    return rollouts


def _ids(values: Any) -> tuple[int, ...]:
    if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
        raise TypeError("token ids and counts must be integers")
    return tuple(values)


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
