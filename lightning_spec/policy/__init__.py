"""The policy: a Megatron GPT built from a Hugging Face config, its weights both ways, and its taps."""

from lightning_spec.policy.checkpoint import export_policy, has_weights, load_policy
from lightning_spec.policy.config import new_policy_config
from lightning_spec.policy.model import PolicyModel, build_policy, embedding_weight, head_weight, policy_from_folder
from lightning_spec.policy.taps import TapRecorder, Taps
from lightning_spec.policy.weights import hf_gradients, hf_tensors, unwrap

__all__ = [
    "PolicyModel",
    "TapRecorder",
    "Taps",
    "build_policy",
    "embedding_weight",
    "export_policy",
    "has_weights",
    "head_weight",
    "hf_gradients",
    "hf_tensors",
    "load_policy",
    "new_policy_config",
    "policy_from_folder",
    "unwrap",
]
