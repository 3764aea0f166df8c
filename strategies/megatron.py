"""MegatronStrategy: one optimiser step is one call of Megatron's forward-backward schedule under Lightning's loop.

Lightning keeps its automatic optimization (counters, schedulers, callbacks, loggers); `training_step` runs the whole
schedule over micro-batches and the gradient reductions, and Lightning's own backward is switched off. The module
follows the protocol of `lightning_spec.module.SpecGRPO`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_spec.batch import PackedBatch, StepBatch, pack_documents
from lightning_spec.draft.base import AttentionMode
from lightning_spec.errors import ConfigError
from lightning_spec.metrics import MetricBag
from lightning_spec.optim import OptimConfig
from lightning_spec.parallel.groups import ParallelSizes, strategy_key
from lightning_spec.parallel.optimizer import MODELS, JointOptimizer, ModelOptimizer, make_scheduler
from lightning_spec.parallel.random_state import document_seed, micro_seed, seed_step
from lightning_spec.policy import PolicyModel
from lightning_spec.policy.core_attention import SplitAttention
from strategies import estimate
from strategies.attention import AttentionChoice
from strategies.checkpoints import CheckpointedStrategy
from strategies.pipeline import Pipeline
from strategies.steps import MicroSteps, Part
from strategies.wrap import Wrapped, parts_of, refuse_shared_parameters


class MegatronStrategy(CheckpointedStrategy):
    """Trains a policy and its draft with Megatron-core's schedule, gradient buffers and optimizers.

    Args:
        token_budget: tokens per micro-batch; a longer sequence gets a micro-batch of its own.
        context_parallel: ranks that split the tokens of each sequence.
        policy_attention: how such ranks attend in the policy: "ring" (keys and values travel) or "ulysses" (all-to-all
            over heads, whose numbers must divide).
        draft_attention: the same for the draft: "stream" (trunk gathered once, chunks of rows run all passes), "ring",
            "ulysses", or "auto": stream where its memory fits, else ring.
        memory_limit_gib: memory of a device that "auto" may count on, in GiB; null: no limit.
        tensor_parallel: ranks that split each layer and the vocabulary.
        sequence_parallel: split activations outside attention and MLP over the tensor-parallel ranks.
        pipeline_parallel: pipeline stages.
        virtual_pipeline: model chunks per pipeline rank (the interleaved schedule).
        pipeline_layout: the policy's layers on each virtual stage, in order; "auto" gives the stage that hosts the
            draft fewer, so that stages take equal time; null: as many on each.
        draft_stage: pipeline rank that hosts the draft: "last", a number, or "spread": all of them, each with some of
            the micro-batches.
        tap_transport: how the draft's features travel: shared memory on one host, a process group of their own across
            hosts; "auto" chooses for each pair of ranks.
        tap_rows: rows that a landing slot holds; null: those of the largest micro-batch.
        expert_parallel: ranks that split the experts of a mixture.
        precision: "fp32", or "bf16": bf16 weights and activations, fp32 gradients and main weights.
        distributed_optimizer: shard optimiser state over the data x context parallel ranks.
        timeout_s: bound of every collective, and of every wait for the draft's features.

    Data parallelism is what remains of `trainer.devices` x `trainer.num_nodes`. The ranks of one replica share rollouts
    and one engine. No kind of parallelism changes results.
    """

    def __init__(
        self,
        token_budget: int,
        context_parallel: int = 1,
        policy_attention: SplitAttention = "ring",
        draft_attention: AttentionMode = "auto",
        memory_limit_gib: float | None = None,
        tensor_parallel: int = 1,
        sequence_parallel: bool = False,
        pipeline_parallel: int = 1,
        virtual_pipeline: int = 1,
        pipeline_layout: list[int] | Literal["auto"] | None = None,
        draft_stage: int | Literal["last", "spread"] = "last",
        tap_transport: Literal["auto", "shared_memory", "group"] = "auto",
        tap_rows: int | None = None,
        expert_parallel: int = 1,
        precision: Literal["fp32", "bf16"] = "fp32",
        distributed_optimizer: bool = False,
        timeout_s: float = 1800.0,
        accelerator: L.pytorch.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
    ) -> None:
        _require(timeout_s > 0, "timeout_s", timeout_s, "seconds above 0")
        sizes = ParallelSizes(tensor_parallel, pipeline_parallel, virtual_pipeline, context_parallel, expert_parallel)
        super().__init__(sizes, timeout_s, accelerator, parallel_devices, cluster_environment)
        _require(
            isinstance(token_budget, int) and token_budget >= 1, "token_budget", token_budget, "a positive integer"
        )
        _require(precision in ("fp32", "bf16"), "precision", precision, "fp32 or bf16")
        _require(
            not sequence_parallel or tensor_parallel > 1, "sequence_parallel", True, "false, or tensor_parallel above 1"
        )
        _require(tap_rows is None or tap_rows >= 1, "tap_rows", tap_rows, "at least 1 row, or null")
        self.token_budget = token_budget
        self.attention = AttentionChoice(policy_attention, draft_attention, memory_limit_gib)
        self.sequence_parallel = sequence_parallel
        self.precision = precision
        self.distributed_optimizer = distributed_optimizer
        self.stages = Pipeline(self, pipeline_layout, draft_stage, tap_transport, tap_rows)
        self._wrapped = Wrapped()
        self._steps: MicroSteps | None = None

    # ---- set-up -----------------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Megatron places its own parameters.
        yield

    @property
    def policy_layout(self) -> dict[str, Any]:
        """What the module passes on when it builds its part of the policy."""
        return self.stages.policy_layout(self._module)

    @property
    def hosts_draft(self) -> bool:
        """Whether the draft's parameters are on this rank."""
        return self.stages.hosts_draft

    def assembler(self, name: str) -> Any:
        """Makes whole tensors of what ranks hold of the "policy" or the "draft", for the ranks that speak; None where
        they have them."""
        return self.stages.assembler(self._module, name)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        assert self.accelerator is not None
        module = self._module
        self.accelerator.setup(trainer)
        self._refuse_trainer_settings(trainer)
        self._refuse_trainer_precision()
        models = self._models()
        refuse_shared_parameters(models)
        self.attention.apply(module, self.context.context, self.sizes.tensor_parallel)
        for name, parts in models.items():
            self._prepare(name, parts)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            estimate.report(self, module, trainer)
            self._wrap_models(models)
            trainer.fit_loop._skip_backward = True
            self.setup_optimizers(trainer)
        self._make_steps()
        self.setup_precision_plugin()

    def _models(self) -> dict[str, list[nn.Module]]:
        """Policy and draft, as their parts on this rank; without those that have none here."""
        found = {name: parts_of(getattr(self._module, name, None)) for name in MODELS}
        return {name: parts for name, parts in found.items() if parts}

    def _refuse_trainer_settings(self, trainer: L.Trainer) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                "the strategy accumulates micro-batches itself",
                found=trainer.accumulate_grad_batches,
                needed="1; a larger step is a larger batch of the data module",
                key="trainer.accumulate_grad_batches",
            )
        if trainer.gradient_clip_val is not None:
            raise ConfigError(
                "Lightning would clip with each rank's local norm",
                found=trainer.gradient_clip_val,
                needed="null; set clip_norm of model.policy_optim and model.draft_optim",
                key="trainer.gradient_clip_val",
            )
        if not self._module.automatic_optimization:
            raise ConfigError(
                "manual optimization",
                found=False,
                needed="True",
                key=f"{type(self._module).__name__}.automatic_optimization",
            )

    def _refuse_trainer_precision(self) -> None:
        # Lightning puts the Trainer's choice into this plugin; the default is the plain class.
        if type(self.precision_plugin) is not Precision:
            raise ConfigError(
                "the strategy has its own precision",
                found=str(self.precision_plugin.precision),
                needed="the Trainer's default; set the strategy's precision to fp32 or bf16",
                key="trainer.precision",
            )

    def _prepare(self, name: str, parts: Sequence[nn.Module]) -> None:
        """Freeze what has no optimiser, cast to the strategy's precision, make the ranks' weights equal."""
        dtypes = {param.dtype for part in parts for param in part.parameters()}
        if self.precision != "bf16" and dtypes & {torch.bfloat16, torch.float16}:
            raise ConfigError(
                f"the {name} was built in half precision",
                found=sorted(str(dtype) for dtype in dtypes),
                needed="float32 weights, or the strategy's precision: bf16",
                key=strategy_key("precision"),
            )
        for part in parts:
            if getattr(self._module, f"{name}_optim", None) is None:
                part.requires_grad_(False)
            if self.precision == "bf16":
                part.to(torch.bfloat16)
                if isinstance(part, PolicyModel):
                    part.config.pipeline_dtype = torch.bfloat16  # of what the stages receive
        ranks = self.tokens if name == "policy" else self.stages.draft_ranks
        for part in parts:
            ranks.broadcast_module(part)

    @override
    def model_to_device(self) -> None:
        for parts in self._models().values():
            for part in parts:
                part.to(self.root_device)

    def _wrap_models(self, models: dict[str, list[nn.Module]]) -> None:
        if all(getattr(self._module, f"{name}_optim", None) is None for name in MODELS):
            raise ConfigError(
                "nothing to train", found="all parameters frozen", needed="policy_optim or draft_optim", key="model"
            )
        options = {
            "grad_reduce_in_fp32": self.precision == "bf16",
            "use_distributed_optimizer": self.distributed_optimizer,
            "overlap_grad_reduce": False,
        }
        self._wrapped.wrap(models, self._module.policy.config, options, self.stages.draft_ranks)

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)

    def make_optimizer(self, policy: OptimConfig | None, draft: OptimConfig | None, total_steps: int) -> dict[str, Any]:
        """What the module's `configure_optimizers` returns.

        Args:
            policy: None where the policy is frozen.
            draft: None where there is no draft or it is frozen.
            total_steps: optimiser steps of the run, for configurations that do not set their own.
        """
        configs = {name: config for name, config in (("policy", policy), ("draft", draft)) if config is not None}
        here = {name for name in configs if name == "policy" or self.hosts_draft}
        if not configs or here != self._wrapped.names:
            raise ConfigError(
                "optimisers and trained models differ",
                found=f"optimisers for {sorted(configs)}, parameters to train in {sorted(self._wrapped.names)}",
                needed="an optimiser for each model with parameters to train",
                key="model.policy_optim",
            )
        models = {
            name: ModelOptimizer(
                self._wrapped.chunks(name),
                configs[name],
                distributed=self.distributed_optimizer,
                replicated=name == "draft",
            )
            for name in sorted(here)
        }
        absent = {name: config for name, config in configs.items() if name not in here}
        optimizer = JointOptimizer(models, absent)
        scheduler = make_scheduler(optimizer, configs, total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}

    def _make_steps(self) -> None:
        """What runs micro-batches. The channels of the draft's features are set up here, before any schedule runs."""
        bare = self._models()
        live = {name: self._wrapped.get(name) or bare.get(name, []) for name in MODELS}
        draft = live["draft"][0] if live["draft"] else None
        taps = self.stages.taps(self._module)
        if taps is not None and (text := taps.describe()) and self.is_global_zero:
            print(text, flush=True)
        self._steps = MicroSteps(self._module, live["policy"], draft, taps)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        # Micro-batches are moved, one by one. Lightning's walk would refuse the frozen dataclasses of a step batch.
        return batch

    # ---- steps ------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, batch: StepBatch, batch_idx: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        """One optimiser step's forward, backward and reductions; the optimizer steps after it returns."""
        module = self._module
        assert self._step_seed is not None
        seed_step(self._step_seed, module.trainer.global_step, self.data.rank)
        self._joint.zero_grad()
        self._wrapped.zero()
        parts = self._run(batch, train=True)
        self._wrapped.finish()
        metrics, loss = self._gather(batch, parts, self._joint.measure())
        module.step_done(metrics, batch)
        return loss

    def _run(self, batch: StepBatch, *, train: bool) -> list[Part]:
        assert self._steps is not None
        micro = self._micro_batches(batch)
        return self._steps.run(micro, self._totals(micro), step=self._module.trainer.global_step, train=train)

    def _micro_batches(self, batch: StepBatch) -> list[PackedBatch]:
        """This replica's micro-batches: the same, whole, on each of its ranks."""
        seed, step = self._step_seed or 0, self._module.trainer.global_step
        micro = self._module.micro_batches(batch, self.token_budget)
        if self.replica.size > 1:
            # Ranks that attend over different documents would wait for each other, or learn from a mixture.
            every = self.replica.gather([one.digest() for one in micro])
            if any(other != every[0] for other in every):
                raise ConfigError(
                    "ranks of one model replica were given different rollouts",
                    found=f"{[len(other) for other in every]} micro-batches",
                    needed="the same batches: shard data by the strategy's data_parallel_rank, not by the process",
                    key="data",
                )
        micro += [pack_documents([], [])] * self.stages.idle(len(micro))
        return [
            replace(
                one.to(self.root_device),
                seed=micro_seed(seed, step, self.data.rank, index),
                document_seeds=[document_seed(seed, step, self.data.rank, place) for place in one.rollout_index],
            )
            for index, one in enumerate(micro)
        ]

    def _totals(self, micro: list[PackedBatch]) -> dict[str, Tensor]:
        """Global normalisers: counted on whole micro-batches, so reduced over exactly the ranks that split the data."""
        totals = self.data.sum(self._module.counts(micro))
        return {name: value.to(self.root_device) for name, value in totals.items()}

    def _gather(
        self, batch: StepBatch, parts: Sequence[Part], measured: MetricBag | None = None
    ) -> tuple[MetricBag, Tensor]:
        """Metrics and loss over all micro-batches of all ranks, equal on every rank."""
        mine = self._own(batch.metrics if self.pipeline.first else MetricBag())
        loss = torch.zeros((), dtype=torch.float64)
        for part, metrics in parts:
            mine.update(metrics)
            loss += part.to("cpu", torch.float64)
        if measured is not None:
            mine.update(measured)
        # A rank without micro-batches has fewer names: bags are merged as wholes, in rank order.
        total = MetricBag()
        for stage in self.pipeline.gather(self.tokens.gather((mine, loss))):
            for bag, value in stage:
                total.update(bag)
                total.add("loss", value, 1.0, "sum")
        return total, total["loss"].num.to(self.root_device, torch.float32)

    def _own(self, shared: MetricBag) -> MetricBag:
        """What this rank adds of metrics that the context-parallel ranks of a replica all hold: one of them speaks."""
        mine = MetricBag()
        if self.context.rank == 0:
            mine.update(shared)
        return mine

    def reduce_metrics(self, bag: MetricBag) -> MetricBag:
        """Merge metrics of rollouts over the data-parallel ranks; they may hold different names. All ranks call it."""
        total = MetricBag()
        for part in self.tokens.gather(self._own(bag)):
            total.update(part)
        return total

    @override
    def validation_step(self, batch: StepBatch, *args: Any, **kwargs: Any) -> None:
        """Forward only; data ranks need equal numbers of validation batches."""
        metrics, _ = self._gather(batch, self._run(batch, train=False))
        self._module.validation_done(metrics)

    def score(self, module: Any, batch: StepBatch) -> list[tuple[PackedBatch, Tensor]]:
        """Each micro-batch of `batch` with `module.score`'s row-aligned log-probs [T], on the CPU, on every rank."""
        assert self._steps is not None
        micro = self._micro_batches(batch)
        scores = self.pipeline.broadcast(self._steps.score(micro), self.pipeline.size - 1)
        return [(one.to("cpu"), scored) for one, scored in zip(micro, scores, strict=True)]

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # Never reached while `_skip_backward` holds: the schedule has run the backward pass.
        return closure_loss.detach()

    @override
    def teardown(self) -> None:
        if self._steps is not None and self._steps.taps is not None:
            self._steps.taps.close()
        super().teardown()


def _require(good: bool, field: str, found: Any, needed: str) -> None:
    if not good:
        raise ConfigError(f"bad {field}", found=found, needed=needed, key=strategy_key(field))
