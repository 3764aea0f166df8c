"""The policy: a Megatron GPT built from a Hugging Face config, its weights both ways in any layout, and its taps."""

from lightning_spec.policy.checkpoint import export_policy, has_weights, load_policy, write_policy
from lightning_spec.policy.config import new_policy_config
from lightning_spec.policy.initial import initial_weight
from lightning_spec.policy.model import (
    Policy,
    PolicyChunks,
    PolicyModel,
    build_policy,
    embedding_weight,
    head_weight,
    policy_from_folder,
    vocab_shard,
)
from lightning_spec.policy.source import PolicySource
from lightning_spec.policy.stage import check_layout, parallel_options, stage_layers
from lightning_spec.policy.taps import TapParts, TapRecorder, Taps, check_layer_ids, tap_owner
from lightning_spec.policy.weights import (
    chunks,
    hf_gradients,
    hf_tensors,
    local_gradients,
    local_tensors,
    named_parameters,
    placements,
    tensor_shapes,
    unwrap,
)

__all__ = [
    "Policy",
    "PolicyChunks",
    "PolicyModel",
    "PolicySource",
    "TapParts",
    "TapRecorder",
    "Taps",
    "build_policy",
    "check_layer_ids",
    "check_layout",
    "chunks",
    "embedding_weight",
    "export_policy",
    "has_weights",
    "head_weight",
    "hf_gradients",
    "hf_tensors",
    "initial_weight",
    "load_policy",
    "local_gradients",
    "local_tensors",
    "named_parameters",
    "new_policy_config",
    "parallel_options",
    "placements",
    "policy_from_folder",
    "stage_layers",
    "tap_owner",
    "tensor_shapes",
    "unwrap",
    "vocab_shard",
    "write_policy",
]
