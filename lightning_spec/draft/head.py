"""The rows of the draft's head that this rank scores: all, or those of its part of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_spec.draft.base import DraftInputs

if TYPE_CHECKING:
    from lightning_spec.draft.chained import ChainedDraft


@dataclass(frozen=True, slots=True)
class HeadPart:
    weight: Tensor
    """[n, H], with a graph where the head is the draft's own and is trained."""
    target_ids: Tensor | None
    """int64 [n], target ids; None: the draft has the policy's vocabulary, and so the policy's part of it."""
    rows: slice | Tensor | None
    """Which rows of the draft's own head these are; None where it borrows the policy's."""


def head_part(draft: ChainedDraft, x: DraftInputs) -> HeadPart:
    """Raises ValueError where the policy's head is not what `x.vocab` says."""
    ids, vocab = draft.target_ids(), x.vocab
    needed = draft.built().vocab_size if vocab is None else vocab.rows
    if x.policy_head.shape[0] != needed:
        raise ValueError(f"policy_head has {x.policy_head.shape[0]} rows, this rank's vocabulary {needed}")
    if draft.lm_head is None:
        return HeadPart(x.policy_head, None, None)
    weight = draft.lm_head.weight
    if vocab is None:
        return HeadPart(weight, ids, slice(0, weight.shape[0]))
    if ids is None:
        rows = slice(vocab.start, vocab.stop)
        return HeadPart(weight[rows], None, rows)
    part = vocab.part(ids)
    return HeadPart(weight.index_select(0, part), ids[part], part)
