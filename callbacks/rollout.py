"""The Rollout callback: owns the engine, its weights and its life; fills the buffers that training and validation read.

One epoch is one rollout phase. At its start the engine gets the weights of the last update, samples completions for the
next prompts, the rewards score them, and the buffer gets one batch for each optimiser step of the phase. So every
batch was sampled from the policy version it says, and no batch is used twice.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from callbacks.collect import (
    AdvantageConfig,
    Ask,
    bag_from_plain,
    bag_to_plain,
    generation_metrics,
    make_asks,
    make_rollouts,
    repeated,
    reward_metrics,
    speculation_metrics,
)
from callbacks.gain import GainWatch
from callbacks.served import check_lengths, check_run, full_draft, reduced, serves_draft, write_engine_files
from callbacks.speaker import Speaker, consumed
from lightning_spec.batch import Completion, Prompt, Rollout, SpecStats, StepBatch
from lightning_spec.errors import ConfigError
from lightning_spec.metrics import MetricBag
from lightning_spec.recorded import save_rollouts
from lightning_spec.rollout.engine import Engine, Sampling
from lightning_spec.rollout.rewards import Reward, score

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, of) while something long runs."""


class RolloutCallback(pl.Callback):
    """Generates rollouts for training and validation.

    Args:
        engine: the rollout engine (`lightning_spec.rollout.vllm.VLLMEngine`, `...reference.ReferenceEngine`). Null for
            runs that learn from worked answers or recorded rollouts; the callback then does nothing. Each
            model replica runs one, which its ranks share.
        reward: what scores a completion (`lightning_spec.rollout.rewards`; `WeightedRewards` joins several). May be
            null only where the policy is frozen.
        sampling: how training rollouts are sampled. Without stop tokens the tokenizer's end token stops.
        samples_per_prompt: size of a prompt's group.
        validation_sampling: how validation completions are sampled; null is greedy with the training limits.
        validation_samples: completions of each validation prompt.
        validate_first: measure the validation prompts before the first update, so that a curve has its start.
        advantages: how rewards become advantages.
        overlong: `skip` leaves completions cut by the token limit out of the policy loss, `train` keeps them.
        pass_reward: rewards of at least this count as passed.
        verify_refit: compare every tensor inside the engine after every n-th refit; 0 never.
        workdir: where the checkpoints go that the engine starts from.
        record: folder for the rollouts of each phase as JSON lines, or null.
        seed: each sample's seed is drawn from (seed, step, prompt, number of the sample).
    """

    def __init__(
        self,
        engine: Engine | None = None,
        reward: Reward | None = None,
        *,
        sampling: Sampling,
        samples_per_prompt: int = 8,
        validation_sampling: Sampling | None = None,
        validation_samples: int = 1,
        validate_first: bool = True,
        advantages: AdvantageConfig = AdvantageConfig(),  # noqa: B008 (frozen)
        overlong: Literal["train", "skip"] = "train",
        pass_reward: float = 1.0,
        verify_refit: int = 0,
        workdir: str = "runs/default/engine",
        record: str | None = None,
        seed: int = 0,
    ) -> None:
        for name, value, least in (
            ("samples_per_prompt", samples_per_prompt, 1),
            ("validation_samples", validation_samples, 1),
            ("verify_refit", verify_refit, 0),
        ):
            if value < least:
                raise ConfigError(f"bad {name}", found=value, needed=f"at least {least}", key=f"rollout.{name}")
        self.engine = engine
        self.reward = reward
        self.sampling = sampling
        self.samples_per_prompt = samples_per_prompt
        self.validation_sampling = validation_sampling
        self.validation_samples = validation_samples
        self.validate_first = validate_first
        self.advantages = advantages
        self.overlong: Literal["train", "skip"] = overlong
        self.pass_reward = pass_reward
        self.verify_refit = verify_refit
        self.workdir = Path(workdir)
        self.record = Path(record) if record is not None else None
        self.seed = seed
        self.engine_version = 0
        self.phases = 0
        self.refits = 0
        self.completions = 0
        self.on_progress: Progress | None = None
        self._started = False
        self._speaker = Speaker()
        self._phase = MetricBag()
        self._acceptance: list[float] = []
        self._gain = GainWatch()

    # ---- Lightning's hooks ------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_run(self.engine, self.reward, self.advantages, trainer, pl_module, stage)
        self._speaker = Speaker.of(trainer.strategy)
        if self.engine is not None:
            self.engine = self._speaker.share(self.engine)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.engine is None:
            return
        check_lengths(self.engine, self.sampling.max_tokens, trainer, pl_module)
        buffer = trainer.datamodule.buffer  # type: ignore[attr-defined]
        # Resuming from an epoch's last batch, Lightning starts the next epoch without `on_train_epoch_start`.
        buffer.refill = lambda: self.fill(trainer, pl_module)
        for batch in buffer.pending:
            # The buffer's state holds rollouts only: their metrics follow from them, the phase's are in our state.
            batch.metrics.update(self._reward_metrics(batch.rollouts))
            batch.metrics.update(repeated(self._phase))
        draft: Any = pl_module.draft
        if self._acceptance and draft is not None:
            draft.set_acceptance(self._acceptance)
        if self.validate_first and trainer.global_step == 0 and trainer.enable_validation:
            self._measure_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.engine is None or trainer.datamodule.buffer.remaining:  # type: ignore[attr-defined]
            return
        self.fill(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.engine is None:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not data.val_batches:
            return
        rollouts, metrics = self.validation_rollouts(trainer, pl_module)
        batches = data.split_validation(rollouts)
        batches[0].metrics.update(metrics)
        data.val_buffer.set(batches)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # Lightning skips teardown when an exception ends the run.
        self.close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "engine_version": self.engine_version,
            "phases": self.phases,
            "refits": self.refits,
            "completions": self.completions,
            "phase": bag_to_plain(self._phase),
            "acceptance": list(self._acceptance),
            "speculation": self._gain.state,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # The engine's version is not restored: a new engine starts from exported files and is refitted to the step.
        self.phases = int(state_dict["phases"])
        self.refits = int(state_dict["refits"])
        self.completions = int(state_dict["completions"])
        self._phase = bag_from_plain(state_dict["phase"])
        self._acceptance = [float(value) for value in state_dict["acceptance"]]
        self._gain.state = dict(state_dict.get("speculation", {}))

    # ---- the engine -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the engine and what it started. Safe to call at any time, any number of times."""
        if self.reward is not None:
            self.reward.close()
        if self.engine is not None and self._started:
            self._started = False
            self.engine.close()

    def ready(self, trainer: pl.Trainer, module: Any) -> tuple[Engine, MetricBag]:
        """The engine, running, with the module's current weights; and what it took to get there."""
        assert self.engine is not None
        metrics = MetricBag()
        began = time.perf_counter()
        if not self._started:
            self._tell("start", 0, 1)
            self.engine.start(write_engine_files(self.engine, self.workdir, trainer, module))
            self._started = True
            _close_at_exit(self)
            self.engine.restore_speculation(self._gain.state)
            self.engine_version = 0
        else:
            self.engine.wake()
        metrics.add("time/engine_start", time.perf_counter() - began, reduction="max")
        began = time.perf_counter()
        if self.engine_version != module.version:
            self.refit(module)
        metrics.add("time/refit", time.perf_counter() - began, reduction="max")
        metrics.add("rollout/version", module.version, reduction="same")
        return self.engine, metrics

    def refit(self, module: Any, draft: Any = None) -> None:
        """Stream the module's weights into the engine; `draft` replaces the module's draft tensors.

        Every rank of the assembly calls it: each has a part of the weights to send.
        """
        assert self.engine is not None
        engine = self.engine
        self._tell("refit", 0, 1)
        self.refits += 1
        verify = bool(self.verify_refit) and self.refits % self.verify_refit == 0
        policy, tensors = module.policy_tensors(), None
        if serves_draft(engine):
            tensors = draft if draft is not None else module.draft_tensors()
        report = consumed(lambda: engine.refit(policy, tensors, version=module.version, verify=verify), policy, tensors)
        self.engine_version = report.version

    # ---- phases -----------------------------------------------------------------------------------------------------

    def fill(self, trainer: pl.Trainer, module: Any) -> None:
        """One rollout phase: generate, score, and put one batch for each update into the buffer."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        updates = int(data.buffer.updates_per_rollout)
        engine, metrics = self.ready(trainer, module)
        prompts = [data.next_prompts() for _ in range(updates)]
        asks = [make_asks(part, self.samples_per_prompt, seed=self.seed, step=module.version) for part in prompts]
        flat = [ask for part in asks for ask in part]
        completions = self._generate(engine, flat, self._sampling(data, self.sampling), metrics)
        metrics.update(self.generation_report(engine))
        self._weigh_passes(trainer, module, engine)
        self._gain.check(engine)
        batches: list[StepBatch] = []
        began, start = time.perf_counter(), 0
        for part in asks:
            done = completions[start : start + len(part)]
            start += len(part)
            rollouts = self._score(data, part, done)
            batch = StepBatch(rollouts, version=module.version)
            batch.metrics.update(self._reward_metrics(rollouts))
            batches.append(batch)
        metrics.add("time/reward", time.perf_counter() - began, reduction="max")
        began = time.perf_counter()
        batches = module.prepare_rollouts(batches, updates)
        metrics.add("time/score", time.perf_counter() - began, reduction="max")
        for number, batch in enumerate(batches):
            batch.metrics.update(repeated(metrics) if number else metrics)
        self._phase = metrics
        engine.sleep()
        if self.record is not None and self._speaker.speaks:
            rank = int(getattr(trainer.strategy, "data_parallel_rank", 0))
            name = f"step-{module.version:06d}-rank-{rank}.jsonl"
            save_rollouts(self.record / name, [rollout for batch in batches for rollout in batch.rollouts])
        data.buffer.set(batches)
        self.phases += 1
        self.completions += len(flat)

    def validation_rollouts(self, trainer: pl.Trainer, module: Any) -> tuple[list[Rollout], MetricBag]:
        """Completions of this rank's validation prompts with the current weights, and their metrics (`val/...`)."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        engine, _ = self.ready(trainer, module)
        asks = self.validation_asks(data)
        spent = MetricBag()
        completions = self._generate(engine, asks, self._validation(data), spent, phase="validate")
        rollouts = self._score(data, asks, completions)
        metrics = MetricBag()
        for name, metric in self._reward_metrics(rollouts).items():
            if name.startswith(("reward", "rollout/length", "rollout/truncated")):
                short = name.removeprefix("reward/").removeprefix("rollout/")
                metrics.add(f"val/{short}", metric.num, metric.den, metric.reduction)
        if engine.speculative:
            found = speculation_metrics(engine.last.spec, full_draft(engine), prefix="val")
            for name, metric in found.items():
                metrics.add(name, metric.num, metric.den, metric.reduction)
        metrics.add("val/tokens_per_second", engine.last.tokens, engine.last.seconds)
        engine.sleep()
        return rollouts, metrics

    def validation_asks(self, data: Any) -> list[Ask]:
        """The validation requests: always the same, so that two weights (or two drafts) can be compared."""
        prompts: Sequence[Prompt] = data.validation_prompts()
        return make_asks(prompts, self.validation_samples, seed=self.seed, step=0, kind="val")

    def measure(self, data: Any) -> SpecStats:
        """Generate the validation prompts once more with whatever the engine holds; acceptance only."""
        assert self.engine is not None
        self._generate(self.engine, self.validation_asks(data), self._validation(data), MetricBag(), phase="compare")
        return self.engine.last.spec

    def generation_report(self, engine: Engine) -> MetricBag:
        bag = generation_metrics(engine.last)
        if engine.speculative:
            bag.update(speculation_metrics(engine.last.spec, full_draft(engine)))
        return bag

    def _weigh_passes(self, trainer: pl.Trainer, module: Any, engine: Engine) -> None:
        """Tell a draft whose pass weights follow acceptance what was measured, over all ranks."""
        if module.draft is None or not getattr(module.draft, "follows_acceptance", False) or not engine.speculative:
            return
        positions = full_draft(engine)
        values = reduced(trainer, speculation_metrics(engine.last.spec, positions)).values()
        if values["spec/drafts"]:
            self._acceptance = [values[f"spec/accepted_at_{position}"] for position in range(positions)]
            module.draft.set_acceptance(self._acceptance)

    def _validation(self, data: Any) -> Sampling:
        if self.validation_sampling is not None:
            return self._sampling(data, self.validation_sampling)
        limits = self.sampling
        return Sampling(
            temperature=0.0,
            max_tokens=limits.max_tokens,
            stop_token_ids=limits.stop_token_ids or tuple(data.stop_token_ids),
        )

    @staticmethod
    def _sampling(data: Any, sampling: Sampling) -> Sampling:
        stops = tuple(sampling.stop_token_ids) or tuple(data.stop_token_ids)
        return Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, stops, sampling.seed)

    def _generate(
        self, engine: Engine, asks: Sequence[Ask], sampling: Sampling, metrics: MetricBag, phase: str = "rollout"
    ) -> list[Completion]:
        self._tell(phase, 0, len(asks))
        began = time.perf_counter()
        requests = [ask.request for ask in asks]
        done = engine.generate(requests, sampling, lambda now, of: self._tell(phase, now, of)) if asks else []
        metrics.add("time/rollout", time.perf_counter() - began, reduction="max")
        self._gain.generated(engine)
        return done

    def _score(self, data: Any, asks: Sequence[Ask], completions: Sequence[Completion]) -> list[Rollout]:
        scored = self._speaker.run(
            lambda: [
                score(self.reward, ask.prompt, completion, data.decode(completion.tokens)) if self.reward else (0.0, {})
                for ask, completion in zip(asks, completions, strict=True)
            ]
        )
        return make_rollouts(asks, completions, scored, advantages=self.advantages, overlong=self.overlong)

    def _reward_metrics(self, rollouts: Sequence[Rollout]) -> MetricBag:
        return reward_metrics(rollouts, self.pass_reward if self.reward is not None else None)

    def _measure_start(self, trainer: pl.Trainer, module: Any) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not data.val_batches:
            return
        _, metrics = self.validation_rollouts(trainer, module)
        values = reduced(trainer, metrics).values()
        for logger in trainer.loggers if trainer.is_global_zero else []:
            logger.log_metrics(values, step=0)

    def _tell(self, phase: str, done: int, of: int) -> None:
        if self.on_progress is not None:
            self.on_progress(phase, done, of)


def find_rollout(trainer: pl.Trainer) -> RolloutCallback | None:
    """The run's rollout callback, if it has one with an engine."""
    found = [c for c in trainer.callbacks if isinstance(c, RolloutCallback)]  # type: ignore[attr-defined]
    return found[0] if found and found[0].engine is not None else None


def _close_at_exit(callback: RolloutCallback) -> None:
    """An engine outlives neither the callback nor the interpreter, whatever ended them."""
    reference = weakref.ref(callback)

    def close() -> None:
        if (alive := reference()) is not None:
            try:
                alive.close()
            except Exception as error:
                rank_zero_warn(f"closing the rollout engine at exit failed: {error}")

    atexit.register(close)
