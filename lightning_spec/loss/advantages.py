"""Advantages from rewards, and which completions the policy loss trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_spec.errors import ConfigError

Scale = Literal["group", "batch", "none"]
Baseline = Literal["mean", "leave_one_out"]
Overlong = Literal["train", "skip"]

# Rewards of a group that differ by less than this are equal up to rounding (a few float32 units in the last place of
# their size, or of 1 where sums of parts cancel).
_RELATIVE, _ABSOLUTE = 1e-6, 1e-7


def group_advantages(
    rewards: Tensor | Sequence[float],
    groups: Sequence[str] | Tensor,
    *,
    std: Scale = "group",
    baseline: Baseline = "mean",
    eps: float = 1e-6,
) -> Tensor:
    """A = (r - baseline) / (std + eps), with baseline and std over the samples of the same prompt.

    GRPO (arXiv 2402.03300, section 4.1.2) is `std="group"`; Dr. GRPO (2503.20783) `std="none"`; `std="batch"` divides
    by the deviation of all rewards given (2508.08221); `leave_one_out` takes the mean of the *other* samples (RLOO,
    2402.14740). Deviations are the sample ones (n - 1), as in TRL and verl. A group whose rewards are equal up to
    rounding, and a group of one, get exactly 0.

    Args:
        rewards: [R]. All samples of a group must be here, in any order; for `std="batch"` all of the step's.
        groups: R group names (or an integer tensor [R]); equal names are one group wherever they stand.
        eps: added to the deviation, in reward units.

    Returns:
        [R], of the rewards' floating dtype (float64 for a list).

    Raises:
        ConfigError: an unknown option, a reward that is not finite, or lengths that differ.
    """
    _check(std, Scale, "std")
    _check(baseline, Baseline, "baseline")
    given = torch.as_tensor(rewards, dtype=None if isinstance(rewards, Tensor) else torch.float64)
    r = given.detach().to(torch.float64)
    if r.dim() != 1 or len(groups) != r.shape[0]:
        raise ConfigError(
            "rewards and groups do not match", found=(tuple(r.shape), len(groups)), needed="R of each", key="groups"
        )
    if not bool(torch.isfinite(r).all()):
        bad = int((~torch.isfinite(r)).nonzero()[0])
        raise ConfigError(
            f"the reward of sample {bad} is not finite", found=float(r[bad]), needed="a finite number", key="rewards"
        )
    ids = _group_ids(groups).to(r.device)
    count = _sum_by(torch.ones_like(r), ids)
    centred = r - (_sum_by(r, ids) / count)[ids]
    # A second pass removes the rounding of the mean itself, which large rewards would otherwise leave behind.
    centred -= (_sum_by(centred, ids) / count)[ids]
    advantage = centred * (count / (count - 1).clamp(min=1))[ids] if baseline == "leave_one_out" else centred.clone()
    if std == "group":
        variance = _sum_by(centred.square(), ids) / (count - 1).clamp(min=1)
        advantage /= variance.sqrt()[ids] + eps
    elif std == "batch" and r.numel() > 1:
        advantage /= r.std() + eps
    advantage[_flat(r, ids)] = 0.0
    return advantage.to(given.dtype) if given.is_floating_point() else advantage


def _check(value: str, options: object, key: str) -> None:
    if value not in get_args(options):
        raise ConfigError(f"unknown {key}", found=value, needed=f"one of {get_args(options)}", key=key)


def _group_ids(groups: Sequence[str] | Tensor) -> Tensor:
    if isinstance(groups, Tensor):
        return groups.unique(return_inverse=True)[1]
    number: dict[str, int] = {}
    return torch.tensor([number.setdefault(name, len(number)) for name in groups], dtype=torch.int64)


def _sum_by(values: Tensor, ids: Tensor) -> Tensor:
    groups = int(ids.max()) + 1 if ids.numel() else 0
    return values.new_zeros(groups).index_add_(0, ids, values)


def _flat(r: Tensor, ids: Tensor) -> Tensor:
    """[R] bool: the sample's group has one reward, or rewards that are equal up to rounding."""
    groups = int(ids.max()) + 1 if ids.numel() else 0
    high = r.new_full((groups,), -torch.inf).scatter_reduce_(0, ids, r, "amax")
    low = r.new_full((groups,), torch.inf).scatter_reduce_(0, ids, r, "amin")
    size = torch.maximum(high.abs(), low.abs())
    return (high - low <= _RELATIVE * size + _ABSOLUTE)[ids]


def trained_flags(finish: Sequence[str | None], *, overlong: Overlong) -> list[bool]:
    """Which completions the policy loss trains on: the overlong filter of DAPO (arXiv 2503.14476, section 3.4).

    A completion cut by the token limit says nothing about its answer; `skip` leaves it out of the loss (its reward
    still counts in its group). The filter decides by the finish reason alone and refuses what it does not know, so it
    cannot be silently off.

    Args:
        finish: the finish reason of each completion, "stop" or "length".
        overlong: "train" trains on everything, "skip" leaves out "length".

    Raises:
        ConfigError: an unknown option, or a finish reason that is neither.
    """
    _check(overlong, Overlong, "overlong")
    for number, reason in enumerate(finish):
        if reason not in ("stop", "length"):
            raise ConfigError(
                f"completion {number} does not say whether it was cut", found=reason, needed="'stop' or 'length'",
                key="finish",
            )  # fmt: skip
    return [overlong == "train" or reason == "stop" for reason in finish]
