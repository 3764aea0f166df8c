"""Checkpoints against each other and against the engine's settings, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_spec.errors import ConfigError
from lightning_spec.rollout.engine import EngineFiles
from lightning_spec.rollout.speculation import KEY as SPECULATION
from lightning_spec.rollout.speculation import Speculation


def read_config(folder: Path, key: str) -> dict[str, Any]:
    """A checkpoint's config.json."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError("no config.json", found=str(folder), needed="a checkpoint folder", key=key)
    raw: dict[str, Any] = json.loads(path.read_text())
    return raw


CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's CPU attention; it accepts others at the start and fails in the first step."""


def check_policy(folder: Path, max_model_len: int | None, on_cpu: bool) -> dict[str, Any]:
    """The policy's config.json, once it is known to allow `max_model_len` and to run here."""
    raw = read_config(folder, "EngineFiles.policy")
    _check_heads(raw, f"{folder}/config.json", on_cpu)
    longest = raw.get("max_position_embeddings")
    if max_model_len is not None and longest is not None and max_model_len > longest:
        raise ConfigError(
            "max_model_len is beyond the policy's positions",
            found=max_model_len,
            needed=f"at most {longest} (max_position_embeddings)",
            key="rollout.engine.max_model_len",
        )
    return raw


def _check_heads(raw: dict[str, Any], key: str, on_cpu: bool) -> None:
    heads = raw.get("num_attention_heads")
    size = raw.get("head_dim") or (raw["hidden_size"] // heads if heads and "hidden_size" in raw else None)
    if on_cpu and size is not None and size not in CPU_HEAD_SIZES:
        raise ConfigError(
            "vLLM's CPU attention has no kernel for this head size",
            found=size,
            needed=f"one of {CPU_HEAD_SIZES}",
            key=f"{key}:head_dim",
        )


def check_draft(
    speculation: Speculation, files: EngineFiles, policy: dict[str, Any], max_model_len: int | None, on_cpu: bool
) -> None:
    """Refuse a draft that vLLM would load but serve wrongly, or fail on after minutes.

    Raises:
        ConfigError: no draft; another vocabulary; another width; aux layers that do not exist or collide; too few
            positions (vLLM would clamp them); another rotary base.
    """
    if speculation.method == "mtp":
        return  # heads inside the policy's own checkpoint
    if files.draft is None:
        raise ConfigError(
            f"speculation method {speculation.method!r} needs a draft",
            found=None,
            needed="a draft checkpoint (model.draft), or method none, ngram or suffix",
            key=f"{SPECULATION}.method",
        )
    key = f"{files.draft}/config.json"
    draft = read_config(files.draft, "EngineFiles.draft")
    _check_heads(draft, key, on_cpu)
    if (mine := draft.get("vocab_size")) is not None and mine != policy.get("vocab_size"):
        raise ConfigError(
            "the draft's vocabulary is not the policy's",
            found=mine,
            needed=policy.get("vocab_size"),
            key=f"{key}:vocab_size",
        )
    needed = max_model_len or policy.get("max_position_embeddings")
    if (longest := draft.get("max_position_embeddings")) is not None and needed is not None and longest < needed:
        raise ConfigError(
            "the draft has fewer positions than rollouts are long",
            found=longest,
            needed=f"at least {needed}",
            key=f"{key}:max_position_embeddings",
        )
    if speculation.method == "eagle3":
        _check_eagle3(draft, policy, key)


def _check_eagle3(draft: dict[str, Any], policy: dict[str, Any], key: str) -> None:
    width = draft.get("target_hidden_size", draft.get("hidden_size"))
    if width != policy.get("hidden_size"):
        raise ConfigError(
            "the draft was made for another hidden size",
            found=width,
            needed=policy.get("hidden_size"),
            key=f"{key}:target_hidden_size",
        )
    layers = int(policy["num_hidden_layers"])
    nested = draft.get("eagle_config") or {}
    ids = draft.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    default = ids is None
    ids = [2, layers // 2, layers - 3] if ids is None else list(ids)
    if len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) > layers:
        raise ConfigError(
            f"aux layers of a policy with {layers} layers collide or do not exist"
            + (" (the default 2, L//2, L-3 needs 7 layers)" if default else ""),
            found=ids,
            needed=f"distinct ids in 0..{layers}",
            key=f"{key}:eagle_aux_hidden_state_layer_ids",
        )
