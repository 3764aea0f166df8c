"""From a policy's sizes to Megatron's configuration, and a config.json for a policy that starts from nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_spec.errors import ConfigError
from lightning_spec.policy.moe import expert_options
from lightning_spec.shapes import SUPPORTED_MODEL_TYPES, PolicyShape

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def megatron_config(shape: PolicyShape, dtype: torch.dtype = torch.float32, **options: Any) -> TransformerConfig:
    """Megatron's configuration of a policy.

    Args:
        shape: the policy's sizes.
        dtype: of parameters and activations: float32, float64 (parity tests) or bfloat16.
        options: further fields of Megatron's TransformerConfig, by their own names: parallel sizes, sequence_parallel,
            recompute_*, pipeline settings, calculate_per_token_loss, deterministic_mode ...

    Fused kernels stay off unless asked for: they need CUDA extensions, or compile at the first call.
    `variable_seq_lengths` and the alltoall dispatcher are on because packed micro-batches differ in length, and
    Megatron refuses the first without the second even in a dense model.

    Raises:
        ConfigError: an option that Megatron does not have, or that config.json decides.
    """
    if dtype not in DTYPES:
        raise ConfigError("unsupported dtype", found=dtype, needed=f"one of {DTYPES}", key="model.dtype")
    fixed: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.intermediate_size,
        "layernorm_epsilon": shape.norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": shape.qk_norm,
        "add_bias_linear": False,  # which projections have one differs by family: the layer spec decides
        "add_qkv_bias": shape.attention_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        # Without Megatron's own initialisation the parameters lack the attributes that its gradient norm reads under
        # tensor parallelism (a wrong norm, no error). It runs, but writes zeros: the values come from
        # weights.initialize or from a checkpoint, and never depend on the layout or the device.
        "perform_initialization": True,
        "use_cpu_initialization": True,
        "init_method": _zeros,
        "output_layer_init_method": _zeros,
        "embedding_init_method": _zeros,
        **expert_options(shape),
    }
    defaults: dict[str, Any] = {
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "expert_tensor_parallel_size": 1,
        "pipeline_dtype": dtype,
        "cuda_graph_scope": [],
    }
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(
                "unknown Megatron option", found=name, needed="a field of TransformerConfig", key=f"megatron.{name}"
            )
        if name in fixed or name.startswith("moe_router_"):
            raise ConfigError(
                "a Megatron option that the policy's config.json decides",
                found=f"{name}={value!r}",
                needed="no such entry",
                key=f"megatron.{name}",
            )
    return TransformerConfig(**{**defaults, **options, **fixed})


def _zeros(weight: Tensor) -> Tensor:
    return torch.nn.init.zeros_(weight)


def new_policy_config(
    model_type: str = "llama",
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    max_positions: int = 2048,
    rope_theta: float = 10000.0,
    norm_eps: float = 1e-6,
    tied_embeddings: bool = True,
    initializer_range: float = 0.02,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    num_experts: int | None = None,
    experts_per_token: int = 2,
    expert_intermediate_size: int | None = None,
    norm_topk_prob: bool = True,
    mlp_only_layers: Sequence[int] = (),
) -> dict[str, Any]:
    """The config.json of a policy that starts from random weights. A folder that holds it alone is a valid policy.

    Defaults: as many kv heads as heads, head_dim = hidden / heads, intermediate = 8/3 hidden rounded up to 64.

    Args:
        num_experts, experts_per_token, expert_intermediate_size, norm_topk_prob, mlp_only_layers: of a qwen3_moe
            policy, which must have `num_experts`; an expert's default size gives all of a token's experts together
            `intermediate_size`.

    Raises:
        ConfigError: sizes that no policy can have.
    """
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            "unsupported model family", found=model_type, needed=f"one of {SUPPORTED_MODEL_TYPES}", key="model_type"
        )
    if head_dim is None and hidden_size % num_heads:
        raise ConfigError(
            "heads do not divide the hidden size",
            found=f"hidden {hidden_size}, {num_heads} heads",
            needed="hidden_size a multiple of num_heads, or a head_dim of its own",
            key="head_dim",
        )
    if (model_type == "qwen3_moe") != (num_experts is not None):
        raise ConfigError(
            "a mixture-of-experts policy needs experts, and no other has any",
            found=f"model_type {model_type}, num_experts {num_experts}",
            needed="num_experts with model_type qwen3_moe only",
            key="num_experts",
        )
    inner = intermediate_size or -(-8 * hidden_size // 3 // 64) * 64
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads or num_heads,
        "head_dim": head_dim or hidden_size // num_heads,
        "intermediate_size": inner,
        "max_position_embeddings": max_positions,
        "rope_theta": rope_theta,
        "rms_norm_eps": norm_eps,
        "tie_word_embeddings": tied_embeddings,
        "initializer_range": initializer_range,
        "hidden_act": "silu",
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "dtype": "float32",
    }
    if num_experts is not None:
        raw |= {
            "num_experts": num_experts,
            "num_experts_per_tok": experts_per_token,
            "moe_intermediate_size": expert_intermediate_size or max(1, inner // experts_per_token),
            "norm_topk_prob": norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(mlp_only_layers),
        }
    PolicyShape.from_hf(raw, key="new_policy_config")
    return raw
