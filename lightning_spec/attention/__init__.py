"""Attention over packed documents: rotary embedding, causal trunk, branch. Knows torch and nothing of the project."""

from lightning_spec.attention.branch import branch_attention
from lightning_spec.attention.packed import packed_attention
from lightning_spec.attention.rope import RotaryEmbedding, apply_rotary

__all__ = ["RotaryEmbedding", "apply_rotary", "branch_attention", "packed_attention"]
