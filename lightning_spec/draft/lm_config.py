"""Sizes of a draft that is a small language model: a Hugging Face folder's, or a new one's, checked against policy and
engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_spec.draft.config import KEY, agree, policy_rope, read_config, rope_json, same_fields, with_positions
from lightning_spec.errors import ConfigError
from lightning_spec.shapes import PolicyShape

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
FIELDS = {
    "model_type": "model_type",
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_heads",
    "num_kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "tie_embeddings": "tied_embeddings",
}
"""Arguments of `DraftModel` and the fields of `PolicyShape` that they are about; `max_positions` is apart."""
_SIZES = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_positions")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_WRITTEN_ANEW = ("torch_dtype", "dtype", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")


def new_lm(given: Mapping[str, Any], policy: PolicyShape) -> PolicyShape:
    """Sizes of a new draft: what is not given follows the policy, but for 2 layers and a dense family.

    Args:
        given: arguments by name, None where left out.

    Raises:
        ConfigError: sizes that no model has, or that do not fit the policy.
    """
    asked = {name: value for name, value in given.items() if value is not None}
    for name in _SIZES:
        if asked.get(name, 1) < 1:
            raise ConfigError(f"bad {name} of the draft", found=asked[name], needed="at least 1", key=f"{KEY}.{name}")
    family = asked.get("model_type") or _dense_family(policy.model_type)
    if family not in ARCHITECTURES:
        raise ConfigError(
            "unknown family of a draft", found=family, needed=f"one of {tuple(ARCHITECTURES)}", key=f"{KEY}.model_type"
        )
    hidden, heads = asked.get("hidden_size", policy.hidden_size), asked.get("num_heads", policy.num_heads)
    kv_heads = asked.get("num_kv_heads", policy.num_kv_heads)
    if heads % kv_heads:
        raise ConfigError(
            "the draft's query heads do not divide into its key/value heads",
            found=f"{heads} heads, {kv_heads} kv heads",
            needed="num_heads a multiple of num_kv_heads",
            key=f"{KEY}.num_kv_heads",
        )
    head_dim = asked.get("head_dim") or (hidden // heads if family == "qwen2" else policy.head_dim)
    longest = asked.get("max_positions", policy.max_positions)
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": policy.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": asked.get("intermediate_size", policy.intermediate_size),
        "num_hidden_layers": asked.get("num_layers", 2),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": policy.norm_eps,
        "max_position_embeddings": longest,
        "tie_word_embeddings": asked.get("tie_embeddings", policy.tied_embeddings),
        # Absent ones have defaults in transformers that may lie outside of the vocabulary.
        **{name: policy.raw.get(name) for name in _TOKENS},
        **rope_json(policy_rope(policy, head_dim, longest)),
    }
    if family != "qwen2":
        raw["attention_bias"] = False
    if family == "llama":
        raw["mlp_bias"] = False
    return _checked(PolicyShape.from_hf(raw, KEY), policy, KEY)


def stored_lm(path: str, given: Mapping[str, Any], policy: PolicyShape) -> PolicyShape:
    """Sizes of the model in a Hugging Face folder; arguments that were given must agree with it, but for
    `max_positions`, which replaces its own.

    Raises:
        ConfigError: no such model, another family, or sizes that contradict an argument or do not fit the policy.
    """
    found, where = read_lm(path)
    for name, field in FIELDS.items():
        if given.get(name) is not None:
            agree(name, given[name], getattr(found, field), where)
    longest = given.get("max_positions")
    if longest is not None and longest < 1:
        raise ConfigError("bad max_positions", found=longest, needed="at least 1", key=f"{KEY}.max_positions")
    return _checked(with_positions(found, longest), policy, where)


def read_lm(folder: str) -> tuple[PolicyShape, str]:
    """(sizes, name for errors) of a folder's config.json. Raises ConfigError where it is not a dense model of a known
    family, or is quantised."""
    raw, where = read_config(folder)
    if raw.get("model_type") not in ARCHITECTURES:
        raise ConfigError(
            "unsupported family of a draft",
            found=raw.get("model_type"),
            needed=f"one of {tuple(ARCHITECTURES)}",
            key=f"{where}:model_type",
        )
    if raw.get("quantization_config"):
        raise ConfigError(
            "a quantised draft cannot be trained",
            found="quantization_config",
            needed="float weights",
            key=f"{where}:quantization_config",
        )
    return PolicyShape.from_hf(raw, where), where


def same(built: PolicyShape, found: PolicyShape, where: str) -> None:
    """Raise ConfigError on the first size in which a checkpoint differs from the built draft."""
    same_fields(dataclasses.replace(built, raw={}), dataclasses.replace(found, raw={}), where)


def to_json(shape: PolicyShape, dtype: str | None = None) -> dict[str, Any]:
    """config.json as transformers and vLLM read it: that of the checkpoint, or the new one.

    Args:
        dtype: of the tensors, as transformers names it ("bfloat16").
    """
    kept = {name: value for name, value in shape.raw.items() if name not in _WRITTEN_ANEW}
    kept |= {"max_position_embeddings": shape.max_positions, **rope_json(shape.rope)}
    kept.setdefault("architectures", [ARCHITECTURES[shape.model_type]])
    return kept if dtype is None else {**kept, "dtype": dtype}


def _dense_family(family: str) -> str:
    """The dense family that a policy's own is closest to."""
    return "qwen3" if family == "qwen3_moe" else family if family in ARCHITECTURES else "llama"


def _checked(shape: PolicyShape, policy: PolicyShape, where: str) -> PolicyShape:
    """The shape, once it is known to fit the policy, and that the engine computes it as its family does."""
    key = f"{KEY}.path" if where == KEY else where
    if shape.vocab_size != policy.vocab_size:
        raise ConfigError(
            "the draft was made for another vocabulary",
            found=shape.vocab_size,
            needed=policy.vocab_size,
            key=f"{key}:vocab_size",
        )
    if shape.model_type == "qwen2" and shape.head_dim * shape.num_heads != shape.hidden_size:
        # vLLM's Qwen2 does not read head_dim.
        raise ConfigError(
            "the engine's Qwen2 has heads of hidden_size / num_heads",
            found=f"head_dim {shape.head_dim}, {shape.num_heads} heads, hidden_size {shape.hidden_size}",
            needed=f"head_dim {shape.hidden_size / shape.num_heads:g}, or another model_type",
            key=f"{KEY}.head_dim" if where == KEY else f"{where}:head_dim",
        )
    if shape.model_type == "qwen3" and shape.output_bias:
        raise ConfigError(
            "the engine's Qwen3 has no bias in o_proj",
            found="attention_bias: true",
            needed="attention_bias: false",
            key=f"{where}:attention_bias",
        )
    return shape
