"""Lightning callbacks that users name in YAML. Classes are imported when they are first asked for."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "ExportCallback": "callbacks.export",
    "FrozenTwin": "callbacks.acceptance",
    "PreemptionCallback": "callbacks.preemption",
    "ProgressCallback": "callbacks.progress",
    "RolloutCallback": "callbacks.rollout",
    "SpecCheckpoint": "callbacks.checkpoint",
    "ThroughputCallback": "callbacks.throughput",
}
__all__ = [
    "ExportCallback",
    "FrozenTwin",
    "PreemptionCallback",
    "ProgressCallback",
    "RolloutCallback",
    "SpecCheckpoint",
    "ThroughputCallback",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'callbacks' has no attribute {name!r}")
