"""The pieces of a block drafter: a decoder layer over keys of the policy's states, and DSpark's two small heads.

Names and arithmetic are those of vLLM's qwen3_dflash.py and qwen3_dspark.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_spec.attention.rope import apply_rotary
from lightning_spec.draft.layers import MLP, Attention, Linear, RMSNorm

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [A, B, heads, D], k [A, B, kv_heads, D], v) of the blocks, rotated -> [A, B, heads, D]: attention of every
slot over the layer's trunk and the slots of its block."""


class BlockLayer(nn.Module):
    """A Qwen3 decoder layer. Its trunk keys are made of the fused policy states (they skip the input norm), so no
    activation of the draft enters them."""

    def __init__(
        self,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        inner: int,
        eps: float,
        dtype: torch.dtype,
        generator: torch.Generator,
        out_gain: float,
    ) -> None:
        super().__init__()
        self.self_attn = Attention(hidden, hidden, heads, kv_heads, head_dim, dtype, generator, out_gain, norm_eps=eps)
        self.mlp = MLP(hidden, inner, dtype, generator, out_gain)
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)

    def trunk(self, fused: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(k, v), [T, kv_heads, D] each, of the fused states [T, H]; k is rotated by cos, sin [T, rotary]."""
        return apply_rotary(self.self_attn.key(fused), cos, sin), self.self_attn.value(fused)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, number: int, attend: Attend) -> Tensor:
        """[A, B, H] of the slots' states [A, B, H]; cos, sin: [A * B, rotary]."""
        blocks, attention = hidden.shape[:2], self.self_attn
        c = self.input_layernorm(hidden).flatten(0, 1)
        q, k = (apply_rotary(x, cos, sin).unflatten(0, blocks) for x in (attention.query(c), attention.key(c)))
        attended = attend(number, q, k, attention.value(c).unflatten(0, blocks))
        y = hidden + attention.o_proj(attended.flatten(2))
        return y + self.mlp(self.post_attention_layernorm(y))


class MarkovHead(nn.Module):
    """A bias on a slot's logits from the token before it: markov_w2 @ markov_w1[token], of low rank r.

    A new one starts with markov_w2 = 0, i.e. without any bias.
    """

    def __init__(self, vocabulary: int, rank: int, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.markov_w1 = Linear(rank, vocabulary, dtype, generator)
        self.markov_w2 = Linear(rank, vocabulary, dtype, generator, gain=0.0)

    def embed(self, tokens: Tensor) -> Tensor:
        """[R, r] of int64 [R]."""
        return nn.functional.embedding(tokens, self.markov_w1.weight)

    def bias(self, embedded: Tensor) -> Tensor:
        """[R, V], what is added to the logits, of [R, r]."""
        return self.markov_w2(embedded)


class ConfidenceHead(nn.Module):
    """The chance that a slot's proposal is accepted, as a logit, from what the head reads (and the Markov embedding).
    Computed in float32 at least, as the engine does."""

    def __init__(self, hidden: int, rank: int, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.proj = Linear(hidden + rank, 1, dtype, generator, bias=True)
        self.with_markov = rank > 0

    def forward(self, normed: Tensor, markov: Tensor | None) -> Tensor:
        """[R] logits of the normed states [R, H] and the Markov embeddings [R, r] of the tokens before."""
        x = normed
        if self.with_markov:
            assert markov is not None
            x = torch.cat([normed, markov.to(normed.dtype)], -1)
        wide, bias = torch.promote_types(x.dtype, torch.float32), self.proj.bias
        assert bias is not None
        return nn.functional.linear(x.to(wide), self.proj.weight.to(wide), bias.to(wide)).squeeze(-1)
