"""Objectives of the policy and of the draft. Tensors in, tensors out: this room knows torch and nothing else."""

from lightning_spec.loss.advantages import group_advantages, trained_flags
from lightning_spec.loss.aggregate import Split
from lightning_spec.loss.draft import LK, DraftLoss, DraftLossOutput, SoftCrossEntropy, TotalVariation, Weighted
from lightning_spec.loss.heads import Heads, prepare_heads
from lightning_spec.loss.kl import kl_estimate
from lightning_spec.loss.logprob import linear_logprobs
from lightning_spec.loss.policy import GRPO, PolicyLoss, PolicyLossOutput, SupervisedLoss
from lightning_spec.loss.vocab import VocabShard

__all__ = [
    "GRPO",
    "LK",
    "DraftLoss",
    "DraftLossOutput",
    "Heads",
    "PolicyLoss",
    "PolicyLossOutput",
    "SoftCrossEntropy",
    "Split",
    "SupervisedLoss",
    "TotalVariation",
    "VocabShard",
    "Weighted",
    "group_advantages",
    "kl_estimate",
    "linear_logprobs",
    "prepare_heads",
    "trained_flags",
]
