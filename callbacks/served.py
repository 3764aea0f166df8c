"""What the rollout callback asks of a run and its engine: checks before work starts, and the engine's first files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from callbacks.collect import AdvantageConfig
from callbacks.speaker import writes_with_first
from lightning_spec.errors import ConfigError
from lightning_spec.metrics import MetricBag
from lightning_spec.rollout.engine import Engine, EngineFiles
from lightning_spec.rollout.rewards import Reward

ROLLOUT_OF = {"eagle3": "vllm", "dspark": "reference"}
"""File of configs/rollout that serves a method, where it has another name."""


def check_run(
    engine: Engine | None,
    reward: Reward | None,
    advantages: AdvantageConfig,
    trainer: pl.Trainer,
    module: Any,
    stage: str,
) -> None:
    """Refuse an engine, a reward and data that do not go together."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    mode = getattr(data, "mode", "rollouts")
    if engine is not None and mode != "rollouts":
        raise ConfigError(
            "an engine, but the data does not come from rollouts",
            found=f"data.mode={mode}",
            needed="data.mode: rollouts, or rollout.engine: null",
            key="rollout.engine",
        )
    if engine is None and mode == "rollouts" and stage in ("fit", "validate"):
        raise ConfigError(
            "the data comes from rollouts, but there is no engine",
            found="rollout.engine=null",
            needed="an engine class, or data.mode: worked",
            key="rollout.engine",
        )
    if engine is not None and reward is None and getattr(module, "trains_policy", True):
        raise ConfigError(
            "the policy learns from rollouts, but nothing scores them",
            found="rollout.reward=null",
            needed="a reward class",
            key="rollout.reward",
        )
    check_method(engine, getattr(module, "draft", None))
    if advantages.std == "batch" and getattr(trainer.strategy, "data_parallel_size", 1) > 1:
        raise ConfigError(
            "the deviation of all rewards is not reduced over data-parallel ranks",
            found="std=batch on several ranks",
            needed="group or none",
            key="rollout.advantages.std",
        )


def check_method(engine: Engine | None, draft: Any) -> None:
    """Refuse an engine whose speculation method is not that of the draft it would be given."""
    speculation = getattr(engine, "speculation", None)
    if speculation is None or not speculation.needs_draft:
        return
    key = "rollout.engine.init_args.speculation.method"
    if draft is None:
        raise ConfigError(
            "the engine's speculation needs a draft, and there is none",
            found=f"method {speculation.method}, model.draft: null",
            needed="a model.draft (configs/draft/*.yaml), or method none, ngram or suffix",
            key=key,
        )
    wanted = draft.speculative_config(speculation.num_speculative_tokens)["method"]
    if speculation.method != wanted:
        raise ConfigError(
            "the engine's speculation method is not the draft's",
            found=f"{speculation.method} with model.draft: {type(draft).__name__}",
            needed=f"{wanted} (configs/rollout/{ROLLOUT_OF.get(wanted, wanted)}.yaml), ngram, suffix, none, or another "
            "model.draft",
            key=key,
        )


def check_lengths(engine: Engine | None, max_tokens: int, trainer: pl.Trainer, module: Any) -> None:
    """Refuse rollouts longer than the policy's or the draft's positions before any is made."""
    longest = trainer.datamodule.max_prompt_tokens + max_tokens  # type: ignore[attr-defined]
    shape = getattr(module, "shape", None)
    if shape is not None and longest > shape.max_positions:
        raise ConfigError(
            "prompt and completion may be longer than the policy's positions",
            found=f"data.max_prompt_tokens + rollout.sampling.max_tokens = {longest}",
            needed=f"at most {shape.max_positions} (max_position_embeddings)",
            key="rollout.sampling.max_tokens",
        )
    if module.draft is not None and serves_draft(engine):
        module.draft.check_length(longest)


def write_engine_files(engine: Engine, workdir: Path, trainer: pl.Trainer, module: Any) -> EngineFiles:
    """Write the checkpoints that the engines of all ranks start from. All ranks call it; rank 0 writes, with the parts
    of the ranks that hold the model with it."""
    policy, draft = workdir / "policy", workdir / "draft"
    has_draft = module.draft is not None and serves_draft(engine)
    if writes_with_first(trainer):
        module.export_policy(policy)
        if has_draft:
            module.export_draft(draft)
    trainer.strategy.barrier("engine_files")
    kind = type(module.draft)
    return EngineFiles(
        policy=policy,
        draft=draft if has_draft else None,
        draft_class=f"{kind.__module__}.{kind.__qualname__}" if has_draft else None,
    )


def serves_draft(engine: Engine | None) -> bool:
    """Whether the engine loads a draft checkpoint: not for n-gram or suffix proposals, nor without speculation."""
    speculation = getattr(engine, "speculation", None)
    if speculation is not None:
        return bool(speculation.needs_draft)
    return engine is not None and engine.speculative and getattr(engine, "method", "draft") == "draft"


def full_draft(engine: Engine) -> int:
    """Proposals of a full draft: what the engine's settings say, else what it has counted."""
    settings = getattr(engine, "speculation", None) or engine
    declared = getattr(settings, "num_speculative_tokens", None) or getattr(settings, "k", None)
    return int(declared) if declared is not None else len(engine.last.spec.per_position)


def reduced(trainer: pl.Trainer, metrics: MetricBag) -> MetricBag:
    """Reduced over the ranks that split the data, where the strategy has such ranks."""
    reduce = getattr(trainer.strategy, "reduce_metrics", None)
    return reduce(metrics) if reduce is not None else metrics
