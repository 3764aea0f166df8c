"""A run with rollouts, validation, the frozen twin and an export, for ranks that share an engine (context_worker.py,
replica_worker.py): what it logs, what it trained on and what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch

from callbacks.acceptance import FrozenTwin
from callbacks.export import export
from callbacks.rollout import RolloutCallback
from lightning_spec.batch import Completion, Prompt, Rollout, StepBatch
from lightning_spec.data import PromptData
from lightning_spec.draft import Eagle3
from lightning_spec.errors import EngineError
from lightning_spec.loss import GRPO
from lightning_spec.module import SpecGRPO
from lightning_spec.optim import OptimConfig
from lightning_spec.policy import PolicySource
from lightning_spec.rollout.engine import EngineFiles, Sampling
from lightning_spec.rollout.reference import ReferenceEngine
from lightning_spec.rollout.rewards import Reward
from strategies import MegatronStrategy
from tests.integration.conftest import new_policy, sums

MEASURED = ("time/", "per_second")


class Odd(Reward):
    """Differs between samples; on a rank that should not score it raises."""

    def __init__(self, alone: bool) -> None:
        self.alone = alone

    def __call__(self, prompt: Prompt, completion: Completion, text: str) -> float:
        assert self.alone, "this rank's peer scores"
        return float(sum(completion.tokens) % 5)


class Counting(ReferenceEngine):
    """Counts how often it was started."""

    starts = 0

    def start(self, files: EngineFiles) -> None:
        self.starts += 1
        super().start(files)


class Dying(Counting):
    """Its second generation fails."""

    calls = 0

    def generate(self, *args: Any, **options: Any) -> list[Completion]:
        self.calls += 1
        if self.calls == 2:
            self.close()
            raise EngineError("the worker died")
        return super().generate(*args, **options)


class Spy(L.Callback):
    """Keeps each step's metrics and rollouts."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.rollouts: list[list[Rollout]] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        values = {k: float(v) for k, v in trainer.callback_metrics.items() if not any(m in k for m in MEASURED)}
        self.metrics.append(values)
        self.rollouts.append(batch.rollouts)


def policy_folder(folder: Path) -> Path:
    sizes = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
    return new_policy(folder, max_positions=64, **sizes)


def run(
    policy: Path,
    folder: Path,
    *,
    devices: int = 1,
    speaks: bool = True,
    engine: type[Counting] = Counting,
    **layout: Any,
) -> dict[str, Any]:
    """Three steps of two phases, validation, export; all ranks share `folder`, `layout` is the strategy's sizes."""
    optim = OptimConfig(lr=1e-2, clip_norm=1.0, eps=1e-3)
    module = SpecGRPO(
        PolicySource(str(policy), init_seed=1),
        GRPO(),
        optim,
        Eagle3(num_passes=2, own_head=True, aux_layer_ids=[1, 2, 3]),
        None,
        optim,
    )
    own = engine("draft", num_speculative_tokens=2)
    spy = Spy()
    rollout = RolloutCallback(
        own,
        Odd(alone=speaks),
        sampling=Sampling(max_tokens=10),
        validation_sampling=Sampling(max_tokens=8, seed=3),
        samples_per_prompt=3,
        verify_refit=1,
        workdir=str(folder / "engine"),
        record=str(folder / "rollouts"),
        seed=5,
    )
    trainer = L.Trainer(
        max_steps=3,
        max_epochs=-1,
        accelerator="cpu",
        devices=devices,
        strategy=MegatronStrategy(token_budget=48, timeout_s=60, **layout),
        callbacks=[rollout, FrozenTwin(True, str(folder / "frozen")), spy],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        val_check_interval=2,
        check_val_every_n_epoch=None,
    )
    data = PromptData(
        str(policy), sums(0, 50), validation_size=2, prompts_per_step=2, updates_per_rollout=2, max_prompt_tokens=40
    )
    error = ""
    try:
        trainer.fit(module, datamodule=data)
        export(trainer, module, folder / "export")
    except EngineError as failure:
        error = str(failure)
    return {
        "metrics": spy.metrics,
        "rollouts": spy.rollouts,
        "error": error,
        "starts": own.starts,
        "refits": rollout.refits,
        "weights": {name: tensor.detach().clone() for name, tensor in module.named_parameters()},
        "files": sorted(file.name for file in (folder / "rollouts").glob("*")),
    }


def save(policy: Path, out: Path, name: str, rank: int, world: int, context_parallel: int = 1, **layout: Any) -> None:
    """One rank's part: `rollouts`, or `failing` with an engine that dies."""
    kind = Dying if name == "failing" else Counting
    layout["context_parallel"] = context_parallel
    speaks = rank % context_parallel == 0 if set(layout) == {"context_parallel"} else rank == 0
    found = run(policy, out / f"{name}-files", devices=world, speaks=speaks, engine=kind, **layout)
    torch.save(found, out / f"{name}-{rank}.pt")
