"""How one model is optimised: AdamW, its own clip norm, warm-up and decay. Pure data and one pure function."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_spec.errors import ConfigError

Schedule = Literal["constant", "cosine", "linear"]


@dataclass
class OptimConfig:
    """AdamW and learning-rate schedule of one model (the policy or the draft).

    Args:
        lr: peak learning rate.
        weight_decay: decoupled decay of matrices; norms and biases (parameters of one axis) are not decayed.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        clip_norm: gradients are scaled down to this global 2-norm; 0 does not clip (the norm is measured all the same).
        warmup_steps: optimiser steps of linear warm-up, from lr / warmup_steps.
        schedule: shape after the warm-up.
        min_lr_ratio: the schedule ends at lr times this.
        total_steps: length of the schedule in optimiser steps; null takes `trainer.max_steps`.
    """

    lr: float = 1e-5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    min_lr_ratio: float = 0.0
    total_steps: int | None = None

    def __post_init__(self) -> None:
        # Lists come from YAML.
        self.betas = tuple(self.betas)  # type: ignore[assignment]
        _require(self.lr > 0 and math.isfinite(self.lr), "lr", self.lr, "a finite number above 0")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        _require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "betas",
            self.betas,
            "two numbers in [0, 1)",
        )
        _require(self.eps > 0, "eps", self.eps, "a number above 0")
        _require(self.clip_norm >= 0, "clip_norm", self.clip_norm, "0 (no clipping) or more")
        _require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "0 or more")
        _require(
            self.schedule in ("constant", "cosine", "linear"), "schedule", self.schedule, "constant, cosine or linear"
        )
        _require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", self.min_lr_ratio, "a number in [0, 1]")
        _require(
            self.total_steps is None or self.total_steps >= 1, "total_steps", self.total_steps, "null, or 1 or more"
        )


def _require(good: bool, field: str, found: object, needed: str) -> None:
    if not good:
        raise ConfigError(f"bad optimiser setting {field}", found=found, needed=needed, key=f"*_optim.{field}")


def learning_rate_factor(config: OptimConfig, step: int, total_steps: int) -> float:
    """What the peak learning rate is multiplied by at optimiser step `step` (0-based) of `total_steps`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    length = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / length)
    shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1.0 - progress
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape
