"""The settings of an MTP head in MiMo's format, and the checks against the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_spec.draft.config import KEY, agree, policy_rope, read_config, rope_json, same_fields, with_positions
from lightning_spec.errors import ConfigError
from lightning_spec.shapes import PolicyShape, RopeConfig, read_rope

ARCHITECTURE = "MiMoForCausalLM"
"""Of a MiMo policy, which carries its head; vLLM tells the head's model by it, whatever the model_type."""
Reads = Literal["normed", "residual"]
READS = ("normed", "residual")


@dataclass(frozen=True, slots=True)
class MTPConfig:
    """One layer of Qwen2, of the policy's width. Biases of q, k and v are part of it."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    reads: Reads
    """Which states of the policy: after its final norm, or the residual stream before it."""

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size

    @property
    def num_layers(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        """The engine's Qwen2 knows no other."""
        return self.hidden_size // self.num_heads

    def check(self, shape: PolicyShape, where: str = KEY) -> None:
        """Refuse a head that does not fit the policy, or that the engine would serve differently."""

        def need(good: bool, what: str, found: object, needed: object, key: str) -> None:
            if not good:
                raise ConfigError(what, found=found, needed=needed, key=f"{where}.{key}" if where == KEY else where)

        for name in ("num_heads", "num_kv_heads", "intermediate_size", "max_positions"):
            need(getattr(self, name) > 0, f"bad {name} of the MTP head", getattr(self, name), "a positive number", name)
        need(
            self.vocab_size == shape.vocab_size,
            "the MTP head was made for another vocabulary",
            self.vocab_size,
            shape.vocab_size,
            "path",
        )
        need(
            self.hidden_size == shape.hidden_size,
            "the MTP head was made for a policy of another width",
            self.hidden_size,
            shape.hidden_size,
            "path",
        )
        need(
            self.hidden_size % (2 * self.num_heads) == 0,
            "the width of an MTP head does not divide into its heads",
            f"{self.hidden_size} over {self.num_heads} heads",
            "an even size of each head",
            "num_heads",
        )
        need(
            self.num_heads % self.num_kv_heads == 0,
            "the MTP head's query heads do not divide into its key/value heads",
            f"{self.num_heads} heads, {self.num_kv_heads} kv heads",
            "num_heads a multiple of num_kv_heads",
            "num_kv_heads",
        )

    def to_json(self) -> dict[str, Any]:
        """config.json as vLLM reads it. `model_type` is that of the layer: transformers has no mimo."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen2",
            "num_nextn_predict_layers": 1,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_positions,
            **rope_json(self.rope),
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "mtp_reads": self.reads,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], reads: Reads, where: str) -> MTPConfig:
        """Read the config.json of a head, or of a MiMo policy that carries one, as vLLM reads it.

        Args:
            raw: its contents.
            reads: where it does not say.
            where: the file, for errors.
        """

        def need(good: bool, what: str, found: object, needed: object, key: str) -> None:
            if not good:
                raise ConfigError(what, found=found, needed=needed, key=f"{where}:{key}")

        kind = (raw.get("architectures") or [None])[0]
        need(kind == ARCHITECTURE, "not an MTP head in MiMo's format", kind, ARCHITECTURE, "architectures")
        for key, harmless in (
            ("hidden_act", (None, "silu")),
            ("use_sliding_window", (None, False)),
            ("dual_chunk_attention_config", (None,)),
            ("quantization_config", (None,)),
            ("mtp_reads", (None, *READS)),
        ):
            need(raw.get(key) in harmless, f"unsupported {key} of an MTP head", raw.get(key), harmless[-1], key)
        for key in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"):
            value = raw.get(key)
            need(isinstance(value, int) and value > 0, f"bad {key} of the MTP head", value, "a positive integer", key)
        layers = raw.get("num_nextn_predict_layers")
        need(isinstance(layers, int) and layers > 0, "no MTP layer", layers, "at least 1", "num_nextn_predict_layers")
        heads = raw["num_attention_heads"]
        head_dim = raw["hidden_size"] // heads
        need(
            raw.get("head_dim") in (None, head_dim),
            "the engine's MTP head has no head size of its own",
            raw.get("head_dim"),
            head_dim,
            "head_dim",
        )
        nested = raw.get("rope_parameters") or {}
        # transformers and the engine have other defaults.
        need("rope_theta" in raw or "rope_theta" in nested, "no rope_theta", None, "a number", "rope_theta")
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            intermediate_size=raw["intermediate_size"],
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings", 32768)),
            rope=read_rope(dict(raw), head_dim, where),
            reads=raw.get("mtp_reads") or reads,
        )

    def same(self, other: MTPConfig, where: str) -> None:
        """Raise ConfigError on the first field in which a checkpoint's config `other` differs from the built head."""
        same_fields(self, other, where)


def engine_reads(shape: PolicyShape) -> Reads:
    """What the engine gives an MTP head: its MiMo returns the residual stream, the other models normed states."""
    return "residual" if shape.model_type == "mimo" else "normed"


def new_config(given: Mapping[str, Any], shape: PolicyShape) -> MTPConfig:
    """Of a new head. `given`: arguments by field name, None where left out."""
    asked = {name: value for name, value in given.items() if value is not None}
    heads = asked.get("num_heads", shape.num_heads)
    longest = asked.get("max_positions", shape.max_positions)
    return MTPConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_heads=heads,
        num_kv_heads=asked.get("num_kv_heads", shape.num_kv_heads),
        intermediate_size=asked.get("intermediate_size", shape.intermediate_size),
        norm_eps=shape.norm_eps,
        max_positions=longest,
        rope=policy_rope(shape, shape.hidden_size // max(heads, 1), longest),
        reads=asked.get("reads", engine_reads(shape)),
    )


def checkpoint_config(path: str, given: Mapping[str, Any], shape: PolicyShape) -> MTPConfig:
    """Of the head in a folder; arguments that were given must agree with it."""
    raw, where = read_config(path)
    config = MTPConfig.from_json(raw, given.get("reads") or engine_reads(shape), where)
    for name, wanted in given.items():
        if wanted is not None and name != "max_positions":
            agree(name, wanted, getattr(config, name), where, "MTP head")
    return with_positions(config, given.get("max_positions"))
