"""Which engine a micro-batch runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from lightning_spec.attention.cost import prefer
from lightning_spec.attention.ulysses import check_ulysses
from lightning_spec.draft.attention import LocalAttention, PassAttention, RingAttention, UlyssesAttention
from lightning_spec.draft.base import DraftInputs

if TYPE_CHECKING:
    from lightning_spec.draft.chained import ChainedDraft
    from lightning_spec.draft.plan import PassPlan

Mode = Literal["stream", "ring", "ulysses"]


def resolve_mode(draft: ChainedDraft, x: DraftInputs, plan: PassPlan) -> Mode:
    """The mode itself, or what `auto` takes for this micro-batch: the same on every rank that shares it. (What cannot
    fit is refused when training starts, not here.)"""
    if draft.attention != "auto":
        return draft.attention
    tokens, context = max(x.tokens.numel(), 1), 1 if x.shard is None else x.shard.size
    work = draft.work(tokens, plan.sizes[0], context, draft.dtype.itemsize)
    return prefer(work, draft.memory_limit)


class Heads(Protocol):
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...


def pass_attention(heads: Heads, x: DraftInputs, mode: Mode) -> PassAttention:
    """Attention of passes that run on all rows. Raises ConfigError where Ulysses cannot divide the heads."""
    shard = x.split
    if shard is None:
        return LocalAttention(x.lengths)
    if mode == "ring":
        return RingAttention(shard)
    check_ulysses(heads.num_heads, heads.num_kv_heads, shard.size, "draft_attention")
    return UlyssesAttention(shard)
