"""Which engine a micro-batch runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lightning_spec.attention.cost import DraftWork, prefer
from lightning_spec.attention.ulysses import check_ulysses
from lightning_spec.draft.attention import LocalAttention, PassAttention, RingAttention, UlyssesAttention
from lightning_spec.draft.base import DraftInputs

if TYPE_CHECKING:
    from lightning_spec.draft.eagle3 import Eagle3
    from lightning_spec.draft.plan import PassPlan

Mode = Literal["stream", "ring", "ulysses"]


def resolve_mode(draft: Eagle3, x: DraftInputs, plan: PassPlan) -> Mode:
    """The mode itself, or what `auto` takes for this micro-batch: the same on every rank that shares it. (What cannot
    fit is refused when training starts, not here.)"""
    if draft.attention != "auto":
        return draft.attention
    tokens, context = max(x.tokens.numel(), 1), 1 if x.shard is None else x.shard.size
    work = draft_work(draft, tokens, plan.sizes[0], context, draft.fc.weight.element_size())
    return prefer(work, draft.memory_limit)


def draft_work(draft: Eagle3, tokens: int, rows: int, context: int, bytes_per_element: int) -> DraftWork:
    """A micro-batch of `tokens` rows over `context` ranks, of which `rows` carry loss, as the memory model sees it."""
    config = draft.built()
    return DraftWork(
        tokens=tokens,
        context=context,
        passes=draft.num_passes,
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        vocabulary=config.draft_vocab_size,
        taps=len(config.aux_layer_ids),
        bytes_per_element=bytes_per_element,
        rows=rows,
        chunk_rows=draft.chunk_rows,
    )


def pass_attention(draft: Eagle3, x: DraftInputs, mode: Mode) -> PassAttention:
    """Attention of passes that run on all rows. Raises ConfigError where Ulysses cannot divide the heads."""
    shard = x.split
    if shard is None:
        return LocalAttention(x.lengths)
    if mode == "ring":
        return RingAttention(shard)
    check_ulysses(draft.built().num_heads, draft.built().num_kv_heads, shard.size, "draft_attention")
    return UlyssesAttention(shard)
