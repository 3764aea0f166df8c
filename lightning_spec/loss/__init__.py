"""Objectives of the policy and of the draft. Tensors in, tensors out: this room knows torch and nothing else."""

from lightning_spec.loss.advantages import group_advantages, trained_flags
from lightning_spec.loss.aggregate import Split
from lightning_spec.loss.confidence import calibration, calibration_error, confidence_loss
from lightning_spec.loss.draft import (
    LK,
    DraftLoss,
    DraftLossOutput,
    HardCrossEntropy,
    SoftCrossEntropy,
    TotalVariation,
    Weighted,
)
from lightning_spec.loss.heads import Heads, prepare_heads
from lightning_spec.loss.kl import kl_estimate
from lightning_spec.loss.logprob import linear_logprobs
from lightning_spec.loss.policy import GRPO, PolicyLoss, PolicyLossOutput, SupervisedLoss
from lightning_spec.loss.position import DPACE, ExponentialPositions, PositionWeights, UniformPositions
from lightning_spec.loss.sweep import LowRank
from lightning_spec.loss.vocab import VocabShard

__all__ = [
    "DPACE",
    "GRPO",
    "LK",
    "DraftLoss",
    "DraftLossOutput",
    "ExponentialPositions",
    "HardCrossEntropy",
    "Heads",
    "LowRank",
    "PolicyLoss",
    "PolicyLossOutput",
    "PositionWeights",
    "SoftCrossEntropy",
    "Split",
    "SupervisedLoss",
    "TotalVariation",
    "UniformPositions",
    "VocabShard",
    "Weighted",
    "calibration",
    "calibration_error",
    "confidence_loss",
    "group_advantages",
    "kl_estimate",
    "linear_logprobs",
    "prepare_heads",
    "trained_flags",
]
