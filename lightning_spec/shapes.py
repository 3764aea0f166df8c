"""What a draft, an engine and a check need to know of a policy: sizes, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_spec.errors import ConfigError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding as Hugging Face describes it. `scaling` is None or the rope_scaling / rope_parameters dict."""

    head_dim: int
    theta: float
    max_positions: int
    scaling: dict[str, Any] | None = None
    partial_factor: float = 1.0

    @property
    def rope_type(self) -> str:
        return str((self.scaling or {}).get("rope_type", "default"))


@dataclass(frozen=True, slots=True)
class PolicyShape:
    """Sizes of a dense decoder. All counts are of the whole model, never of one rank's shard."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    raw: dict[str, Any] = field(repr=False, hash=False, compare=False, default_factory=dict)
    """The config.json itself, kept for export."""

    @classmethod
    def from_file(cls, folder: str | Path, key: str = "model.policy.path") -> PolicyShape:
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ConfigError("no config.json", found=str(folder), needed="a folder with a config.json", key=key)
        return cls.from_hf(json.loads(path.read_text()), key=f"{path}")

    @classmethod
    def from_hf(cls, raw: dict[str, Any], key: str = "config.json") -> PolicyShape:
        """Read a Hugging Face config; accepts transformers 4 (`rope_theta`, `rope_scaling`) and 5
        (`rope_parameters`) spellings."""
        kind = raw.get("model_type")
        if kind not in SUPPORTED_MODEL_TYPES:
            raise ConfigError(
                "unsupported model family",
                found=kind,
                needed=f"one of {SUPPORTED_MODEL_TYPES}",
                key=f"{key}:model_type",
            )
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            value = raw.get(name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"bad {name}", found=value, needed="a positive integer", key=f"{key}:{name}")
        heads = raw["num_attention_heads"]
        # Absent fields have the family's defaults in transformers, which are not the same for all.
        kv_heads = raw.get("num_key_value_heads") or (heads if kind == "llama" else 32)
        if heads % kv_heads:
            raise ConfigError(
                "query heads do not divide into key/value heads",
                found=f"{heads} heads, {kv_heads} kv heads",
                needed="num_attention_heads a multiple of num_key_value_heads",
                key=f"{key}:num_key_value_heads",
            )
        head_dim = raw.get("head_dim") or (128 if kind == "qwen3" else raw["hidden_size"] // heads)
        if raw.get("use_sliding_window") and raw.get("sliding_window"):
            raise ConfigError(
                "sliding-window policies are not supported",
                found=raw["sliding_window"],
                needed="use_sliding_window: false",
                key=f"{key}:use_sliding_window",
            )
        if raw.get("hidden_act", "silu") != "silu":
            raise ConfigError("unsupported activation", found=raw["hidden_act"], needed="silu", key=f"{key}:hidden_act")
        rope = read_rope(raw, head_dim, key)
        return cls(
            model_type=kind,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=raw["intermediate_size"],
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(kind == "qwen2" or raw.get("attention_bias", False)),
            output_bias=bool(kind != "qwen2" and raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
            rope=rope,
            raw=dict(raw),
        )


def read_rope(raw: dict[str, Any], head_dim: int, key: str = "config.json") -> RopeConfig:
    """The rotary settings of a policy's or a draft's config.json, in either spelling of transformers."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if "type" in scaling and "rope_type" not in scaling:
        scaling["rope_type"] = scaling.pop("type")
    theta = float(scaling.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    partial = float(scaling.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0)
    kind = scaling.get("rope_type", "default")
    known = ("default", "linear", "llama3", "yarn")
    if kind not in known:
        raise ConfigError(
            "unsupported RoPE scaling", found=kind, needed=f"one of {known}", key=f"{key}:rope_parameters.rope_type"
        )
    return RopeConfig(
        head_dim=head_dim,
        theta=theta,
        max_positions=int(raw.get("max_position_embeddings", 2048)),
        scaling=scaling if kind != "default" else None,
        partial_factor=partial,
    )
