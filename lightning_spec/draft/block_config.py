"""The settings of a block drafter (DFlash, DSpark) as vLLM reads them from its config.json, and the checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_spec.draft.config import KEY, check_aux_layers, default_aux_layers, policy_rope, rope_json, same_fields
from lightning_spec.errors import ConfigError
from lightning_spec.shapes import PolicyShape, RopeConfig, read_rope

Kind = Literal["dflash", "dspark"]
ARCHITECTURES: dict[Kind, str] = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}
SLIDING, FULL = "sliding_attention", "full_attention"
_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Sizes and switches. Head and embedding are the policy's, so the width and the vocabulary are, too."""

    kind: Kind
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    aux_layer_ids: tuple[int, ...]
    """As transformers counts hidden_states; the engine's `target_layer_ids` are one less."""
    block_size: int
    """B, slots of a block with slot 0."""
    mask_token_id: int
    windows: tuple[int | None, ...]
    """Of each layer; None: it sees the whole trunk."""
    causal: tuple[bool, ...]
    """Of each layer: whether a slot sees the slots of its block up to itself only."""
    markov_rank: int = 0
    """0: there is no bias from the token before."""
    confidence: bool = False
    confidence_with_markov: bool = False

    @property
    def proposals(self) -> int:
        """Slots that predict: all of a DSpark block; slot 0 of a DFlash block is context."""
        return self.block_size - (self.kind == "dflash")

    def check(self, shape: PolicyShape, where: str = KEY) -> None:
        """Refuse a draft that does not fit the policy, or that the engine would serve differently."""

        def need(good: bool, what: str, found: object, needed: object, key: str) -> None:
            if not good:
                raise ConfigError(what, found=found, needed=needed, key=f"{where}.{key}" if where == KEY else where)

        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "max_positions"):
            need(getattr(self, name) > 0, f"bad {name} of the draft", getattr(self, name), "a positive number", name)
        need(self.head_dim % 2 == 0, "heads of an odd size cannot be rotated", self.head_dim, "an even one", "head_dim")
        need(
            self.num_heads % self.num_kv_heads == 0,
            "the draft's query heads do not divide into its key/value heads",
            f"{self.num_heads} heads, {self.num_kv_heads} kv heads",
            "num_heads a multiple of num_kv_heads",
            "num_kv_heads",
        )
        for name in ("vocab_size", "hidden_size"):
            need(
                getattr(self, name) == getattr(shape, name),
                f"a block draft borrows the policy's head and embedding, but its {name} is another",
                getattr(self, name),
                getattr(shape, name),
                "path",
            )
        check_aux_layers([layer - 1 for layer in self.aux_layer_ids], shape.num_layers)
        least = 2 if self.kind == "dflash" else 1
        need(
            self.block_size >= least,
            "a block without a slot that predicts",
            self.block_size,
            f"at least {least}",
            "block_size",
        )
        self._check_layers(need)
        special = _special_tokens(shape)
        need(
            0 <= self.mask_token_id < self.vocab_size,
            "the mask token is not in the policy's vocabulary",
            self.mask_token_id,
            f"0..{self.vocab_size - 1}",
            "mask_token_id",
        )
        need(
            self.mask_token_id not in special,
            "the mask token has a meaning in text",
            f"{self.mask_token_id}, the policy's {special.get(self.mask_token_id)}",
            "a token that no text has",
            "mask_token_id",
        )
        need(self.markov_rank >= 0, "bad markov_rank", self.markov_rank, "0 or more", "markov_rank")
        need(
            not self.confidence_with_markov or (self.confidence and self.markov_rank > 0),
            "a confidence head cannot read a Markov embedding that is not there",
            f"confidence: {self.confidence}, markov_rank: {self.markov_rank}",
            "confidence: true and markov_rank above 0, or confidence_with_markov: false",
            "confidence_with_markov",
        )

    def _check_layers(self, need: Any) -> None:
        for name, values in (("sliding_window", self.windows), ("causal", self.causal)):
            need(
                len(values) == self.num_layers,
                f"{name} is not given for each layer",
                len(values),
                f"one value, or {self.num_layers}",
                name,
            )
        need(
            all(window is None or window >= 1 for window in self.windows),
            "bad sliding_window",
            self.windows,
            "at least 1 token, or null",
            "sliding_window",
        )
        # The engine's first model runner keeps one kind of cache for all layers of a draft, and has one window.
        need(
            len(set(self.windows)) == 1,
            "layers with different windows cannot be served together",
            self.windows,
            "one window for all layers",
            "sliding_window",
        )
        need(
            len(set(self.causal)) == 1,
            "the engine's config.json has one switch for all layers",
            self.causal,
            "one value",
            "causal",
        )

    def to_json(self) -> dict[str, Any]:
        """config.json as vLLM's qwen3_dflash and qwen3_dspark read it."""
        window = self.windows[0]
        layers = [layer - 1 for layer in self.aux_layer_ids]
        nested: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": layers,
            "causal": self.causal[0],
            "use_swa": window is not None,
        }
        if window is not None:
            nested["swa_window_size"] = window
        found: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.kind]],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_positions,
            **rope_json(self.rope),
            "tie_word_embeddings": False,
            "layer_types": [FULL if window is None else SLIDING] * self.num_layers,
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": self.num_layers if window is None else 0,
            "block_size": self.block_size,
            "dflash_config": nested,
        }
        if self.kind == "dspark":
            found |= {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": layers,
                "sample_from_anchor": True,
                "markov_rank": self.markov_rank,
                "markov_head_type": "vanilla",
                "enable_confidence_head": self.confidence,
                "confidence_head_with_markov": self.confidence_with_markov,
            }
        return found

    @classmethod
    def from_json(
        cls, raw: dict[str, Any], names: Sequence[str], policy_layers: int, where: str, kind: Kind
    ) -> BlockConfig:
        """Read a block drafter's config.json as vLLM reads it.

        Args:
            raw: its contents.
            names: tensor names of the checkpoint.
            policy_layers: L.
            where: the file, for errors.
            kind: what the checkpoint has to be of.
        """

        def need(good: bool, what: str, found: object, needed: object, key: str) -> None:
            if not good:
                raise ConfigError(what, found=found, needed=needed, key=f"{where}:{key}")

        nested = raw.get("dflash_config") or {}
        wanted = ARCHITECTURES[kind]
        found = (raw.get("architectures") or [None])[0]
        need(found == wanted, f"not a {kind} draft", found, wanted, "architectures")
        for key, harmless in (
            ("attention_bias", (None, False)),
            ("hidden_act", (None, "silu")),
            ("logit_scale", (None, 1, 1.0)),
            ("quantization_config", (None,)),
            ("is_neox_style", (None, True)),
            ("add_swa_attention_sink_bias", (None, False)),
            ("markov_head_type", (None, "vanilla")),
            ("sample_from_anchor", (None, True)),
            ("draft_vocab_size", (None, raw.get("vocab_size"))),
            ("target_hidden_size", (None, raw.get("hidden_size"))),
        ):
            need(raw.get(key) in harmless, f"unsupported {key} of a block draft", raw.get(key), harmless[-1], key)
        for key, plain in (("attention_sink_bias", (None, False)), ("attention_value_scale", (None, 1, 1.0))):
            need(
                nested.get(key) in plain,
                f"unsupported {key} of a block draft",
                nested.get(key),
                plain[-1],
                f"dflash_config.{key}",
            )
        for name in (_HEAD, _EMBEDDING, "mask_embedding", "d2t"):
            need(name not in names, "a block draft with a tensor of its own is not supported", name, "none", name)
        for key in ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"):
            value = raw.get(key)
            need(isinstance(value, int) and value > 0, f"bad {key} of the draft", value, "a positive integer", key)
        mask: Any = nested.get("mask_token_id", raw.get("mask_token_id"))
        need(isinstance(mask, int), "no mask token", mask, "a token of the vocabulary", "dflash_config.mask_token_id")
        ids: Any = nested.get("target_layer_ids", raw.get("target_layer_ids"))
        need(
            isinstance(ids, list)
            and bool(ids)
            and all(isinstance(layer, int) and 0 <= layer < policy_layers for layer in ids)
            and ids == sorted(set(ids)),
            "bad target_layer_ids of a block draft",
            ids,
            f"ascending layers in 0..{policy_layers - 1}",
            "dflash_config.target_layer_ids",
        )
        block: Any = raw.get("block_size", nested.get("block_size"))
        need(isinstance(block, int), "no block_size", block, "slots of a block", "block_size")
        layers, heads = raw["num_hidden_layers"], raw["num_attention_heads"]
        head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
        windows, causal = _layers(raw, nested, layers, where)
        rank = int(raw.get("markov_rank") or 0) if kind == "dspark" else 0
        return cls(
            kind=kind,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            intermediate_size=raw["intermediate_size"],
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings", 32768)),
            rope=read_rope(raw, head_dim, where),
            aux_layer_ids=tuple(layer + 1 for layer in ids),
            block_size=block,
            mask_token_id=mask,
            windows=windows,
            causal=causal,
            markov_rank=rank,
            confidence=kind == "dspark" and bool(raw.get("enable_confidence_head", False)),
            confidence_with_markov=kind == "dspark" and bool(raw.get("confidence_head_with_markov", False)),
        )

    def same(self, other: BlockConfig, where: str) -> None:
        """Raise ConfigError on the first field in which a checkpoint's config `other` differs from the built draft."""
        same_fields(self, other, where)


