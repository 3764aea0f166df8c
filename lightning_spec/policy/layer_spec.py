"""One Megatron layer spec for CPU and GPU: Megatron's own layers and projections, our norm and core attention."""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from lightning_spec.policy.core_attention import PackedCoreAttention
from lightning_spec.policy.moe import moe_spec
from lightning_spec.policy.norm import RMSNorm
from lightning_spec.shapes import PolicyShape


class BiasedColumnLinear(ColumnParallelLinear):
    """Megatron has one switch for all biases; Llama's `mlp_bias` and `attention_bias` are two."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


class BiasedRowLinear(RowParallelLinear):
    """As BiasedColumnLinear, for the projections back to the residual stream."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


def layer_spec(shape: PolicyShape, layer: int = 0) -> ModuleSpec:
    """The spec of decoder layer `layer` (0 .. num_layers - 1 of the whole model) of this family."""
    norm_of_head = RMSNorm if shape.qk_norm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=PackedCoreAttention,
        linear_proj=BiasedRowLinear if shape.output_bias else RowParallelLinear,
        q_layernorm=norm_of_head,
        k_layernorm=norm_of_head,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp_spec(shape, layer),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def mlp_spec(shape: PolicyShape, layer: int) -> ModuleSpec:
    """A mixture of experts or an ordinary gated MLP."""
    if shape.experts is not None and shape.is_sparse(layer):
        return moe_spec(shape.experts)
    linear = MLPSubmodules(
        linear_fc1=BiasedColumnLinear if shape.mlp_bias else ColumnParallelLinear,
        linear_fc2=BiasedRowLinear if shape.mlp_bias else RowParallelLinear,
    )
    return ModuleSpec(module=MLP, submodules=linear)


def block_spec(
    shape: PolicyShape, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (of its chunk `vp_stage` under virtual stages), and the final norm."""
    first = get_transformer_layer_offset(config, vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage))
    return TransformerBlockSubmodules(layer_specs=[layer_spec(shape, one) for one in layers], layer_norm=RMSNorm)
