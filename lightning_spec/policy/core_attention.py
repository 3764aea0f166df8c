"""The attention between Megatron's qkv and output projections: rotary embedding and packed causal attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_spec.attention.packed import packed_attention
from lightning_spec.attention.rope import RotaryEmbedding, apply_rotary
from lightning_spec.errors import ConfigError


@dataclass
class PackedDocuments(PackedSeqParams):
    """What the attention of every layer needs to know of one micro-batch; Megatron hands it down untouched.

    Nothing here is a parameter or carries a gradient, and Megatron closes over it when a layer is recomputed, so the
    same object serves forward, recomputed forward and any pipeline stage.
    """

    positions: Tensor | None = None
    """int64 [T], position inside the document."""
    lengths: tuple[int, ...] = ()
    """Rows of each document; they sum to T."""
    cos: Tensor | None = None
    """[T, rotary dims], of the model's dtype; one table serves all layers."""
    sin: Tensor | None = None

    @classmethod
    def of(
        cls, rope: RotaryEmbedding, positions: Tensor, lengths: Sequence[int], dtype: torch.dtype
    ) -> PackedDocuments:
        """One micro-batch's documents, with rotary tables of `dtype`."""
        cos, sin = rope.cos_sin(positions, dtype)
        return cls(qkv_format="thd", positions=positions, lengths=tuple(lengths), cos=cos, sin=sin)


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
        assert documents.cos is not None
        assert documents.sin is not None
        query = apply_rotary(query, documents.cos, documents.sin)
        key = apply_rotary(key, documents.cos, documents.sin)
        attended = packed_attention(query, key, value, documents.lengths, scale=self.scale)
        return attended.flatten(1)
