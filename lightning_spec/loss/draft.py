"""Objectives of the draft: distances between the policy's next-token distribution p and the draft's q.

One sweep (`sweep.py`) over chunks of rows forms teacher and draft logits, the loss and its gradients; nothing of size
[R, V] is kept, and backward only scales what the sweep has formed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_spec.errors import ConfigError
from lightning_spec.loss.distributions import ChunkStatistics
from lightning_spec.loss.draft_base import DraftLoss, DraftLossOutput
from lightning_spec.loss.sweep import OutOfVocabulary

__all__ = ["LK", "DraftLoss", "DraftLossOutput", "HardCrossEntropy", "SoftCrossEntropy", "TotalVariation", "Weighted"]


class SoftCrossEntropy(DraftLoss):
    """-sum_v p_v log q_v: the forward KL up to the policy's entropy."""

    def rows(self, stats: ChunkStatistics, dz: Tensor | None) -> Tensor:
        if dz is not None:
            torch.sub(stats.q, stats.p, out=dz)
        return stats.cross_entropy


class TotalVariation(DraftLoss):
    """1 - sum_v min(p_v, q_v): one minus the chance that a sample of q is accepted (arXiv 2211.17192, theorem 3.5)."""

    def rows(self, stats: ChunkStatistics, dz: Tensor | None) -> Tensor:
        return 1.0 - _overlap(stats, dz)


class LK(DraftLoss):
    """-log sum_v min(p_v, q_v): the negative log of the acceptance chance.

    Its gradient, total variation's over alpha, does not vanish where p and q hardly overlap. Alpha is kept above the
    smallest normal number, so that disjoint distributions give a finite value.
    """

    def rows(self, stats: ChunkStatistics, dz: Tensor | None) -> Tensor:
        alpha = _overlap(stats, dz).clamp(min=torch.finfo(stats.q.dtype).tiny)
        if dz is not None:
            dz /= alpha[:, None]
        return -alpha.log()


class HardCrossEntropy(DraftLoss):
    """-log q(label): the negative log-likelihood of the rollout's own token. A row without a label, or whose label the
    draft's vocabulary lacks, counts 0."""

    needs_labels = True

    def rows(self, stats: ChunkStatistics, dz: Tensor | None) -> Tensor:
        label = stats.label
        assert label is not None
        if dz is not None:
            torch.mul(stats.q, label.known[:, None], out=dz)
            if dz.shape[1]:  # a rank without any of the draft's tokens has no column to subtract from
                here = (label.column >= 0).to(dz.dtype)
                dz.scatter_add_(1, label.column.clamp(min=0)[:, None], -here[:, None])
        return -label.logprob


class Weighted(DraftLoss):
    """A weighted sum of draft losses, in one sweep. The members' own sweep options are not used.

    Args:
        losses: the members.  weights: as many numbers.
    """

    def __init__(
        self,
        losses: Sequence[DraftLoss],
        weights: Sequence[float],
        teacher_temperature: float = 1.0,
        out_of_vocab: OutOfVocabulary = "renormalise",
        chunk: int | None = None,
    ) -> None:
        super().__init__(teacher_temperature, out_of_vocab, chunk)
        if not losses or len(losses) != len(weights):
            raise ConfigError(
                "losses and weights do not match", found=(len(losses), len(weights)), needed="as many of each, not 0",
                key="draft_loss.init_args.weights",
            )  # fmt: skip
        self.losses, self.weights = list(losses), [float(w) for w in weights]
        self.needs_labels = any(loss.needs_labels for loss in self.losses)

    def rows(self, stats: ChunkStatistics, dz: Tensor | None) -> Tensor:
        part = None if dz is None else torch.empty_like(dz)
        total = torch.zeros_like(stats.cross_entropy)
        if dz is not None:
            dz.zero_()
        for loss, weight in zip(self.losses, self.weights, strict=True):
            total += weight * loss.rows(stats, part)
            if dz is not None and part is not None:
                dz.add_(part, alpha=weight)
        return total


def _overlap(stats: ChunkStatistics, dz: Tensor | None) -> Tensor:
    """alpha = sum min(p, q); dz of (1 - alpha): q (<q, r> - r) with r = 1[q < p]."""
    if dz is not None:
        torch.mul(stats.q, stats.q < stats.p, out=dz)
    if stats.overlap is None:  # the sums over ranks are made once for all members of a `Weighted`
        alpha = stats.own_alpha if stats.mass is None else torch.minimum(stats.p, stats.q).sum(1)
        inner = torch.zeros_like(alpha) if dz is None else dz.sum(1)
        alpha, inner = stats.sum(alpha, inner)
        stats.overlap = alpha, inner
    alpha, inner = stats.overlap
    if dz is not None:
        dz.neg_().addcmul_(stats.q, inner[:, None])
    return alpha
