"""The settings of an EAGLE-3 draft that the engine reads from its config.json, and the checks against the policy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lightning_spec.attention.rope import RotaryEmbedding
from lightning_spec.errors import ConfigError
from lightning_spec.shapes import PolicyShape, RopeConfig, read_rope

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
KEY = "model.draft.init_args"
Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes and switches. Every field is written to, and read from, the checkpoint in vLLM's spelling."""

    vocab_size: int
    """V, the policy's."""
    draft_vocab_size: int
    """Vd <= V."""
    hidden_size: int
    """H, the draft's."""
    policy_hidden_size: int
    """C, the policy's."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    aux_layer_ids: tuple[int, ...]
    own_head: bool
    own_embedding: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    def check(self, shape: PolicyShape, where: str = KEY) -> None:
        """Refuse a draft that does not fit the policy, or that the engine would serve differently."""

        def need(good: bool, what: str, found: object, needed: object, key: str) -> None:
            if not good:
                raise ConfigError(what, found=found, needed=needed, key=f"{where}.{key}" if where == KEY else where)

        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "max_positions"):
            need(getattr(self, name) > 0, f"bad {name} of the draft", getattr(self, name), "a positive number", name)
        need(self.num_layers <= 4, "too many draft layers", self.num_layers, "1 to 4", "num_layers")
        need(
            self.num_heads % self.num_kv_heads == 0,
            "the draft's query heads do not divide into its key/value heads",
            f"{self.num_heads} heads, {self.num_kv_heads} kv heads",
            "num_heads a multiple of num_kv_heads",
            "num_kv_heads",
        )
        need(
            self.vocab_size == shape.vocab_size,
            "the draft was made for another vocabulary",
            self.vocab_size,
            shape.vocab_size,
            "path",
        )
        need(
            0 < self.draft_vocab_size <= self.vocab_size,
            "the draft's vocabulary is not part of the policy's",
            self.draft_vocab_size,
            f"1..{self.vocab_size}",
            "draft_vocab_size",
        )
        need(
            self.policy_hidden_size == shape.hidden_size,
            "the draft was made for a policy of another width",
            self.policy_hidden_size,
            shape.hidden_size,
            "path",
        )
        need(
            self.own_embedding or self.hidden_size == shape.hidden_size,
            "a draft that borrows the policy's embedding must have its width",
            self.hidden_size,
            f"{shape.hidden_size}, or own_embedding: true",
            "hidden_size",
        )
        need(
            self.own_head or self.hidden_size == shape.hidden_size,
            "a draft that borrows the policy's head must have its width",
            self.hidden_size,
            f"{shape.hidden_size}, or own_head: true",
            "hidden_size",
        )
        need(
            self.own_head or self.draft_vocab_size == self.vocab_size,
            "a draft with a reduced vocabulary cannot borrow the policy's head",
            f"draft_vocab_size {self.draft_vocab_size} of {self.vocab_size}, own_head: false",
            "own_head: true",
            "own_head",
        )
        check_aux_layers(self.aux_layer_ids, shape.num_layers)

    def to_json(self) -> dict[str, Any]:
        """config.json as vLLM's llama_eagle3 and transformers' LlamaConfig read it."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.policy_hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_positions,
            **rope_json(self.rope),
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            "num_aux_hidden_states": len(self.aux_layer_ids),
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "norm_before_fc": self.norm_before_fc,
                "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            },
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any], names: Sequence[str], policy_layers: int, where: str) -> Eagle3Config:
        """Read a draft's config.json as vLLM reads it.

        Args:
            raw: its contents.
            names: tensor names of the checkpoint; they tell whether head and embedding are its own.
            policy_layers: L, for the aux layers that vLLM takes by default.
            where: the file, for errors.
        """

        def need(good: bool, what: str, found: object, needed: object, key: str) -> None:
            if not good:
                raise ConfigError(what, found=found, needed=needed, key=f"{where}:{key}")

        eagle = raw.get("eagle_config") or {}
        kind = (raw.get("architectures") or [None])[0]
        need(kind in ARCHITECTURES, "not an EAGLE-3 draft", kind, f"one of {ARCHITECTURES}", "architectures")
        for key, harmless in (
            ("attention_bias", (None, False)),
            ("mlp_bias", (None, False)),
            ("hidden_act", (None, "silu")),
            ("logit_scale", (None, 1, 1.0)),
            ("sliding_window", (None,)),
            ("quantization_config", (None,)),
        ):
            need(raw.get(key) in harmless, f"unsupported {key} of a draft", raw.get(key), harmless[-1], key)
        need(eagle.get("use_aux_hidden_state", True) is not False, "a draft without taps", False, True, "eagle_config")
        for key in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"):
            value = raw.get(key)
            need(isinstance(value, int) and value > 0, f"bad {key} of the draft", value, "a positive integer", key)
        heads = raw["num_attention_heads"]
        head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
        aux = raw.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
        aux_ids = tuple(sorted({int(i) for i in aux})) if aux else default_aux_layers(policy_layers)
        taps = raw.get("num_aux_hidden_states")
        need(taps in (None, len(aux_ids)), "aux layers do not match", taps, len(aux_ids), "num_aux_hidden_states")
        return cls(
            vocab_size=raw["vocab_size"],
            draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            policy_hidden_size=raw.get("target_hidden_size") or raw["hidden_size"],
            num_layers=raw.get("num_hidden_layers", 1),
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            intermediate_size=raw["intermediate_size"],
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            rope=read_rope(raw, head_dim, where),
            aux_layer_ids=aux_ids,
            own_head="lm_head.weight" in names,
            own_embedding="embed_tokens.weight" in names,
            norm_before_residual=bool(raw.get("norm_before_residual", False)),
            norm_before_fc=bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False))),
            fc_norm=bool(raw.get("fc_norm", False)),
            norm_output=bool(raw.get("norm_output", False)),
        )

    def same(self, other: Eagle3Config, where: str) -> None:
        """Raise ConfigError on the first field in which a checkpoint's config `other` differs from the built draft."""
        same_fields(self, other, where)


