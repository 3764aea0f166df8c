"""What policy and draft hand to each other and to the strategy for one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_spec.loss.vocab import VocabShard
from lightning_spec.metrics import MetricBag
from lightning_spec.policy import TapParts


@dataclass(slots=True)
class PolicyStep:
    """What one chunk of the policy gives for one micro-batch."""

    output: Tensor
    """On the last virtual stage a scalar whose sum over the step is the policy's objective, else the residual."""
    metrics: MetricBag
    taps: TapParts | None
    """What the draft reads of this chunk; None without a draft."""
    hidden: Tensor | None
    """[T, C] final-normed states of this rank's rows, detached; on the last virtual stage alone."""


@dataclass(slots=True)
class DraftFeatures:
    """What the draft reads of the policy for one micro-batch: this rank's T rows, detached."""

    features: Tensor
    """[T, n * C], the taps side by side, ascending layer."""
    embeddings: Tensor
    """[T, C]."""
    hidden: Tensor
    """[T, C]."""
    head: Tensor
    """[V, C], or this rank's rows of it."""
    vocab: VocabShard | None = None
    """Which rows those are; None: all."""
    embedding: Tensor | None = None
    """[V, C], the policy's input embedding, where this rank has it whole."""
    special: Tensor | None = None
    """[n, C], the policy's input embeddings of the draft's `embedding_ids`; None where there are none."""


@dataclass(slots=True)
class DraftStep:
    """`loss`: scalar whose sum over the step is the draft's objective."""

    loss: Tensor
    metrics: MetricBag
