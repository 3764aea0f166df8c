"""Random generators: their states for checkpoints, and a seed for each optimiser step.

A step's draws depend on the run's seed, the step's number and the data-parallel rank alone. So a resumed run draws what
the uninterrupted one drew, wherever it stopped and whatever drew in between (data iterators, callbacks), ranks of one
model replica draw alike, and data-parallel ranks do not.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def seed_step(seed: int, step: int, data_rank: int) -> None:
    """Seed Python's, numpy's and torch's global generators for one optimiser step on one data-parallel rank."""
    number = _number(f"{seed}/{step}/{data_rank}", 4)
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def micro_seed(seed: int, step: int, data_rank: int, index: int) -> int:
    """A 56-bit seed of one micro-batch's own draws: equal on the ranks of a model replica, else different."""
    return _number(f"{seed}/{step}/{data_rank}/{index}", 7)


def document_seed(seed: int, step: int, data_rank: int, rollout_index: int) -> int:
    """As `micro_seed`, of one document's own draws: whatever micro-batch the document lies in."""
    return _number(f"{seed}/{step}/{data_rank}/document {rollout_index}", 7)


def _number(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "little")


def random_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators of this process."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.array(keys).astype(np.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
