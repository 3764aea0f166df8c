"""What Lightning does with our loaders: on-policy, our order, exact resume in the middle of an epoch."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from lightning_spec.batch import Completion, Rollout, StepBatch
from lightning_spec.data import PromptData
from lightning_spec.sources import ReasoningGymPrompts
from lightning_spec.tokenizer import char_tokenizer


class Learner(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.trained: list[tuple[int, int, tuple[str, ...]]] = []
        self.validated: list[int] = []

    def training_step(self, batch: StepBatch, _):
        self.trained.append((batch.version, self.global_step, tuple(r.prompt.uid for r in batch.rollouts)))
        return self.weight**2

    def validation_step(self, batch: StepBatch, _):
        self.validated.append(len(batch.rollouts))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Fill(pl.Callback):
    """A Rollout callback reduced to what the buffer sees of it."""

    def __init__(self, data: PromptData):
        self.data = data

    def _rollouts(self, prompts, version):
        return [Rollout(p, Completion((2,), (-0.5,), "stop", version), p.uid) for p in prompts]

    def setup(self, trainer, module, stage):
        self.data.buffer.refill = lambda: self.on_train_epoch_start(trainer, module)

    def on_train_epoch_start(self, trainer, module):
        if self.data.buffer.remaining:
            return
        step = trainer.global_step
        updates = len(self.data.buffer)
        self.data.buffer.set(
            [StepBatch(self._rollouts(self.data.next_prompts(), step), version=step) for _ in range(updates)]
        )

    def on_validation_start(self, trainer, module):
        rollouts = self._rollouts(self.data.validation_prompts(), trainer.global_step)
        self.data.val_buffer.set(self.data.split_validation(rollouts))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    char_tokenizer(folder)
    return str(folder)


def run(tokenizer, folder, mode, steps, updates=1, ckpt=None, save_every=1):
    source = ReasoningGymPrompts("chain_sum", {"max_digits": 2}, size=40, worked=True)
    data = PromptData(
        tokenizer,
        source,
        validation_size=5,
        validation_batch=2,
        prompts_per_step=4,
        mode=mode,
        updates_per_rollout=updates,
    )
    module = Learner()
    saver = pl.callbacks.ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=save_every)
    trainer = pl.Trainer(
        max_steps=steps,
        callbacks=[Fill(data), saver] if mode == "rollouts" else [saver],
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=2,
        check_val_every_n_epoch=None,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt)
    return module, data


def test_one_update_a_phase_trains_on_the_policy_that_sampled(tokenizer, tmp_path):
    module, data = run(tokenizer, tmp_path, "rollouts", 5)
    assert [(version, step) for version, step, _ in module.trained] == [(i, i) for i in range(5)]
    assert data.position == 5 * 4 + data.dropped
    assert module.validated == [2, 2, 1] * 2


def test_several_updates_a_phase_lag_by_less_than_their_number(tokenizer, tmp_path):
    module, _ = run(tokenizer, tmp_path, "rollouts", 6, updates=3)
    assert [(version, step) for version, step, _ in module.trained] == [(0, 0), (0, 1), (0, 2), (3, 3), (3, 4), (3, 5)]


@pytest.mark.parametrize(("mode", "updates"), [("rollouts", 1), ("rollouts", 3), ("worked", 1)])
@pytest.mark.parametrize("stop", [2, 3, 4])
def test_interrupted_and_resumed_equals_uninterrupted(tokenizer, tmp_path, mode, updates, stop):
    whole, _ = run(tokenizer, tmp_path / "whole", mode, 9, updates)
    run(tokenizer, tmp_path / "part", mode, 7, updates)
    rest, _ = run(tokenizer, tmp_path / "rest", mode, 9, updates, ckpt=str(tmp_path / "part" / f"step={stop}.ckpt"))
    assert rest.trained == whole.trained[stop:]
    assert len(whole.trained) == 9
