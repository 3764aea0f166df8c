"""The pieces of a Llama-like draft: linear map, RMS norm, and a decoder layer split where branch attention sits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T (+ b) with `weight` [out, in], drawn from the given generator (torch's own draws from the global one).
    A `bias` starts at 0."""

    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        dtype: torch.dtype,
        generator: torch.Generator,
        gain: float = 1.0,
        bias: bool = False,
    ):
        super().__init__()
        weight = torch.randn(outputs, inputs, generator=generator) * (gain * inputs**-0.5)
        self.weight = nn.Parameter(weight.to(dtype))
        self.register_parameter("bias", nn.Parameter(torch.zeros(outputs, dtype=dtype)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; statistics in float32 (float64 for float64)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class Attention(nn.Module):
    """The four projections, under the engine's names.

    Args:
        inputs: width of what is attended from; `hidden`: of the result.
        bias: of the q, k and v projections (Qwen2).  out_bias: of the output projection.
        norm_eps: of RMS norms over each head's q and k (Qwen3); None: there are none.
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        generator: torch.Generator,
        out_gain: float,
        bias: bool = False,
        norm_eps: float | None = None,
        out_bias: bool = False,
    ):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = Linear(inputs, heads * head_dim, dtype, generator, bias=bias)
        self.k_proj = Linear(inputs, kv_heads * head_dim, dtype, generator, bias=bias)
        self.v_proj = Linear(inputs, kv_heads * head_dim, dtype, generator, bias=bias)
        self.o_proj = Linear(heads * head_dim, hidden, dtype, generator, out_gain, bias=out_bias)
        self.q_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps, dtype)
        self.k_norm = None if norm_eps is None else RMSNorm(head_dim, norm_eps, dtype)

    def query(self, c: Tensor) -> Tensor:
        """[R, heads, head_dim], not rotated."""
        q = self.q_proj(c).view(-1, self.heads, self.head_dim)
        return q if self.q_norm is None else self.q_norm(q)

    def key(self, c: Tensor) -> Tensor:
        """[R, kv_heads, head_dim], not rotated."""
        k = self.k_proj(c).view(-1, self.kv_heads, self.head_dim)
        return k if self.k_norm is None else self.k_norm(k)

    def value(self, c: Tensor) -> Tensor:
        return self.v_proj(c).view(-1, self.kv_heads, self.head_dim)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        dtype: torch.dtype,
        generator: torch.Generator,
        out_gain: float,
        bias: bool = False,
    ):
        super().__init__()
        self.gate_proj = Linear(hidden, inner, dtype, generator, bias=bias)
        self.up_proj = Linear(hidden, inner, dtype, generator, bias=bias)
        self.down_proj = Linear(inner, hidden, dtype, generator, out_gain, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PassLayer(nn.Module):
    """A decoder layer, split where the attention of a pass sits: `enter`, attention, `leave`. What a draft reads enters
    the first of its layers."""

    self_attn: Attention
    mlp: MLP
    post_attention_layernorm: RMSNorm

    def enter(self, hidden: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """(what q, k and v are made from, residual [R, H]) of the recycled or previous layer's hidden [R, H] and the
        input embedding [R, H]."""
        raise NotImplementedError

    def leave(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The layer's output [R, H] from the attention's [R, heads, head_dim]."""
        y = residual + self.self_attn.o_proj(attended.flatten(1))
        return y + self.mlp(self.post_attention_layernorm(y))


class DecoderLayer(PassLayer):
    """One layer. The first one reads [norm(embedding) ; norm(hidden)], the others their predecessor's output alone
    (vLLM's llama_eagle3.py): a plain layer of Llama, or with biases and norms of q and k of one of its relatives."""

    def __init__(
        self,
        *,
        first: bool,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        inner: int,
        eps: float,
        norm_before_residual: bool,
        dtype: torch.dtype,
        generator: torch.Generator,
        out_gain: float,
        bias: bool = False,
        out_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
    ):
        super().__init__()
        self.first, self.norm_before_residual = first, norm_before_residual
        width = 2 * hidden if first else hidden
        self.self_attn = Attention(
            width,
            hidden,
            heads,
            kv_heads,
            head_dim,
            dtype,
            generator,
            out_gain,
            bias=bias,
            norm_eps=eps if qk_norm else None,
            out_bias=out_bias,
        )
        self.mlp = MLP(hidden, inner, dtype, generator, out_gain, bias=mlp_bias)
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        if first:
            self.hidden_norm = RMSNorm(hidden, eps, dtype)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)

    def enter(self, hidden: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input [R, 2H or H], residual [R, H]) from the recycled or previous layer's hidden [R, H]."""
        if not self.first:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat((self.input_layernorm(embedding), normed), -1), residual
