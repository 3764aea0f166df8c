"""Objectives of the draft: distances between the policy's next-token distribution p and the draft's q.

One sweep over chunks of rows forms teacher and draft logits, the loss and its gradients; nothing of size [R, V] is
kept, and backward only scales what the sweep has formed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_spec.errors import ConfigError
from lightning_spec.loss.chunks import RowChunks, exact_math, math_dtype, rows_per_chunk

OutOfVocabulary = Literal["renormalise", "drop"]


@dataclass(slots=True)
class DraftLossOutput:
    """`loss`: scalar, sum over rows of weight * loss.  `agree` [R] bool: the draft's most likely token is the policy's.
    `alpha` [R]: sum_v min(p, q), the chance that the policy accepts a sample of q.  `valid` [R] bool: the row was
    scored (its weight is not 0, and it was not dropped). agree and alpha are False and 0 where the weight is 0."""

    loss: Tensor
    agree: Tensor
    alpha: Tensor
    valid: Tensor


@dataclass(slots=True)
class ChunkStatistics:
    """What a row loss may use of one chunk of n rows; it must not change p and q."""

    p: Tensor
    """[n, Vd] the policy's distribution on the draft's vocabulary (renormalised there)."""
    q: Tensor
    """[n, Vd] the draft's distribution."""
    cross_entropy: Tensor
    """[n] -sum p log q."""
    teacher_top: Tensor
    """[n] int64, the policy's most likely token, a target id."""
    draft_top: Tensor
    """[n] int64, the draft's most likely token, a draft id."""
    alpha: Tensor
    """[n] sum_v min(p, q) with the policy's distribution as it is, not renormalised."""
    mass: Tensor | None
    """[n] the policy's probability of the draft's vocabulary; None: it is the whole vocabulary."""


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
        """Loss of each row, [n]; writes its gradient to the draft's logits into `dz` [n, Vd] unless that is None."""

    def __call__(
        self,
        hidden: Tensor,
        head: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Tensor,
        weight: Tensor,
        d2t_target_ids: Tensor | None = None,
    ) -> DraftLossOutput:
        """sum_r weight[r] * distance(softmax(teacher logits of r), softmax(hidden[r] @ head.T)).

        Gradients reach `hidden` and `head` only, in their draft role: teacher tensors are constants even where they
        are the same objects. Rows of weight 0 are skipped. Calling once with the rows of several passes keeps one
        buffer for the head's gradient instead of one a pass.

        Args:
            hidden: [R, C], already normed.  head: [Vd, C].
            teacher_hidden: [R, Ct], the policy's final-normed hidden.  teacher_head: [V, Ct].
            weight: [R], with the global normaliser (and the pass weight) inside. No gradient reaches it.
            d2t_target_ids: [Vd] int64, the target id of each draft id; None: Vd = V and the ids are equal.

        Raises:
            ConfigError: vocabularies that do not match.
            ValueError: shapes that do not fit.
        """
        _check_shapes(hidden, head, teacher_hidden, teacher_head, weight, d2t_target_ids)
        loss, agree, alpha, valid = _DraftSweep.apply(
            hidden,
            head,
            teacher_hidden.detach(),
            teacher_head.detach(),
            weight.detach(),
            d2t_target_ids,
            self,
            torch.is_grad_enabled(),
        )
        return DraftLossOutput(loss, agree, alpha, valid)


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
    alpha = stats.alpha if stats.mass is None else torch.minimum(stats.p, stats.q).sum(1)
    if dz is not None:
        torch.mul(stats.q, stats.q < stats.p, out=dz)
        inner = dz.sum(1, keepdim=True)
        dz.neg_().addcmul_(stats.q, inner)
    return alpha


def _check_shapes(
    hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor, weight: Tensor, ids: Tensor | None
) -> None:
    rows = hidden.shape[0]
    fits = (
        hidden.dim() == head.dim() == teacher_hidden.dim() == teacher_head.dim() == 2
        and hidden.shape[1] == head.shape[1]
        and teacher_hidden.shape == (rows, teacher_head.shape[1])
        and weight.shape == (rows,)
    )
    if not fits:
        raise ValueError(
            "need hidden [R, C], head [Vd, C], teacher_hidden [R, Ct], teacher_head [V, Ct], weight [R]; got "
            + ", ".join(str(tuple(t.shape)) for t in (hidden, head, teacher_hidden, teacher_head, weight))
        )
    if ids is None and head.shape[0] != teacher_head.shape[0]:
        raise ConfigError(
            "the draft's vocabulary is not the policy's and no map was given",
            found=head.shape[0], needed=f"{teacher_head.shape[0]} ids, or a d2t map", key="draft.d2t",
        )  # fmt: skip
    if ids is not None and ids.shape != head.shape[:1]:
        raise ConfigError(
            "the d2t map is not as long as the draft's vocabulary",
            found=tuple(ids.shape), needed=f"{head.shape[0]} target ids", key="draft.d2t",
        )  # fmt: skip


