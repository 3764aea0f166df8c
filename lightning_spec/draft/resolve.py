"""From YAML arguments to an EAGLE-3 config: defaults follow the policy, or the draft's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_spec.draft.checkpoint import read_tensors, tensor_names
from lightning_spec.draft.config import (
    KEY,
    Eagle3Config,
    agree,
    check_aux_layers,
    default_aux_layers,
    policy_rope,
    read_config,
    with_positions,
)
from lightning_spec.draft.vocab import VocabMap
from lightning_spec.errors import ConfigError
from lightning_spec.shapes import PolicyShape

_OWNED = ("own_head", "own_embedding")


def from_policy(
    given: Mapping[str, Any], vocab: VocabMap | None, shape: PolicyShape
) -> tuple[Eagle3Config, VocabMap | None]:
    """Config and vocabulary map of a new draft. `given`: arguments by field name, None where left out."""
    asked = {name: value for name, value in given.items() if value is not None}
    size = asked.pop("draft_vocab_size", None)
    if size is None:
        size = vocab.size if vocab is not None else shape.vocab_size
    vocab = _fitting_map(vocab, size, shape.vocab_size)
    aux = asked.pop("aux_layer_ids", None)
    head_dim = asked.get("head_dim", shape.head_dim)
    longest = asked.get("max_positions", shape.max_positions)
    defaults: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "num_layers": 1,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": shape.intermediate_size,
        "max_positions": longest,
        "own_head": size < shape.vocab_size,
        "own_embedding": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    }
    config = Eagle3Config(
        vocab_size=shape.vocab_size,
        draft_vocab_size=size,
        policy_hidden_size=shape.hidden_size,
        norm_eps=shape.norm_eps,
        rope=policy_rope(shape, head_dim, longest),
        aux_layer_ids=default_aux_layers(shape.num_layers) if aux is None else check_aux_layers(aux, shape.num_layers),
        **(defaults | asked),
    )
    return config, vocab


def from_checkpoint(
    path: str, given: Mapping[str, Any], vocab: VocabMap | None, shape: PolicyShape
) -> tuple[Eagle3Config, VocabMap | None]:
    """Config and vocabulary map of a checkpoint; arguments that were given must agree with it."""
    raw, where = read_config(path)
    names = tensor_names(path)
    config = Eagle3Config.from_json(raw, names, shape.num_layers, where)
    for name, wanted in given.items():
        # Whether a head is owned is settled by the tensors: a missing one raises, an unwanted one is dropped.
        if wanted is None or name in (*_OWNED, "max_positions"):
            continue
        wanted = tuple(sorted(wanted)) if name == "aux_layer_ids" else wanted
        agree(name, wanted, getattr(config, name), where)
    config = with_positions(config, given.get("max_positions"))
    if config.draft_vocab_size < config.vocab_size:
        stored = VocabMap(torch.arange(config.draft_vocab_size), config.vocab_size)
        # Without a stored map `load` names the missing tensor.
        if "d2t" in names:
            stored = VocabMap.from_d2t(dict(read_tensors(path))["d2t"], config.vocab_size)
            if vocab is not None and not torch.equal(vocab.target_ids, stored.target_ids):
                raise ConfigError(
                    "vocab_map contradicts the draft's checkpoint",
                    found=f"{vocab.size} other ids",
                    needed=f"the map in {path}, or null",
                    key=f"{KEY}.vocab_map",
                )
        vocab = stored
    vocab = _fitting_map(vocab, config.draft_vocab_size, config.vocab_size)
    return replace(config, **{name: given[name] for name in _OWNED if given.get(name) is not None}), vocab


def _fitting_map(vocab: VocabMap | None, size: int, vocab_size: int) -> VocabMap | None:
    """The map to use for a draft vocabulary of `size`: none when it is the whole vocabulary."""
    if size == vocab_size:
        if vocab is not None and not torch.equal(vocab.target_ids, torch.arange(vocab_size)):
            raise ConfigError(
                "a map over the full vocabulary is never applied by the engine",
                found=f"draft_vocab_size {size} of {vocab_size} with a map",
                needed="a smaller draft_vocab_size, or no map",
                key=f"{KEY}.vocab_map",
            )
        return None
    if size < vocab_size and (vocab is None or vocab.size != size):
        raise ConfigError(
            "a reduced draft vocabulary needs a map of its size",
            found=f"draft_vocab_size {size}, map of {vocab.size if vocab else None}",
            needed="vocab_map with as many target ids",
            key=f"{KEY}.vocab_map",
        )
    return vocab


def resolve_pass_weights(given: str | Sequence[float], num_passes: int) -> tuple[float, ...]:
    """Weights of the passes. `acceptance` starts uniform, until the engine has measured any."""
    if given in ("uniform", "acceptance"):
        return (1.0,) * num_passes
    if given == "decay":
        return tuple(0.8**i for i in range(num_passes))
    if isinstance(given, str) or len(given) != num_passes or not all(0 <= w < float("inf") for w in given):
        raise ConfigError(
            "bad pass weights",
            found=given,
            needed=f"uniform, decay, acceptance, or {num_passes} numbers of at least 0",
            key=f"{KEY}.pass_weights",
        )
    return tuple(float(w) for w in given)