def same_fields(built: Any, found: Any, where: str) -> None:
    """Raise ConfigError on the first field in which two configs (dataclasses of one kind) differ.

    Args:
        built: of the draft.
        found: of the checkpoint in the file `where`.
    """
    for field in dataclasses.fields(built):
        mine, theirs = getattr(built, field.name), getattr(found, field.name)
        if mine != theirs:
            raise ConfigError(
                f"the checkpoint is of another draft ({field.name})",
                found=dataclasses.asdict(theirs) if isinstance(theirs, RopeConfig) else theirs,
                needed=dataclasses.asdict(mine) if isinstance(mine, RopeConfig) else mine,
                key=f"{where}:{field.name}",
            )


def agree(name: str, wanted: object, held: object, where: str, whose: str = "draft") -> None:
    """Raise ConfigError where a given argument is not what the checkpoint in the file `where` has."""
    if wanted != held:
        raise ConfigError(
            f"{name} contradicts the {whose}'s checkpoint",
            found=wanted,
            needed=f"{held} as in {where}, or null",
            key=f"{KEY}.{name}",
        )


def read_config(folder: str | Path) -> tuple[dict[str, Any], str]:
    """(contents, name for errors) of a draft folder's config.json."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(
            "no config.json of a draft", found=str(folder), needed="a folder with a config.json", key=f"{KEY}.path"
        )
    return json.loads(path.read_text()), str(path)


def lengthened(rope: RopeConfig, max_positions: int) -> RopeConfig:
    """The same rotation with another maximum. The original context length, on which scaled rotations depend, is written
    out where it was implied by the old maximum."""
    scaling = dict(rope.scaling) if rope.scaling else None
    if scaling is not None and rope.rope_type in ("llama3", "yarn"):
        scaling.setdefault("original_max_position_embeddings", rope.max_positions)
    return dataclasses.replace(rope, max_positions=max_positions, scaling=scaling)


def with_positions(config: Config, max_positions: int | None) -> Config:
    """A draft's config (a dataclass with `max_positions` and `rope`) with another maximum; None keeps its own."""
    if max_positions is None:
        return config
    rope = lengthened(config.rope, max_positions)  # type: ignore[attr-defined]
    return dataclasses.replace(config, max_positions=max_positions, rope=rope)  # type: ignore[type-var]


def rope_json(rope: RopeConfig) -> dict[str, Any]:
    """The rotary settings in a config.json, as transformers 4 and 5 spell them."""
    parameters: dict[str, Any] = {"rope_type": "default", **(rope.scaling or {}), "rope_theta": rope.theta}
    if rope.partial_factor != 1.0:
        parameters["partial_rotary_factor"] = rope.partial_factor
    return {"rope_theta": rope.theta, "rope_parameters": parameters}


def rotary(rope: RopeConfig, head_dim: int, max_positions: int) -> RotaryEmbedding:
    return RotaryEmbedding(head_dim, rope.theta, max_positions, rope.scaling, rope.partial_factor)


def policy_rope(shape: PolicyShape, head_dim: int, max_positions: int) -> RopeConfig:
    """The policy's rotary settings for a new draft."""
    return dataclasses.replace(lengthened(shape.rope, max_positions), head_dim=head_dim)


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The engine's default, (2, L//2, L-3). Raises ConfigError where a shallow policy makes them collide."""
    ids = (2, num_layers // 2, num_layers - 3)
    if len(set(ids)) < 3 or min(ids) < 0:
        raise ConfigError(
            f"a policy of {num_layers} layers is too shallow for the default aux layers (2, L//2, L-3)",
            found=list(ids),
            needed=f"explicit, distinct layers out of 0..{num_layers - 1}",
            key=f"{KEY}.aux_layer_ids",
        )
    return tuple(sorted(ids))


def check_aux_layers(ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Sorted ids, or ConfigError when they repeat (the engine drops repeats, and fc would not fit) or do not exist."""
    if not ids or len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= num_layers:
        raise ConfigError(
            "bad aux layers",
            found=list(ids),
            needed=f"distinct layers out of 0..{num_layers - 1}",
            key=f"{KEY}.aux_layer_ids",
        )
    return tuple(sorted(ids))
