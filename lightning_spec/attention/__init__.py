"""Attention over packed documents: rotary embedding, causal trunk, branch, and both on context-parallel ranks.

Knows torch and nothing of the project but its errors.
"""

from lightning_spec.attention.block import block_attention, moved_block_attention, ring_block_attention
from lightning_spec.attention.branch import branch_attention
from lightning_spec.attention.context import Context
from lightning_spec.attention.exchange import RowExchange, gather_rows, gather_rows_with_grad, reduce_scatter_rows
from lightning_spec.attention.packed import packed_attention
from lightning_spec.attention.ring import ring_attention, ring_branch_attention
from lightning_spec.attention.rope import RotaryEmbedding, apply_rotary
from lightning_spec.attention.ulysses import check_ulysses, ulysses_attention, ulysses_branch_attention
from lightning_spec.attention.zigzag import Shard, Zigzag

__all__ = [
    "Context",
    "RotaryEmbedding",
    "RowExchange",
    "Shard",
    "Zigzag",
    "apply_rotary",
    "block_attention",
    "branch_attention",
    "check_ulysses",
    "gather_rows",
    "gather_rows_with_grad",
    "moved_block_attention",
    "packed_attention",
    "reduce_scatter_rows",
    "ring_attention",
    "ring_block_attention",
    "ring_branch_attention",
    "ulysses_attention",
    "ulysses_branch_attention",
]
