"""How the slots of a drafted block weigh in its loss: slot s counts only where all slots before it are accepted."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_spec.errors import ConfigError

Probability = Literal["accept", "label"]

_KEY = "draft.init_args.slot_weights.init_args"


class PositionWeights(ABC):
    """Weights of A anchors' S slots; slot 0 is the first that is predicted. Named in YAML by class path."""

    dynamic: bool = False
    """Whether the weights depend on the draft's probabilities, which then cost a sweep of their own."""

    @abstractmethod
    def __call__(self, alpha: Tensor, label_prob: Tensor, valid: Tensor) -> Tensor:
        """[A, S] weights of alpha's dtype, without a graph; 0 where a slot is not valid.

        Args:
            alpha: [A, S], sum_v min(p, q), the chance that the slot is accepted.
            label_prob: [A, S], the draft's probability of the rollout's own token.
            valid: [A, S] bool, a prefix of each anchor's slots. What the others hold is not read.
        """

    def static(self, slots: int) -> list[float] | None:
        """The weights of `slots` valid slots where they are the same for every anchor; None for dynamic ones."""
        return None


class _Static(PositionWeights):
    """One weight a slot, whatever the draft does."""

    def __call__(self, alpha: Tensor, label_prob: Tensor, valid: Tensor) -> Tensor:
        return alpha.new_tensor(self.static(alpha.shape[1])) * valid

    @abstractmethod
    def static(self, slots: int) -> list[float]: ...


class UniformPositions(_Static):
    """Every slot weighs 1."""

    def static(self, slots: int) -> list[float]:
        return [1.0] * slots


class ExponentialPositions(_Static):
    """exp(-s / gamma). DFlash takes gamma 4, 5 and 7 for blocks of 8, 10 and 16 (arXiv 2602.06036).

    Args:
        gamma: in slots.

    Raises:
        ConfigError: a gamma that is not above 0.
    """

    def __init__(self, gamma: float) -> None:
        if not 0.0 < gamma < math.inf:
            raise ConfigError("gamma is out of range", found=gamma, needed="a number above 0", key=f"{_KEY}.gamma")
        self.gamma = float(gamma)

    def static(self, slots: int) -> list[float]:
        return [math.exp(-s / self.gamma) for s in range(slots)]


class DPACE(PositionWeights):
    """Dynamic weights after D-PACE (arXiv 2605.18810): those of a surrogate of the expected accepted length.

    With x_j the chance that slot j is accepted, sum_m prod_{j <= m} x_j slots are expected to be. Its gradient to
    log x_k, sum_{m >= k} prod_{j <= m} x_j, is slot k's weight: weights fall with k, and fall fast behind a slot that
    stops acceptance.

    Args:
        probability: what stands for x: "label" the draft's probability of the rollout's own token, "accept" the chance
            sum_v min(p, q) that the policy accepts the draft's sample.

    Raises:
        ConfigError: another probability.
    """

    dynamic = True

    def __init__(self, probability: Probability = "label") -> None:
        if probability not in get_args(Probability):
            raise ConfigError(
                "unknown probability", found=probability, needed=f"one of {get_args(Probability)}",
                key=f"{_KEY}.probability",
            )  # fmt: skip
        self.probability: Probability = probability

    def __call__(self, alpha: Tensor, label_prob: Tensor, valid: Tensor) -> Tensor:
        chance = label_prob if self.probability == "label" else alpha
        # 0 at the first slot that is not valid ends the prefix: every later product is 0 with it.
        reached = torch.where(valid, chance.detach().clamp(0.0, 1.0), 0.0).cumprod(1)
        return reached.flip(1).cumsum(1).flip(1).to(alpha.dtype)
