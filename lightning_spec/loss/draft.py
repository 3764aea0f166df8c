"""Objectives of the draft: distances between the policy's next-token distribution p and the draft's q.

One sweep (`sweep.py`) over chunks of rows forms teacher and draft logits, the loss and its gradients; nothing of size
[R, V] is kept, and backward only scales what the sweep has formed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_spec.errors import ConfigError
from lightning_spec.loss.distributions import ChunkStatistics
from lightning_spec.loss.heads import Heads, prepare_heads
from lightning_spec.loss.sweep import OutOfVocabulary, Swept, sweep
from lightning_spec.loss.vocab import VocabShard


@dataclass(slots=True)
class DraftLossOutput:
    """`loss`: scalar, sum over rows of weight * loss.  `agree` [R] bool: the draft's most likely token is the policy's.
    `alpha` [R]: sum_v min(p, q), the chance that the policy accepts a sample of q.  `valid` [R] bool: the row was
    scored and not dropped. `each` [R]: the unweighted losses. All are False and 0 where the row was not scored."""

    loss: Tensor
    agree: Tensor
    alpha: Tensor
    valid: Tensor
    each: Tensor


class DraftLoss(ABC):
    """A distance between p and q, summed with given row weights. Named in YAML by class path.

    Args:
        teacher_temperature: divides the policy's logits.
        out_of_vocab: with a reduced draft vocabulary, what becomes of a row whose most likely policy token the draft
            does not have: "renormalise" scores it against p on the draft's vocabulary like any other row, "drop" leaves
            it out. (Row weights carry a normaliser that was counted before; dropped rows remain counted in it.)
        chunk: rows at a time; default: as many as make 4 MiB of logits on a CPU, near its cache.

    Raises:
        ConfigError: an option out of range.
    """

    def __init__(
        self,
        teacher_temperature: float = 1.0,
        out_of_vocab: OutOfVocabulary = "renormalise",
        chunk: int | None = None,
    ) -> None:
        prefix = "draft_loss.init_args"
        if not 0.0 < teacher_temperature < math.inf:
            raise ConfigError(
                "teacher_temperature is out of range", found=teacher_temperature, needed="a number above 0",
                key=f"{prefix}.teacher_temperature",
            )  # fmt: skip
        if out_of_vocab not in get_args(OutOfVocabulary):
            raise ConfigError(
                "unknown out_of_vocab", found=out_of_vocab, needed=f"one of {get_args(OutOfVocabulary)}",
                key=f"{prefix}.out_of_vocab",
            )  # fmt: skip
        if chunk is not None and chunk < 1:
            raise ConfigError("chunk is out of range", found=chunk, needed="at least 1 row", key=f"{prefix}.chunk")
        self.teacher_temperature = teacher_temperature
        self.out_of_vocab: OutOfVocabulary = out_of_vocab
        self.chunk = chunk

    @abstractmethod
    def rows(self, stats: ChunkStatistics, dz: Tensor | None) -> Tensor:
        """Loss of each row, [n]; writes its gradient to the draft's logits into `dz` [n, Vd] unless that is None.

        Under vocabulary parallelism p, q and dz are this rank's columns: sums over the vocabulary that `stats` does not
        have go through `stats.sum`.
        """

    def __call__(
        self,
        hidden: Tensor,
        head: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Tensor,
        weight: Tensor,
        d2t_target_ids: Tensor | None = None,
        teacher_rows: Tensor | None = None,
        scored: Tensor | None = None,
        vocab: VocabShard | None = None,
    ) -> DraftLossOutput:
        """sum_r weight[r] * distance(softmax(teacher logits of r), softmax(hidden[r] @ head.T)).

        Gradients reach `hidden` and `head` only, in their draft role: teacher tensors are constants even where they
        are the same objects. One call with the rows of all passes forms the teacher's distribution once for all of
        them, and keeps one buffer for the head's gradient.

        With `vocab` the heads are the rank's rows (of a reduced vocabulary: `vocab.part` of the map, which may be
        empty) and everything else is the same on all ranks of its group, which call together and give backward the
        same upstream gradient. Outputs and the gradient of `hidden` are complete and the same on each; the gradient of
        `head` is of the rank's rows.

        Args:
            hidden: [R, C], already normed.  head: [Vd, C].
            teacher_hidden: [Rt, Ct], the policy's final-normed hidden.  teacher_head: [V, Ct].
            weight: [R], with the global normaliser (and the pass weight) inside. No gradient reaches it.
            d2t_target_ids: [Vd] int64, the target id of each draft id; None: Vd = V and the ids are equal.
            teacher_rows: [R] int64, row r is taught by teacher_hidden[teacher_rows[r]]; None: Rt = R, by its own.
            scored: [R] bool, rows to visit; the others are skipped. None: those of weight other than 0. (A row of
                weight 0 that is scored has its loss, agreement and alpha reported and no gradient.)
            vocab: the rank's part of a split vocabulary; None: all of it is here.

        Raises:
            ConfigError: vocabularies that do not match.
            ValueError: shapes that do not fit.
        """
        _check_shapes(hidden, head, teacher_hidden, teacher_head, weight, teacher_rows)
        loss, each, agree, alpha, valid = _DraftSweep.apply(
            hidden,
            head,
            prepare_heads(head, teacher_head, d2t_target_ids, vocab, dtype=hidden.dtype),
            teacher_hidden.detach(),
            weight.detach(),
            teacher_rows,
            weight != 0 if scored is None else scored,
            self,
            torch.is_grad_enabled(),
        )
        return DraftLossOutput(loss, agree, alpha, valid, each)

    def sweep(
        self,
        hidden: Tensor,
        head: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Tensor,
        weight: Tensor,
        d2t_target_ids: Tensor | None,
        teacher_rows: Tensor,
        *,
        need_hidden: bool,
        d_head: Tensor | None,
        vocab: VocabShard | None = None,
        heads: Heads | None = None,
    ) -> Swept:
        """The same for callers that run backward themselves: every row is scored, no graph is made.

        Args:
            need_hidden: whether to return the gradient of `hidden`; with `vocab` too it is complete (one all-reduce).
            d_head: [Vd, C] float32 (float64 for float64 inputs); the head's gradient is added to it, unless None.
            heads: what `prepare_heads` made of these heads, map and `vocab`, for callers that sweep them several times.
        """
        _check_shapes(hidden, head, teacher_hidden, teacher_head, weight, teacher_rows)
        if heads is None:
            heads = prepare_heads(head, teacher_head, d2t_target_ids, vocab, dtype=hidden.dtype)
        elif not heads.stand_for(head, teacher_head, vocab, hidden.dtype):
            raise ValueError("`heads` was made of other heads, of another split, or for hidden states of another dtype")
        scored = torch.ones_like(weight, dtype=torch.bool)
        return sweep(
            self, hidden, heads, teacher_hidden, weight, teacher_rows, scored, need_hidden=need_hidden, d_head=d_head
        )


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


def _check_shapes(
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    weight: Tensor,
    teacher_rows: Tensor | None,
) -> None:
    rows = hidden.shape[0]
    fits = (
        hidden.dim() == head.dim() == teacher_hidden.dim() == teacher_head.dim() == 2
        and hidden.shape[1] == head.shape[1]
        and teacher_hidden.shape[1] == teacher_head.shape[1]
        and weight.shape == (rows,)
        and (teacher_hidden.shape[0] == rows if teacher_rows is None else teacher_rows.shape == (rows,))
    )
    if not fits:
        raise ValueError(
            "need hidden [R, C], head [Vd, C], teacher_hidden [R, Ct] (or [Rt, Ct] with teacher_rows [R]), "
            "teacher_head [V, Ct], weight [R]; got "
            + ", ".join(str(tuple(t.shape)) for t in (hidden, head, teacher_hidden, teacher_head, weight))
        )


class _DraftSweep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        heads: Heads,
        teacher_hidden: Tensor,
        weight: Tensor,
        teacher_rows: Tensor | None,
        scored: Tensor,
        loss: DraftLoss,
        with_grad: bool,
    ) -> tuple[Tensor, ...]:
        need_hidden, need_head = (with_grad and need for need in ctx.needs_input_grad[:2])
        d_head = torch.zeros_like(heads.draft) if need_head else None
        out = sweep(
            loss, hidden, heads, teacher_hidden, weight, teacher_rows, scored, need_hidden=need_hidden, d_head=d_head
        )
        ctx.save_for_backward(out.d_hidden, d_head)
        ctx.dtypes = hidden.dtype, head.dtype
        ctx.mark_non_differentiable(out.each, out.agree, out.alpha, out.valid)
        return out.total.to(heads.draft.dtype), out.each, out.agree, out.alpha, out.valid

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        hidden_dtype, head_dtype = ctx.dtypes
        return (
            None if d_hidden is None else (d_hidden * upstream).to(hidden_dtype),
            None if d_head is None else (d_head * upstream).to(head_dtype),
            *(None,) * 7,
        )