def _layers(
    raw: Mapping[str, Any], nested: Mapping[str, Any], layers: int, where: str
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """(windows, causal) of each layer, by the rules of vLLM's `_resolve_layer_attention`."""
    types = raw.get("layer_types")
    if types is not None and len(types) != layers:
        raise ConfigError(
            "layer_types is not as long as the draft is deep",
            found=len(types),
            needed=layers,
            key=f"{where}:layer_types",
        )
    forced = bool(nested.get("use_swa", False))
    sliding = [kind == SLIDING for kind in types or [FULL] * layers]
    if types is None or (forced and not any(sliding)):
        sliding = [forced] * layers
    window = nested.get("swa_window_size", raw.get("sliding_window"))
    if any(sliding) and window is None:
        raise ConfigError(
            "sliding layers without a window", found=None, needed="swa_window_size", key=f"{where}:dflash_config"
        )
    switch = raw.get("is_causal", nested.get("causal"))
    # Without a switch sliding layers are causal, as the engine has it.
    causal = [kind == SLIDING for kind in types or [FULL] * layers] if switch is None else [bool(switch)] * layers
    return tuple(window if one else None for one in sliding), tuple(causal)


def new_block_config(kind: Kind, given: Mapping[str, Any], shape: PolicyShape) -> BlockConfig:
    """The config of a new draft. `given`: arguments by name, None where left out; defaults follow the policy.

    Raises:
        ConfigError: no mask token, or lists that do not fit the layers. (`BlockConfig.check` does the rest.)
    """
    asked = {name: value for name, value in given.items() if value is not None}
    if "mask_token_id" not in asked:
        raise ConfigError(
            "a block draft needs a mask token",
            found=None,
            needed="a token of the policy's vocabulary that no text has (not padding, not the end of a text)",
            key=f"{KEY}.mask_token_id",
        )
    layers = asked.get("num_layers", 1)
    head_dim = asked.get("head_dim", shape.head_dim)
    longest = asked.get("max_positions", shape.max_positions)
    aux = asked.get("aux_layer_ids")
    rank = asked.get("markov_rank", 32 if kind == "dspark" else 0)
    confidence = asked.get("confidence", kind == "dspark")
    return BlockConfig(
        kind=kind,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=layers,
        num_heads=asked.get("num_heads", shape.num_heads),
        num_kv_heads=asked.get("num_kv_heads", shape.num_kv_heads),
        head_dim=head_dim,
        intermediate_size=asked.get("intermediate_size", shape.intermediate_size),
        norm_eps=shape.norm_eps,
        max_positions=longest,
        rope=policy_rope(shape, head_dim, longest),
        aux_layer_ids=default_aux_layers(shape.num_layers) if aux is None else tuple(sorted(aux)),
        block_size=asked.get("block_size", 8 if kind == "dflash" else 7),
        mask_token_id=asked["mask_token_id"],
        windows=_each(asked.get("sliding_window"), layers),
        causal=_each(asked.get("causal", False), layers),
        markov_rank=rank,
        confidence=confidence,
        confidence_with_markov=asked.get("confidence_with_markov", bool(confidence and rank)),
    )


def _each(value: Any, layers: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,) * layers


def _special_tokens(shape: PolicyShape) -> dict[int, str]:
    """Tokens of the policy's config.json that texts have, with their names."""
    found: dict[int, str] = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = shape.raw.get(name)
        for token in value if isinstance(value, list) else [value]:
            if token is not None:
                found[int(token)] = name
    return found
