"""A policy and a draft that were really trained (a minute of tiny training), shared by the session."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_spec.data import PromptData
from lightning_spec.draft import Eagle3
from lightning_spec.loss import SupervisedLoss
from lightning_spec.module import SpecGRPO
from lightning_spec.optim import OptimConfig
from lightning_spec.policy import PolicySource, new_policy_config
from lightning_spec.sources import ReasoningGymPrompts
from lightning_spec.tokenizer import char_tokenizer
from strategies import MegatronStrategy


def sums(seed: int, size: int = 100_000) -> ReasoningGymPrompts:
    config = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}
    return ReasoningGymPrompts("chain_sum", config, size=size, seed=seed, worked=True)


def new_policy(folder: Path, **sizes: int) -> Path:
    """Folder of a policy without weights: config.json and the character tokenizer."""
    tokenizer = char_tokenizer(folder)
    config: dict[str, Any] = new_policy_config(
        "llama",
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "num_layers": 8,
            "num_heads": 2,
            "num_kv_heads": 1,
            "intermediate_size": 128,
            "max_positions": 256,
            **sizes,
        },
        tied_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Pair:
    """Exported checkpoints of a trained policy and its draft, and where the untrained policy lies."""

    policy: Path
    draft: Path
    start: Path


def trainer(steps: int, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "max_steps": steps,
        "max_epochs": -1,
        "accelerator": "cpu",
        "devices": 1,
        "strategy": MegatronStrategy(token_budget=2048),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    return L.Trainer(**{**settings, **options})


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("pair")
    start = new_policy(root / "start")
    data = PromptData(
        tokenizer=str(start),
        source=sums(0),
        mode="worked",
        prompts_per_step=32,
        validation_size=0,
        steps_per_epoch=10**6,
    )
    module = SpecGRPO(
        PolicySource(str(start)),
        SupervisedLoss(),
        OptimConfig(lr=3e-3, warmup_steps=10),
        Eagle3(num_passes=4, own_head=True),
        None,
        OptimConfig(lr=3e-3, warmup_steps=10),
    )
    trainer(120).fit(module, data)
    draft = module.export_draft(root / "draft")
    assert draft is not None
    return Pair(module.export_policy(root / "policy"), draft, start)
