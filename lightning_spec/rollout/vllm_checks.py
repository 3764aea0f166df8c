"""What vLLM would refuse late or serve wrongly: settings, checkpoints against each other, requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_spec.errors import ConfigError
from lightning_spec.rollout.engine import EngineFiles, Request, Sampling
from lightning_spec.rollout.speculation import KEY as SPECULATION
from lightning_spec.rollout.speculation import Speculation
from lightning_spec.rollout.vllm_methods import check_method

if TYPE_CHECKING:
    from lightning_spec.rollout.vllm import VLLMEngine

ENGINE = "rollout.engine"
"""Its key in a configuration."""


def check_settings(engine: VLLMEngine) -> None:
    """Refuse numbers out of range, an unknown dtype, and engine_args that repeat what the engine sets itself."""
    positive = (
        "max_model_len",
        "max_num_seqs",
        "kv_cache_gib",
        "tensor_parallel_size",
        "threads",
        "timeout_s",
        "start_timeout_s",
    )
    for name in positive:
        value = getattr(engine, name)
        if value is not None and value <= 0:
            raise ConfigError(f"bad {name}", found=value, needed="a positive number", key=f"{ENGINE}.{name}")
    if not 0 < engine.gpu_memory_utilization <= 1:
        raise ConfigError(
            "bad gpu_memory_utilization",
            found=engine.gpu_memory_utilization,
            needed="0 < share <= 1",
            key=f"{ENGINE}.gpu_memory_utilization",
        )
    dtypes = ("auto", "float32", "bfloat16", "float16")
    if engine.dtype not in dtypes:
        raise ConfigError("unknown dtype", found=engine.dtype, needed=f"one of {dtypes}", key=f"{ENGINE}.dtype")
    owned = {*positive, "model", "dtype", "enforce_eager", "speculative_config", "logprobs_mode", "seed"}
    owned |= {"worker_extension_cls", "weight_transfer_config", "skip_tokenizer_init", "generation_config"}
    if clash := sorted(owned & set(engine.engine_args)):
        raise ConfigError(
            "engine_args repeats what the engine sets itself",
            found=clash,
            needed="the engine's own argument",
            key=f"{ENGINE}.engine_args",
        )


def check_requests(requests: Sequence[Request], sampling: Sampling, longest: int, vocabulary: int) -> None:
    """Refuse what the engine cannot serve, before any of it runs.

    Args:
        longest: tokens of prompt and completion together.
        vocabulary: number of tokens.
    """
    if sampling.temperature > 2:
        raise ConfigError(
            "temperature is beyond what vLLM takes",
            found=sampling.temperature,
            needed="at most 2",
            key="rollout.sampling.temperature",
        )
    for number, request in enumerate(requests):
        prompt = request.prompt_tokens
        if not 0 < len(prompt) < longest:
            raise ConfigError(
                f"request {number}: the prompt does not fit",
                found=f"{len(prompt)} tokens",
                needed=f"1..{longest - 1} (max_model_len leaves room for one token at least)",
                key=f"{ENGINE}.max_model_len",
            )
        if not (min(prompt) >= 0 and max(prompt) < vocabulary):
            raise ConfigError(
                f"request {number}: a token is outside the vocabulary",
                found=max(prompt, key=abs),
                needed=f"0..{vocabulary - 1}",
                key="data.tokenizer",
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise ConfigError(
                f"request {number}: bad max_tokens",
                found=request.max_tokens,
                needed="at least 1",
                key="rollout.sampling.max_tokens",
            )


def read_config(folder: Path, key: str) -> dict[str, Any]:
    """A checkpoint's config.json."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError("no config.json", found=str(folder), needed="a checkpoint folder", key=key)
    raw: dict[str, Any] = json.loads(path.read_text())
    return raw


CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's CPU attention; it accepts others at the start and fails in the first step."""


def check_policy(folder: Path, max_model_len: int | None, on_cpu: bool, workers: int = 1) -> dict[str, Any]:
    """The policy's config.json, once it is known to allow `max_model_len`, to run here and to split over `workers`."""
    raw = read_config(folder, "EngineFiles.policy")
    _check_heads(raw, f"{folder}/config.json", on_cpu)
    _check_split(raw, "policy", workers)
    longest = raw.get("max_position_embeddings")
    if max_model_len is not None and longest is not None and max_model_len > longest:
        raise ConfigError(
            "max_model_len is beyond the policy's positions",
            found=max_model_len,
            needed=f"at most {longest} (max_position_embeddings)",
            key=f"{ENGINE}.max_model_len",
        )
    return raw


def _check_split(raw: dict[str, Any], what: str, workers: int) -> None:
    """Tensor parallelism gives each worker whole query heads, and whole or shared key-value heads."""
    heads = raw.get("num_attention_heads")
    kv = raw.get("num_key_value_heads") or heads
    if workers == 1 or heads is None or kv is None:
        return
    inner, expert = raw.get("intermediate_size") or 0, raw.get("moe_intermediate_size") or 0
    for name, count, fits in (
        ("query heads", heads, heads % workers == 0),
        ("key-value heads", kv, kv % workers == 0 or workers % kv == 0),
        ("MLP columns", inner, inner % workers == 0),
        ("MLP columns of an expert", expert, expert % workers == 0),
    ):
        if not fits:
            raise ConfigError(
                f"the {what}'s {count} {name} cannot be split over the engine's workers",
                found=workers,
                needed=f"a number that divides {count}" + (", or that it divides" if name == "key-value heads" else ""),
                key=f"{ENGINE}.tensor_parallel_size",
            )


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
    speculation: Speculation,
    files: EngineFiles,
    policy: dict[str, Any],
    max_model_len: int | None,
    on_cpu: bool,
    workers: int = 1,
) -> None:
    """Refuse a draft that vLLM would load but serve wrongly, or fail on after minutes.

    Raises:
        ConfigError: no draft, or one of another method; another vocabulary; another width; aux layers that do not exist
            or collide; no mask token; more proposals than its block has; too few positions (vLLM would clamp them); a
            method that this machine cannot serve.
    """
    if speculation.method == "dspark" and on_cpu:
        raise ConfigError(
            "vLLM serves DSpark on a GPU alone",
            found="method dspark on a CPU",
            needed="the reference engine (-c configs/rollout/reference.yaml), or a CUDA machine",
            key=f"{SPECULATION}.method",
        )
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
    _check_split(draft, "draft", workers)
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
    check_method(speculation, files.draft, draft, policy)
