"""What every objective of the draft has in common: its options, its call, and its place in autograd.

One sweep (`sweep.py`) over chunks of rows forms teacher and draft logits, the loss and its gradients; nothing of size
[R, V] is kept, and backward only scales what the sweep has formed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_spec.errors import ConfigError
from lightning_spec.loss.distributions import ChunkStatistics
from lightning_spec.loss.heads import Heads, prepare_heads
from lightning_spec.loss.sweep import LowRank, OutOfVocabulary, Swept, sweep
from lightning_spec.loss.vocab import VocabShard


@dataclass(slots=True)
class DraftLossOutput:
    """`loss`: scalar, sum over rows of weight * loss.  `agree` [R] bool: the draft's most likely token is the policy's.
    `alpha` [R]: sum_v min(p, q), the chance that the policy accepts a sample of q.  `valid` [R] bool: the row was
    scored and not dropped.  `each` [R]: the unweighted losses.  `label_prob` [R]: q(label), 0 without a label or where
    the draft lacks it. All are False and 0 where the row was not scored."""

    loss: Tensor
    agree: Tensor
    alpha: Tensor
    valid: Tensor
    each: Tensor
    label_prob: Tensor


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

    needs_labels: bool = False
    """Whether the loss reads the rollout's own tokens: callers then pass `labels`."""

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
        *,
        labels: Tensor | None = None,
        bias: tuple[Tensor, Tensor] | None = None,
    ) -> DraftLossOutput:
        """sum_r weight[r] * distance(softmax(teacher logits of r), softmax(hidden[r] @ head.T)).

        Gradients reach `hidden`, `head` and both parts of `bias` only, in their draft role: teacher tensors are
        constants even where they are the same objects. One call with the rows of all passes forms the teacher's
        distribution once for all of them, and keeps one buffer for the head's gradient.

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
            labels: [R] int64, the rollout's own token that the row predicts, a target id; -1: none.
            bias: (rows [R, r], table [Vd, r]), a low-rank addition rows @ table.T to the draft's logits. With `vocab`
                the table is the rank's rows, as `head` is; the gradient of `rows` is complete on each rank.

        Raises:
            ConfigError: vocabularies that do not match, or a loss on labels without any.
            ValueError: shapes that do not fit, or a label outside the vocabulary.
        """
        _check_shapes(hidden, head, teacher_hidden, teacher_head, weight, teacher_rows)
        self._check_more(hidden, head, labels, bias)
        bias_rows, bias_table = (None, None) if bias is None else bias
        loss, each, agree, alpha, valid, label_prob = _DraftSweep.apply(
            hidden,
            head,
            bias_rows,
            bias_table,
            prepare_heads(head, teacher_head, d2t_target_ids, vocab, dtype=hidden.dtype),
            teacher_hidden.detach(),
            weight.detach(),
            teacher_rows,
            weight != 0 if scored is None else scored,
            labels,
            self,
            torch.is_grad_enabled(),
        )
        return DraftLossOutput(loss, agree, alpha, valid, each, label_prob)

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
        labels: Tensor | None = None,
        bias: LowRank | None = None,
    ) -> Swept:
        """The same for callers that run backward themselves: every row is scored, no graph is made.

        Args:
            need_hidden: whether to return the gradient of `hidden`; with `vocab` too it is complete (one all-reduce).
            d_head: [Vd, C] float32 (float64 for float64 inputs); the head's gradient is added to it, unless None.
            heads: what `prepare_heads` made of these heads, map and `vocab`, for callers that sweep them several times.
            labels: as for a call.
            bias: as for a call, with the buffers that its gradients are added to.
        """
        _check_shapes(hidden, head, teacher_hidden, teacher_head, weight, teacher_rows)
        self._check_more(hidden, head, labels, None if bias is None else (bias.rows, bias.table))
        if heads is None:
            heads = prepare_heads(head, teacher_head, d2t_target_ids, vocab, dtype=hidden.dtype)
        elif not heads.stand_for(head, teacher_head, vocab, hidden.dtype):
            raise ValueError("`heads` was made of other heads, of another split, or for hidden states of another dtype")
        scored = torch.ones_like(weight, dtype=torch.bool)
        return sweep(
            self, hidden, heads, teacher_hidden, weight, teacher_rows, scored,
            need_hidden=need_hidden, d_head=d_head, labels=labels, bias=bias,
        )  # fmt: skip

    def _check_more(
        self, hidden: Tensor, head: Tensor, labels: Tensor | None, bias: tuple[Tensor, Tensor] | None
    ) -> None:
        rows = hidden.shape[0]
        if self.needs_labels and labels is None:
            raise ConfigError(
                "this loss scores the rollout's own tokens, and this draft gives it none", found=type(self).__name__,
                needed="a loss on the policy's distribution", key="draft_loss",
            )  # fmt: skip
        if labels is not None and (labels.shape != (rows,) or labels.dtype != torch.int64):
            raise ValueError(f"need labels int64 [{rows}], got {labels.dtype} {tuple(labels.shape)}")
        if bias is not None:
            shapes = tuple(bias[0].shape), tuple(bias[1].shape)
            if list(map(len, shapes)) != [2, 2] or shapes != ((rows, shapes[1][1]), (head.shape[0], shapes[1][1])):
                raise ValueError(f"need bias ([{rows}, r], [{head.shape[0]}, r]), got {shapes[0]} and {shapes[1]}")


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
        bias_rows: Tensor | None,
        bias_table: Tensor | None,
        heads: Heads,
        teacher_hidden: Tensor,
        weight: Tensor,
        teacher_rows: Tensor | None,
        scored: Tensor,
        labels: Tensor | None,
        loss: DraftLoss,
        with_grad: bool,
    ) -> tuple[Tensor, ...]:
        dtype = heads.draft.dtype
        given = hidden, head, bias_rows, bias_table
        need_hidden, *need = (with_grad and ctx.needs_input_grad[n] for n in range(4))
        d_head, d_rows, d_table = (
            torch.zeros_like(tensor, dtype=dtype) if needed and tensor is not None else None
            for needed, tensor in zip(need, given[1:], strict=True)
        )
        bias = None
        if bias_rows is not None and bias_table is not None:
            bias = LowRank(bias_rows, bias_table, d_rows, d_table)
        out = sweep(
            loss, hidden, heads, teacher_hidden, weight, teacher_rows, scored,
            need_hidden=need_hidden, d_head=d_head, labels=labels, bias=bias,
        )  # fmt: skip
        ctx.save_for_backward(out.d_hidden, d_head, d_rows, d_table)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in given]
        ctx.mark_non_differentiable(out.each, out.agree, out.alpha, out.valid, out.label_prob)
        return out.total.to(dtype), out.each, out.agree, out.alpha, out.valid, out.label_prob

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if g is None else (g * upstream).to(dtype) for g, dtype in gradients), *(None,) * 8
