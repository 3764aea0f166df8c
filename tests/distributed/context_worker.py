"""One rank of test_context_parallel_step.py: `python context_worker.py OUT POLICY_FOLDER CONTEXT_PARALLEL CASE ...`.

Trains the real module for three steps of recorded rollouts in every case, writes OUT/CASE-RANK.pt. Cases `rollouts` and
`failing` generate (context_rollouts.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import context_rollouts
import lightning as L
import torch
from torch import Tensor

from callbacks.checkpoint import SpecCheckpoint
from lightning_spec.attention.exchange import gather_rows
from lightning_spec.attention.zigzag import Shard, Zigzag
from lightning_spec.batch import Completion, Prompt, Rollout, StepBatch, pack
from lightning_spec.data import SizedLoader
from lightning_spec.draft import Eagle3
from lightning_spec.errors import ConfigError
from lightning_spec.loss import GRPO, PolicyLoss, SupervisedLoss
from lightning_spec.module import SpecGRPO
from lightning_spec.optim import OptimConfig
from lightning_spec.policy import PolicySource
from strategies import MegatronStrategy
from tests.module.conftest import Collect, make_rollouts
from tests.module.conftest import Recorded as FromMemory

BUDGET = 24


@dataclass
class Case:
    """One training set-up; without a loss the policy is frozen. `strategy` holds what must not change results."""

    loss: Callable[[], PolicyLoss | None]
    strategy: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False
    dtype: torch.dtype = torch.float64


def grpo(**options: Any) -> Callable[[], PolicyLoss]:
    return lambda: GRPO(aggregation="sequence_mean", clip_high=0.3, kl_coef=0.1, entropy_coef=0.01, **options)


CASES = {
    "stream": Case(grpo(), strategy={"draft_attention": "stream"}),
    "sequences": Case(
        grpo(ratio_level="sequence", importance_level="sequence"),
        strategy={"draft_attention": "ring"},
        recompute=True,
    ),
    "ulysses": Case(grpo(), strategy={"policy_attention": "ulysses", "draft_attention": "ulysses"}),
    "distill": Case(lambda: None),
    # Megatron's sharded optimizer takes no float64.
    "sharded": Case(
        lambda: SupervisedLoss("sequence_mean"), strategy={"distributed_optimizer": True}, dtype=torch.float32
    ),
}


def one_row(seed: int) -> Rollout:
    """A document of one row: the second context-parallel rank holds nothing of it."""
    return Rollout(Prompt(f"one{seed}", (5 + seed,), ""), Completion((), (), "length"), f"one{seed}")


def filling(rollouts: list[Rollout]) -> list[Rollout]:
    """Stretched by their prompts to the token budget, so that each is a micro-batch of its own."""
    out = []
    for rollout in rollouts:
        prompt = rollout.prompt.tokens + (7,) * (BUDGET - rollout.length)
        out.append(replace(rollout, prompt=replace(rollout.prompt, tokens=prompt)))
    return out


def step_rollouts(step: int, data_rank: int, data_size: int) -> list[Rollout]:
    """Step 0: shared among data ranks. Step 1: all on the first. Step 2: long ones, and micro-batches of one row."""
    if step == 0:
        return [*make_rollouts(1, count=8), one_row(0)][data_rank::data_size]
    whole = make_rollouts(2, count=8) if step == 1 else filling(make_rollouts(3, count=4))
    if data_rank:
        return [] if step == 1 else [one_row(1)]
    return whole if step == 1 or data_size > 1 else [*whole, one_row(1)]


class Recorded(L.LightningDataModule):
    """Every rank of a replica gets the batches of its data rank."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[StepBatch] = []

    def make(self) -> None:
        data = self.trainer.strategy.data
        self.batches = [StepBatch(step_rollouts(step, data.rank, data.size)) for step in range(3)]
        for batch in self.batches:
            batch.metrics.add("rollouts", len(batch.rollouts), reduction="sum")

    def train_dataloader(self) -> SizedLoader:
        # By the step and not the index: a resumed run's loader starts anew.
        return SizedLoader(3, lambda _: self.batches[self.trainer.global_step])

    def val_dataloader(self) -> SizedLoader:
        return SizedLoader(1, lambda index: self.batches[index])


class Typed(SpecGRPO):
    """In a dtype of choice: in float64 only a wrong formula, and no rounding, shows."""

    build_dtype = torch.float64


