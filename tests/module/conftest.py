"""A tiny policy folder, recorded rollouts, and a way to train them with the real strategy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_spec.batch import Completion, Prompt, Rollout, StepBatch
from lightning_spec.data import SizedLoader
from lightning_spec.draft import Eagle3
from lightning_spec.loss import GRPO
from lightning_spec.module import SpecGRPO
from lightning_spec.optim import OptimConfig
from lightning_spec.policy import PolicySource, write_policy
from lightning_spec.policy.initial import drawn_weight
from lightning_spec.policy.weights import tensor_shapes
from lightning_spec.shapes import PolicyShape
from strategies import MegatronStrategy

VOCAB = 48
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "initializer_range": 0.1,
}


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write_weights(folder: Path, seed: int = 3) -> None:
    """Write down the weights that a policy of this folder starts with when it is built with `seed`."""
    shape = PolicyShape.from_file(folder)
    drawn = ((name, drawn_weight(shape, name, size, seed)) for name, size in tensor_shapes(shape).items())
    write_policy(folder, shape, torch.float32, drawn)


def make_rollouts(seed: int, count: int = 6, group: int = 3) -> list[Rollout]:
    """Rollouts of mixed lengths; completions of 0, 1 and many tokens; advantages that do not cancel."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    out = []
    for i in range(count):
        prompt = tuple(draw(3, VOCAB) for _ in range(draw(1, 6)))
        length = (0, 1)[i] if i < 2 else draw(4, 14)
        tokens = tuple(draw(3, VOCAB) for _ in range(length))
        logprobs = tuple(-float(torch.rand((), generator=generator)) - 3.0 for _ in tokens)
        reward = float(torch.randn((), generator=generator))
        finish = "stop" if i % 2 else "length"
        completion = Completion(tokens, logprobs, finish)  # type: ignore[arg-type]
        out.append(
            Rollout(Prompt(f"p{i // group}", prompt, ""), completion, f"g{i // group}", reward, advantage=reward)
        )
    return out


class Recorded(L.LightningDataModule):
    """Step batches from memory; a fixed training order."""

    def __init__(self, batches: list[StepBatch]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> SizedLoader:
        return SizedLoader(len(self.batches), self.batches.__getitem__)

    def val_dataloader(self) -> SizedLoader:
        return SizedLoader(1, self.batches.__getitem__)


class Collect(L.Callback):
    """Keeps each step's logged metrics and the gradients that the optimizer is about to use."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.gradients.append(
            {
                name: param.main_grad.detach().clone()
                for name, param in pl_module.named_parameters()
                if getattr(param, "main_grad", None) is not None
            }
        )

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("time/")})


def quiet_trainer(
    steps: int, *, token_budget: int = 64, callbacks: list[Any] | None = None, devices: int = 1
) -> L.Trainer:
    return L.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=devices,
        strategy=MegatronStrategy(token_budget=token_budget, timeout_s=60),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=callbacks or [],
    )


@pytest.fixture(scope="session")
def weighted_folder(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same policy with its weights written down: what a frozen policy needs."""
    module = SpecGRPO(PolicySource(str(policy_folder), init_seed=3), GRPO(), OptimConfig(lr=1e-30))
    quiet_trainer(1).fit(module, Recorded([StepBatch(make_rollouts(0))]))
    return module.export_policy(tmp_path_factory.mktemp("weighted") / "policy")


Train = Callable[..., tuple[SpecGRPO, Collect]]


@pytest.fixture
def make_module(policy_folder: Path) -> Callable[..., SpecGRPO]:
    def make(**changes: Any) -> SpecGRPO:
        settings: dict[str, Any] = {
            "policy": PolicySource(str(policy_folder), init_seed=3),
            "policy_loss": GRPO(),
            "policy_optim": OptimConfig(lr=1e-2, clip_norm=1.0),
            "draft": Eagle3(num_passes=3),
            "draft_optim": OptimConfig(lr=1e-2, clip_norm=1.0),
        }
        return SpecGRPO(**{**settings, **changes})

    return make


@pytest.fixture
def train(make_module: Callable[..., SpecGRPO]) -> Train:
    """train(steps, **module settings) -> (trained module, what was collected)."""

    def run(
        steps: int, *, token_budget: int = 64, batches: list[StepBatch] | None = None, **changes: Any
    ) -> tuple[SpecGRPO, Collect]:
        module, collect = make_module(**changes), Collect()
        data = Recorded(batches or [StepBatch(make_rollouts(seed)) for seed in range(steps)])
        quiet_trainer(steps, token_budget=token_budget, callbacks=[collect]).fit(module, data)
        return module, collect

    return run
