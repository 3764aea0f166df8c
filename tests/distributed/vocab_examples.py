"""Losses, inputs and their split over ranks, as vocab_worker.py takes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_spec.loss import (
    LK,
    DraftLoss,
    HardCrossEntropy,
    SoftCrossEntropy,
    TotalVariation,
    VocabShard,
    Weighted,
)
from lightning_spec.loss.distributions import ChunkStatistics

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-5}
"""Of values and of gradients in the dtype of the sums; gradients that come back in bfloat16 are rounded there."""
BF16_ROUNDING = 8e-3


class Chi(DraftLoss):
    """A loss of one's own: sum (q - p)^2, plus the complete alpha as a constant."""

    def rows(self, stats: ChunkStatistics, dz: Tensor | None) -> Tensor:
        difference = stats.q - stats.p
        square, slope = stats.sum(difference.square().sum(1), (2 * difference * stats.q).sum(1))
        if dz is not None:
            torch.sub(2 * difference, slope[:, None], out=dz).mul_(stats.q)
        return square + stats.alpha


LOSSES: dict[str, Callable[..., DraftLoss]] = {
    "ce": SoftCrossEntropy,
    "tv": TotalVariation,
    "lk": LK,
    "mix": lambda **kw: Weighted([SoftCrossEntropy(), TotalVariation(), LK()], [0.5, 0.3, 2.0], **kw),
    "own": Chi,
    "hard": HardCrossEntropy,
    "dspark": lambda **kw: Weighted([HardCrossEntropy(), TotalVariation()], [0.1, 0.9], **kw),
}


def randn(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def gradient_tolerance(dtype: torch.dtype) -> float:
    return BF16_ROUNDING if dtype == torch.bfloat16 else TOLERANCE[dtype]


@dataclass
class Example:
    """Whole inputs of one draft loss; `ids` are target ids, ascending."""

    hidden: Tensor
    head: Tensor
    teacher_hidden: Tensor
    teacher_head: Tensor
    weight: Tensor
    ids: Tensor | None
    teacher_rows: Tensor | None
    scored: Tensor | None
    labels: Tensor | None = None
    bias: tuple[Tensor, Tensor] | None = None

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return (
            self.hidden.to(dtype, copy=True),
            self.head.to(dtype, copy=True),
            self.teacher_hidden.to(dtype, copy=True),
            self.teacher_head.to(dtype, copy=True),
            self.weight.to(dtype, copy=True),
        )


def example(draw: random.Random, dtype: torch.dtype, ranks: int) -> Example:
    C, Ct = 4, 6
    R = draw.choice([0, 1, draw.randint(2, 30)])
    V = draw.choice([2, 4, 50, draw.randint(3, 90)])
    g = torch.Generator().manual_seed(draw.randint(0, 1 << 30))
    ids = None
    if draw.random() < 0.6:
        # The middle choice leaves ranks without any of the draft's tokens.
        low, high = draw.choice([(0, V), (0, V), (0, -(-V // ranks)), (V - 1, V)])
        ids = low + torch.randperm(high - low, generator=g)[: draw.randint(1, high - low)].sort()[0]
    Vd = V if ids is None else ids.numel()
    teacher_rows, teachers = None, R
    if draw.random() < 0.5:
        teachers = draw.randint(1, 12)
        teacher_rows = torch.randint(teachers, (R,), generator=g)
    weight = torch.rand(R, generator=g, dtype=torch.float64) * (torch.rand(R, generator=g) < 0.7)
    if draw.random() < 0.1:
        weight.zero_()
    scored = torch.rand(R, generator=g) < 0.8 if draw.random() < 0.5 else None
    labels = torch.randint(-1, V, (R,), generator=g)
    bias = (randn(g, R, 3, dtype=dtype), randn(g, Vd, 3, dtype=dtype)) if draw.random() < 0.5 else None
    whole = Example(
        randn(g, R, C), randn(g, Vd, C), 2 * randn(g, teachers, Ct), randn(g, V, Ct), weight, ids, teacher_rows, scored
    )
    return Example(*whole.tensors(dtype), ids, teacher_rows, scored, labels, bias)


def split_of(x: Example, group: dist.ProcessGroup) -> tuple[VocabShard, Tensor, Tensor, Tensor | None]:
    """(vocab, the rank's rows of the draft's head, their indices in it, their target ids)."""
    vocab = VocabShard.split(x.teacher_head.shape[0], group)
    rows = torch.arange(vocab.start, vocab.stop) if x.ids is None else vocab.part(x.ids)
    return vocab, x.head[rows], rows, None if x.ids is None else x.ids[rows]
