"""A fake engine and a toy module: what the callbacks do is seen in the order of the engine's calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint

from callbacks.rollout import RolloutCallback
from lightning_spec.batch import Completion, SpecStats, StepBatch
from lightning_spec.data import PromptData
from lightning_spec.errors import ConfigError, EngineError
from lightning_spec.metrics import MetricBag
from lightning_spec.rollout.engine import Engine, Generation, RefitReport, Sampling
from lightning_spec.rollout.rewards import Reward
from lightning_spec.sources import ReasoningGymPrompts
from lightning_spec.tokenizer import char_tokenizer


class FakeEngine(Engine):
    """Completions are a function of (seed, version); accepts 2 of 3 proposals, or 1 with the first draft's weights."""

    def __init__(self, events: list[str], fail_at: int | None = None) -> None:
        self.events, self.fail_at = events, fail_at
        self.version, self.calls, self.closed, self.alive = 0, 0, 0, False
        self.seeds: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.draft_value = 0.0
        self._stats = SpecStats()

    speculative = True
    num_speculative_tokens = 3

    @property
    def running(self) -> bool:
        return self.alive

    def start(self, files: Any) -> None:
        self.events.append("start")
        self.files, self.alive, self.version = files, True, 0

    def generate(self, requests: Any, sampling: Any, on_progress: Any = None) -> list[Completion]:
        self.calls += 1
        if self.fail_at == self.calls:
            raise EngineError("the worker died")
        self.events.append(f"generate@{self.version}")
        self.seeds.append([r.seed for r in requests])
        self.samplings.append(sampling)
        accepted = 2 if self.draft_value >= self.version else 1
        spec = SpecStats(len(requests), 3 * len(requests), accepted * len(requests), (len(requests),) * accepted)
        out = [
            Completion(
                (5 + r.seed % 7, 6, 2), (-1.0, -1.0, -1.0), "length" if r.seed % 5 == 0 else "stop", self.version
            )
            for r in requests
        ]
        self.last = Generation(3 * len(out), 0.5, spec)
        self._stats = self._stats + spec
        return out

    def refit(self, policy: Any, draft: Any, version: int, verify: bool = False) -> RefitReport:
        assert policy is not None
        tensors = [*policy, *(draft or ())]
        self.draft_value = float(dict(tensors)["draft.weight"])
        self.version = version
        self.events.append(f"refit@{version}" + (" verify" if verify else ""))
        return RefitReport(0.0, 8, len(tensors), version)

    def stats(self) -> SpecStats:
        return self._stats

    def close(self) -> None:
        self.events.append("close")
        self.closed += 1
        self.alive = False


class FirstToken(Reward):
    """A reward that differs between samples."""

    def __call__(self, prompt: Any, completion: Completion, text: str) -> float:
        return float(completion.tokens[0] % 3)


class ToyDraft:
    max_positions = 10_000

    def set_acceptance(self, by_position: Any) -> None: ...

    def check_length(self, length: int) -> None:
        if length > self.max_positions:
            raise ConfigError(
                "too few positions", found=self.max_positions, needed=length, key="model.draft.init_args.max_positions"
            )


class ToyModule(pl.LightningModule):
    """One weight each for policy and draft, moved by 1 at every step; records what it was trained on."""

    trains_policy = True

    def __init__(self, events: list[str], fail_at: int | None = None) -> None:
        super().__init__()
        self.events, self.fail_at = events, fail_at
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.draft = ToyDraft()
        self.trained: list[StepBatch] = []
        self.validated: list[StepBatch] = []

    @property
    def version(self) -> int:
        return int(self.trainer.global_step)

    def policy_tensors(self) -> Any:
        return iter([("policy.weight", torch.tensor(float(self.version)))])

    def draft_tensors(self) -> Any:
        return iter([("draft.weight", torch.tensor(float(self.version)))])

    def export_policy(self, folder: Path) -> None:
        Path(folder).mkdir(parents=True)

    export_draft = export_policy

    def prepare_rollouts(self, batches: list[StepBatch], updates: int) -> list[StepBatch]:
        return batches

    def training_step(self, batch: StepBatch, _: int) -> torch.Tensor:
        if self.fail_at == self.version:
            raise RuntimeError("a fault in the step")
        self.events.append(f"train@{self.version}")
        self.trained.append(batch)
        bag = MetricBag()
        bag.update(batch.metrics)
        self.log_dict({**bag.values(), "step": float(self.version + 1)}, on_step=True, on_epoch=False, batch_size=1)
        return self.weight**2

    def validation_step(self, batch: StepBatch, _: int) -> None:
        self.validated.append(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Run:
    """A fit over fakes; every part can be looked at afterwards."""

    def __init__(
        self,
        tokenizer: str,
        folder: Path,
        steps: int = 3,
        updates: int = 1,
        engine_fails_at: int | None = None,
        module_fails_at: int | None = None,
        more: Callable[[Path], list[pl.Callback]] = lambda folder: [],
        ckpt: str | None = None,
        loggers: list[Any] | None = None,
        **settings: Any,
    ) -> None:
        self.events: list[str] = []
        self.engine = FakeEngine(self.events, engine_fails_at)
        self.module = ToyModule(self.events, module_fails_at)
        source = ReasoningGymPrompts("chain_sum", {"max_digits": 2}, size=40, worked=True)
        self.data = PromptData(
            tokenizer, source, validation_size=4, validation_batch=4, prompts_per_step=2, updates_per_rollout=updates
        )
        settings = {"sampling": Sampling(max_tokens=8), "samples_per_prompt": 3, "seed": 7, **settings}
        self.rollout = RolloutCallback(
            settings.pop("engine", self.engine),
            settings.pop("reward", FirstToken()),
            workdir=str(folder / "engine"),
            **settings,
        )
        self.trainer = pl.Trainer(
            max_steps=steps,
            callbacks=[
                *(c for c in more(folder) if type(c).__name__ == "ProgressCallback"),
                self.rollout,
                *(c for c in more(folder) if type(c).__name__ != "ProgressCallback"),
            ],
            logger=loggers or False,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=any(isinstance(c, Checkpoint) for c in more(folder)),
            num_sanity_val_steps=0,
            val_check_interval=2,
            check_val_every_n_epoch=None,
            log_every_n_steps=1,
        )
        self.ckpt = ckpt

    def fit(self) -> Run:
        self.trainer.fit(self.module, datamodule=self.data, ckpt_path=self.ckpt)
        return self


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    char_tokenizer(folder)
    return str(folder)


@pytest.fixture
def make_run(tokenizer: str, tmp_path: Path) -> Callable[..., Run]:
    def make(**settings: Any) -> Run:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return Run(tokenizer, folder, **settings)

    return make
