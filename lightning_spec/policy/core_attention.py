"""The attention between Megatron's qkv and output projections: rotary embedding and packed causal attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_spec.attention.packed import packed_attention
from lightning_spec.attention.ring import ring_attention
from lightning_spec.attention.rope import RotaryEmbedding, apply_rotary
from lightning_spec.attention.ulysses import ulysses_attention
from lightning_spec.attention.zigzag import Shard
from lightning_spec.errors import ConfigError

SplitAttention = Literal["ring", "ulysses"]
"""How ranks attend over documents whose rows they share: K/V travel, or heads are exchanged."""


class Attend(Protocol):
    """Causal attention of one micro-batch's documents: q [T, H, D], k and v [T, K, D] -> [T, H, D]."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Whole:
    """This rank holds every row."""

    lengths: tuple[int, ...]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        return packed_attention(q, k, v, self.lengths, scale=scale)


@dataclass(frozen=True, slots=True)
class Ring:
    """This rank holds a shard; keys and values go round."""

    shard: Shard

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        return ring_attention(q, k, v, self.shard, scale=scale)


@dataclass(frozen=True, slots=True)
class Ulysses:
    """This rank holds a shard; inside attention it has all rows of some heads."""

    shard: Shard

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        return ulysses_attention(q, k, v, self.shard, scale=scale)


@dataclass(frozen=True, slots=True)
class Padded:
    """Attention over the first `rows` rows; those behind them pad the micro-batch and come out as zeros.

    Idle rows are there because Megatron's reshapes want at least one row, and sequence parallelism as many on each
    rank. With no row at all this rank still takes its part in the others' attention.
    """

    attend: Attend
    rows: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        real = self.attend(q[: self.rows], k[: self.rows], v[: self.rows], scale)
        return torch.cat((real, torch.zeros_like(q[self.rows :])))


def attend_over(lengths: Sequence[int], shard: Shard | None, split: SplitAttention) -> Attend:
    """How this rank attends: `split` says how where its rows are a shard."""
    if shard is None:
        return Whole(tuple(lengths))
    return Ring(shard) if split == "ring" else Ulysses(shard)


@dataclass
class PackedDocuments(PackedSeqParams):
    """What the attention of every layer needs to know of one micro-batch; Megatron hands it down untouched.

    Nothing here is a parameter or carries a gradient, and Megatron closes over it when a layer is recomputed, so the
    same object serves forward, recomputed forward and any pipeline stage.
    """

    positions: Tensor | None = None
    """int64 [T], position inside the document of each row that this rank holds."""
    attend: Attend | None = None
    """Attention of these documents; one for all layers."""
    cos: Tensor | None = None
    """[T, rotary dims], of the model's dtype; one table serves all layers."""
    sin: Tensor | None = None

    @classmethod
    def of(cls, rope: RotaryEmbedding, positions: Tensor, attend: Attend, dtype: torch.dtype) -> PackedDocuments:
        """One micro-batch's documents, with rotary tables of `dtype`."""
        cos, sin = rope.cos_sin(positions, dtype)
        return cls(qkv_format="thd", positions=positions, attend=attend, cos=cos, sin=sin)


class PackedCoreAttention(MegatronModule):
    """Causal attention inside each document of a packed micro-batch, [T, H, D]; no T x T tensor on any device.

    RoPE is applied here and not by Megatron, whose tables follow a padded layout and know neither YaRN's attention
    factor nor a document's own positions. Query and key norms (Qwen3) have already run: they come before RoPE.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self":
            raise ConfigError("unsupported attention", found=attention_type, needed="self", key="model.policy")
        self.layer_number = layer_number
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [T, H, D], key and value [T, K, D] (Megatron drops the batch dimension of packed input) -> [T, H*D]."""
        if not isinstance(packed_seq_params, PackedDocuments):
            raise TypeError(f"the policy attends over PackedDocuments, not {type(packed_seq_params).__name__}")
        documents = packed_seq_params
        assert documents.attend is not None
        assert documents.cos is not None
        assert documents.sin is not None
        query = apply_rotary(query, documents.cos, documents.sin)
        key = apply_rotary(key, documents.cos, documents.sin)
        return documents.attend(query, key, value, self.scale).flatten(1)
