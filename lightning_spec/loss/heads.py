"""The two heads of a draft loss in the precision of its sums: converted once, read by every sweep of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spec.errors import ConfigError
from lightning_spec.loss.chunks import math_dtype, rows_per_chunk
from lightning_spec.loss.vocab import VocabShard


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """Constants of a micro-batch's sweeps, from `prepare_heads`. V and Vd are the rank's rows under `vocab`."""

    draft: Tensor
    """[Vd, C], the math dtype."""
    teacher: Tensor
    """[V, Ct], the same dtype."""
    ids: Tensor | None
    """[Vd] int64, the target id (of the whole vocabulary) of each row of `draft`; None: row v is token start + v."""
    columns: Tensor | None
    """[Vd] int64, the row of `teacher` that each of `ids` has."""
    vocab: VocabShard | None

    @property
    def start(self) -> int:
        """The token of the first row of `teacher`."""
        return 0 if self.vocab is None else self.vocab.start

    def names(self, rows: Tensor) -> Tensor:
        """Target ids of rows of `draft`, [n]. Without rows on this rank: anything, as it wins nowhere."""
        if self.ids is None:
            return rows + self.start
        return self.ids[rows] if self.ids.numel() else rows

    def stand_for(self, head: Tensor, teacher_head: Tensor, vocab: VocabShard | None, dtype: torch.dtype) -> bool:
        """Whether these can be what `prepare_heads` makes of the arguments, as far as shapes tell."""
        mine = self.draft.shape, self.teacher.shape, self.vocab, self.draft.dtype
        return mine == (head.shape, teacher_head.shape, vocab, _math_dtype(head, dtype))

    def chunk(self, mebibytes: float) -> int:
        """Rows whose logits fill `mebibytes` on a CPU; the same on every rank."""
        width = max(self.draft.shape[0], self.teacher.shape[0]) if self.vocab is None else self.vocab.width
        return rows_per_chunk(width, self.draft.dtype, self.draft.device, mebibytes=mebibytes)


def prepare_heads(
    head: Tensor,
    teacher_head: Tensor,
    d2t_target_ids: Tensor | None = None,
    vocab: VocabShard | None = None,
    *,
    dtype: torch.dtype,
) -> Heads:
    """Both heads in the math dtype (float64 if `head` or `dtype` is, else float32), without a graph.

    Heads that are the same memory, as a draft's borrowed one is, share one copy.

    Args:
        head: [Vd, C], the draft's.  teacher_head: [V, Ct], the policy's. With `vocab` the rank's rows of both.
        d2t_target_ids: [Vd] int64, the target id of each row of `head`; None: those of `teacher_head`.
        dtype: of the hidden states to be swept.

    Raises:
        ConfigError: vocabularies that do not match.
        ValueError: shapes that do not fit, or, with `vocab`, target ids that another rank has.
    """
    _check(head, teacher_head, d2t_target_ids, vocab)
    math = _math_dtype(head, dtype)
    draft = head.detach().to(math)
    teacher = draft if _same_memory(head, teacher_head) else teacher_head.detach().to(math)
    columns = d2t_target_ids
    if d2t_target_ids is not None and vocab is not None:
        columns = d2t_target_ids - vocab.start
        if columns.numel() and not 0 <= int(columns.min()) <= int(columns.max()) < vocab.rows:
            raise ValueError(
                f"this rank has the tokens [{vocab.start}, {vocab.stop}), got target ids "
                f"{int(d2t_target_ids.min())}..{int(d2t_target_ids.max())}: pass VocabShard.part of them"
            )
    return Heads(draft, teacher, d2t_target_ids, columns, vocab)


def _math_dtype(head: Tensor, dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(math_dtype(head), dtype)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def _check(head: Tensor, teacher_head: Tensor, ids: Tensor | None, vocab: VocabShard | None) -> None:
    if head.dim() != 2 or teacher_head.dim() != 2:
        raise ValueError(
            f"need head [Vd, C] and teacher_head [V, Ct], got {tuple(head.shape)} and {tuple(teacher_head.shape)}"
        )
    if vocab is not None and teacher_head.shape[0] != vocab.rows:
        raise ValueError(
            f"need rows [{vocab.start}, {vocab.stop}) of the teacher's head, got {teacher_head.shape[0]} rows"
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