def _exponentials_(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turns [n, V] logits into exp(logits - m) in place; returns (m [n, 1], argmax [n], S [n, 1])."""
    m, top = logits.max(1, keepdim=True)
    e = logits.sub_(m).exp_()
    return m, top.squeeze(1), e.sum(1, keepdim=True)


def _statistics(tau: Tensor, z: Tensor, scratch: Tensor, ids: Tensor | None) -> ChunkStatistics:
    """Overwrites the teacher's logits tau [n, V], the draft's z [n, Vd] and scratch [n, Vd].

    The only place that reduces over the vocabulary before the row losses: under vocabulary parallelism m_p, m_q are
    all-reduced by max here, and S_p, S_q, d by sum (and the row losses' own sums).
    """
    mass = None
    if ids is None:
        m_p, teacher_top, s_p = _exponentials_(tau)
        p = tau
    else:
        # The restricted distribution has its own maximum: relative to the full one all of it may underflow to 0.
        p = tau.index_select(1, ids)
        m_full, teacher_top, s_full = _exponentials_(tau)
        m_p, _, s_p = _exponentials_(p)
        mass = ((m_p - m_full).exp_() * s_p / s_full).squeeze(1)
    p.div_(s_p)
    m_q, draft_top = z.max(1, keepdim=True)
    z.sub_(m_q)
    d = torch.linalg.vecdot(p, z)
    q = z.exp_()
    s_q = q.sum(1, keepdim=True)
    q.div_(s_q)
    p_full = p if mass is None else torch.mul(p, mass[:, None], out=scratch)
    alpha = torch.minimum(p_full, q, out=scratch).sum(1)
    return ChunkStatistics(p, q, s_q.squeeze(1).log_() - d, teacher_top, draft_top.squeeze(1), alpha, mass)


class _DraftSweep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Tensor,
        weight: Tensor,
        ids: Tensor | None,
        loss: DraftLoss,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = math_dtype(hidden, head)
        R, Vd, V = hidden.shape[0], head.shape[0], teacher_head.shape[0]
        need_hidden, need_head = (with_grad and need for need in ctx.needs_input_grad[:2])
        d_hidden = torch.zeros_like(hidden, dtype=dtype) if need_hidden else None
        d_head = torch.zeros_like(head, dtype=dtype) if need_head else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        agree = torch.zeros(R, dtype=torch.bool, device=hidden.device)
        alpha = torch.zeros(R, dtype=dtype, device=hidden.device)
        valid = weight != 0
        present = None
        if ids is not None:
            present = torch.zeros(V, dtype=torch.bool, device=hidden.device).index_fill_(0, ids, True)
        chunk = loss.chunk or rows_per_chunk(max(V, Vd), dtype, hidden.device, mebibytes=4)
        W, W_teacher = head.detach().to(dtype), teacher_head.to(dtype)
        chunks = RowChunks(valid, chunk)
        n_max = min(chunk, chunks.count)
        buffers = [torch.empty(n_max, width, dtype=dtype, device=hidden.device) for width in (V, Vd, Vd)]
        with exact_math(hidden.device):
            for rows in chunks:
                h, w = hidden[rows].to(dtype), weight[rows].to(dtype)
                tau, z, scratch = (buffer[: h.shape[0]] for buffer in buffers)
                torch.mm(teacher_hidden[rows].to(dtype), W_teacher.T, out=tau)
                if loss.teacher_temperature != 1.0:
                    tau /= loss.teacher_temperature
                torch.mm(h, W.T, out=z)
                stats = _statistics(tau, z, scratch, ids)
                alpha[rows] = stats.alpha
                draft_top = stats.draft_top if ids is None else ids[stats.draft_top]
                agree[rows] = draft_top == stats.teacher_top
                if present is not None and loss.out_of_vocab == "drop":
                    known = present[stats.teacher_top]
                    valid[rows] = known
                    w = w * known
                each = loss.rows(stats, scratch if need_hidden or need_head else None)
                total += torch.dot(w.to(torch.float64), each.to(torch.float64))
                # The row weight scales the [n, C] side of each product: cheaper than the [n, V] gradient.
                if d_hidden is not None:
                    d_hidden[rows] = (scratch @ W).mul_(w[:, None])
                if d_head is not None:
                    d_head.addmm_(scratch.T, h * w[:, None])
        ctx.save_for_backward(d_hidden, d_head)
        ctx.dtypes = hidden.dtype, head.dtype
        ctx.mark_non_differentiable(agree, alpha, valid)
        return total.to(dtype), agree, alpha, valid

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        hidden_dtype, head_dtype = ctx.dtypes
        return (
            None if d_hidden is None else (d_hidden * upstream).to(hidden_dtype),
            None if d_head is None else (d_head * upstream).to(head_dtype),
            *(None,) * 6,
        )
