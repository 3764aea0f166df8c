"""What a draft, an engine and a check need to know of a policy: sizes, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_spec.errors import ConfigError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")


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
class ExpertShape:
    """Mixture-of-experts layers: each token passes through `top_k` of `num_experts` gated MLPs."""

    num_experts: int
    """Experts of one sparse layer."""
    top_k: int
    intermediate_size: int
    """Of one expert."""
    norm_topk_prob: bool
    """Whether the weights of the chosen experts are scaled to sum to 1."""
    sparse_layers: tuple[bool, ...]
    """For each layer of the model, whether its MLP is a mixture of experts (else it is an ordinary one)."""


@dataclass(frozen=True, slots=True)
class PolicyShape:
    """Sizes of a decoder. All counts are of the whole model, never of one rank's shard."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Of an ordinary MLP layer; `experts` has its own."""
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    experts: ExpertShape | None = None
    """None in a dense decoder."""
    raw: dict[str, Any] = field(repr=False, hash=False, compare=False, default_factory=dict)
    """The config.json itself, kept for export."""

    def is_sparse(self, layer: int) -> bool:
        """Whether layer `layer` (0 .. num_layers - 1) is a mixture of experts."""
        return self.experts is not None and self.experts.sparse_layers[layer]

    def mlp_width(self, layer: int) -> int:
        """Intermediate values that one token has in this layer's MLP, over all experts that it passes through."""
        if self.experts is None or not self.is_sparse(layer):
            return self.intermediate_size
        return self.experts.top_k * self.experts.intermediate_size

    def layer_parameters(self, layer: int) -> int:
        """Parameters of this layer: attention, norms, MLP or all experts with their router."""
        hidden, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = hidden * (2 * q + 2 * kv) + self.attention_bias * (q + 2 * kv) + self.output_bias * hidden
        norms = 2 * hidden + self.qk_norm * 2 * self.head_dim
        if self.experts is not None and self.is_sparse(layer):
            mlp = self.experts.num_experts * hidden * (3 * self.experts.intermediate_size + 1)
        else:
            inner = self.intermediate_size
            mlp = 3 * hidden * inner + self.mlp_bias * (2 * inner + hidden)
        return attention + norms + mlp

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
            _positive(raw, name, key)
        heads = raw["num_attention_heads"]
        # Absent fields have the family's defaults in transformers, which are not the same for all.
        kv_heads = raw.get("num_key_value_heads") or {"llama": heads, "qwen3_moe": 4}.get(kind, 32)
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
            mlp_bias=bool(kind != "qwen3_moe" and raw.get("mlp_bias", False)),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            rope=rope,
            experts=read_experts(raw, key) if kind == "qwen3_moe" else None,
            raw=dict(raw),
        )


def _positive(raw: dict[str, Any], name: str, key: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"bad {name}", found=value, needed="a positive integer", key=f"{key}:{name}")
    return value


def read_experts(raw: dict[str, Any], key: str = "config.json") -> ExpertShape | None:
    """The mixture-of-experts settings of a qwen3_moe config.json; None where every layer is an ordinary MLP.

    The number of experts is `num_experts`, which transformers 5 writes as `num_local_experts`. The router's auxiliary
    load-balancing loss is not computed, whatever `router_aux_loss_coef` says (transformers adds it only with
    `output_router_logits`): it is not a sum over tokens, so it would make results depend on how a step is cut into
    micro-batches and spread over ranks.

    Raises:
        ConfigError: counts that no router can have, shared experts, or a config that asks for the auxiliary loss.
    """
    for name in ("shared_expert_intermediate_size", "n_shared_experts"):
        if raw.get(name):
            raise ConfigError(
                "shared experts are not supported", found=f"{name}: {raw[name]}", needed="none", key=f"{key}:{name}"
            )
    if raw.get("output_router_logits"):
        raise ConfigError(
            "the router's auxiliary loss is not supported: it would make results depend on the micro-batches",
            found="output_router_logits: true",
            needed="output_router_logits: false",
            key=f"{key}:output_router_logits",
        )
    named = "num_experts" if "num_experts" in raw else "num_local_experts"
    sparse = _sparse_layers(raw, key)
    if raw.get(named) == 0 or not any(sparse):
        return None
    count = _positive(raw, named, key)
    top_k = _positive({"num_experts_per_tok": 8, **raw}, "num_experts_per_tok", key)
    if top_k > count:
        raise ConfigError(
            "a token cannot have more experts than there are",
            found=f"{top_k} of {count}",
            needed=f"at most {count}",
            key=f"{key}:num_experts_per_tok",
        )
    return ExpertShape(
        num_experts=count,
        top_k=top_k,
        intermediate_size=_positive({"moe_intermediate_size": 768, **raw}, "moe_intermediate_size", key),
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        sparse_layers=sparse,
    )


def _sparse_layers(raw: dict[str, Any], key: str) -> tuple[bool, ...]:
    """Layer i is a mixture of experts if `decoder_sparse_step` divides i + 1 and `mlp_only_layers` has no i."""
    layers = raw["num_hidden_layers"]
    step = _positive({"decoder_sparse_step": 1, **raw}, "decoder_sparse_step", key)
    dense = raw.get("mlp_only_layers") or []
    if any(not isinstance(layer, int) or not 0 <= layer < layers for layer in dense):
        raise ConfigError(
            "bad mlp_only_layers", found=dense, needed=f"layers from 0 to {layers - 1}", key=f"{key}:mlp_only_layers"
        )
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


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