class Look(L.Callback):
    """Before the first step: hidden states, the trainer's log-probs for the loss (as it makes them, then disturbed),
    validation."""

    def __init__(self, scored: list[StepBatch] | None) -> None:
        self.hidden: list[Tensor] = []
        self.scores: dict[str, tuple[float, ...]] = {}
        self.scored = scored

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        data = trainer.datamodule
        if self.scored is not None:
            data.batches = self.scored
            return
        data.make()
        context = module.context
        with torch.no_grad():
            for micro in pack([*make_rollouts(1, count=8), one_row(0)], BUDGET):
                shard = Shard(Zigzag(micro.lengths, context.size), context) if context.size > 1 else None
                mine = micro if shard is None else micro.take(shard.rows)
                hidden = module.policy(mine.tokens, mine.positions, mine.lengths, shard)
                self.hidden.append(hidden if shard is None else gather_rows(hidden, shard))
        batches = module.prepare_rollouts(data.batches, 2)
        for batch, scored in zip(data.batches, batches, strict=True):
            batch.rollouts = [disturbed(rollout) for rollout in scored.rollouts]
            self.scores |= {
                f"{rollout.prompt.tokens}{rollout.completion.tokens}": rollout.old_logprobs or ()
                for rollout in scored.rollouts
            }


def disturbed(rollout: Rollout) -> Rollout:
    """Ratios and KL away from 1 and 0 at the first step already."""

    def away(values: tuple[float, ...] | None, by: float) -> tuple[float, ...] | None:
        return values and tuple(value + by * ((7 * i + len(values)) % 5 - 2) for i, value in enumerate(values))

    engine = away(rollout.old_logprobs, 0.05) or rollout.completion.logprobs
    return replace(
        rollout,
        completion=replace(rollout.completion, logprobs=engine),
        old_logprobs=away(rollout.old_logprobs, 0.04),
        ref_logprobs=away(rollout.ref_logprobs, 0.1),
    )


def quiet(strategy: MegatronStrategy, devices: int, callbacks: list[L.Callback]) -> L.Trainer:
    return L.Trainer(
        max_steps=3,
        max_epochs=-1,
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        logger=False,
        enable_checkpointing=any(isinstance(one, SpecCheckpoint) for one in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=callbacks,
    )


def run(
    case: Case,
    folder: Path,
    policy: Path,
    *,
    devices: int = 1,
    context_parallel: int = 1,
    resume: Path | None = None,
    scored: list[StepBatch] | None = None,
) -> dict[str, Any]:
    """Everything that must not depend on the number of processes.

    `scored`: batches of an earlier run, with log-probs of the weights that it started from.
    """
    options = case.strategy if context_parallel > 1 else {}
    # A large eps: Adam would make weights of the rounding noise in gradients near zero.
    optim = OptimConfig(lr=1e-2, clip_norm=0.5, eps=1e-3)
    source = PolicySource(str(policy), init_seed=3, recompute=case.recompute)
    loss = case.loss()
    module = Typed(source, loss, optim if loss is not None else None, Eagle3(num_passes=3), None, optim)
    module.build_dtype = case.dtype
    collect, look = Collect(), Look(scored)
    strategy = MegatronStrategy(token_budget=BUDGET, context_parallel=context_parallel, timeout_s=60, **options)
    trainer = quiet(strategy, devices, [look, collect, SpecCheckpoint(str(folder), every_n_steps=1, keep=0)])
    data = Recorded()
    trainer.fit(module, datamodule=data, ckpt_path=str(resume) if resume else None)
    trainer.limit_val_batches = 1
    (validated,) = trainer.validate(module, datamodule=data, verbose=False)
    return {
        "metrics": collect.metrics,
        "gradients": collect.gradients if not options.get("distributed_optimizer") else [],
        "weights": {name: tensor.detach().clone() for name, tensor in module.named_parameters()},
        "hidden": look.hidden,
        "scores": look.scores,
        "validated": validated,
        "batches": data.batches,
    }


def fed_apart(policy: Path, world: int, rank: int) -> str:
    """What the strategy says to a data module that gives every process rollouts of its own."""
    optim = OptimConfig(lr=1e-2)
    module = SpecGRPO(PolicySource(str(policy)), GRPO(), optim)
    try:
        strategy = MegatronStrategy(token_budget=BUDGET, context_parallel=world, timeout_s=60)
        quiet(strategy, world, []).fit(module, FromMemory([StepBatch(make_rollouts(rank))] * 3))
    except ConfigError as error:
        return str(error)
    return "trained"


def main() -> None:
    torch.set_num_threads(1)
    out, policy, context_parallel = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    for name in sys.argv[4:]:
        if name == "apart":
            (out / f"{name}-{rank}.txt").write_text(fed_apart(policy, world, rank))
            continue
        if name not in CASES:
            context_rollouts.save(policy.parent / "talking", out, name, rank, world, context_parallel)
            continue
        found = run(CASES[name], out / f"{name}-checkpoints", policy, devices=world, context_parallel=context_parallel)
        torch.save(found, out / f"{name}-{rank}.pt")


if __name__ == "__main__":
    main()
