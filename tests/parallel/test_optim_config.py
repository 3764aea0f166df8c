from __future__ import annotations

from typing import Any

import pytest

from lightning_spec.errors import ConfigError
from lightning_spec.optim import OptimConfig, learning_rate_factor


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"schedule": "step"}, "schedule"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio"),
        ({"total_steps": 0}, "total_steps"),
    ],
)
def test_bad_optimiser_settings_name_their_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OptimConfig(**options)
    assert caught.value.key.endswith(f".{field}")


def test_betas_from_yaml_lists_become_a_tuple() -> None:
    assert OptimConfig(betas=[0.8, 0.95]).betas == (0.8, 0.95)  # type: ignore[arg-type]


def test_warm_up_rises_linearly_to_the_peak_and_never_starts_at_zero() -> None:
    config = OptimConfig(warmup_steps=4)
    assert [learning_rate_factor(config, step, 100) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("schedule", "half"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_decay_passes_its_middle_and_stays_at_its_end(schedule: Any, half: float) -> None:
    config = OptimConfig(schedule=schedule, warmup_steps=2, min_lr_ratio=0.1)
    assert learning_rate_factor(config, 2, 12) == 1.0
    assert learning_rate_factor(config, 7, 12) == pytest.approx(half)
    end = 1.0 if schedule == "constant" else 0.1
    assert learning_rate_factor(config, 12, 12) == learning_rate_factor(config, 500, 12) == pytest.approx(end)


def test_a_schedule_shorter_than_its_warm_up_is_finite() -> None:
    config = OptimConfig(schedule="cosine", warmup_steps=10)
    assert learning_rate_factor(config, 10, 5) == 1.0
    assert learning_rate_factor(config, 11, 5) == 0.0
