"""What a worker of a distributed test found, claim by claim."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Claims:
    """Failures are kept, not raised: the other ranks are in the same messages."""

    failed: dict[str, list[str]] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)

    def check(self, claim: str, good: bool, message: str) -> None:
        self.checks[claim] = self.checks.get(claim, 0) + 1
        if not good:
            self.failed.setdefault(claim, []).append(message)

    def close(self, claim: str, found: Tensor, wanted: Tensor, tolerance: float, message: str) -> None:
        good = found.shape == wanted.shape
        good = good and torch.allclose(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)
        self.check(claim, good, message if good else f"{message}: {_difference(found, wanted)}")

    def same_bits(self, claim: str, values: Tensor, group: dist.ProcessGroup, message: str) -> None:
        """Every rank of the group holds exactly these values."""
        others = values.new_empty(dist.get_world_size(group) * values.numel())
        dist.all_gather_into_tensor(others, values.contiguous().flatten(), group=group)
        same = all(torch.equal(other, values.flatten()) for other in others.chunk(dist.get_world_size(group)))
        self.check(claim, same, f"{message}: other bits")


def _difference(found: Tensor, wanted: Tensor) -> str:
    if found.shape != wanted.shape:
        return f"shapes {tuple(found.shape)} and {tuple(wanted.shape)}"
    return f"largest difference {float((found.double() - wanted.double()).abs().max()):.2e}"
