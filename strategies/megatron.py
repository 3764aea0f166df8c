"""MegatronStrategy: one optimiser step is one call of Megatron's forward-backward schedule under Lightning's loop.

Lightning keeps its automatic optimization (counters, schedulers, callbacks, loggers); `training_step` runs the whole
schedule over micro-batches and the gradient reductions, and Lightning's own backward is switched off. The module
follows the protocol of `lightning_spec.module.SpecGRPO`.
"""

from __future__ import annotations

from collections.abc import Generator
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

from lightning_spec.batch import PackedBatch, StepBatch
from lightning_spec.draft.base import AttentionMode
from lightning_spec.errors import ConfigError
from lightning_spec.metrics import MetricBag
from lightning_spec.optim import OptimConfig
from lightning_spec.parallel.groups import ParallelSizes, strategy_key
from lightning_spec.parallel.optimizer import MODELS, JointOptimizer, ModelOptimizer, make_scheduler
from lightning_spec.parallel.random_state import micro_seed, seed_step
from lightning_spec.parallel.schedule import run_forward, run_forward_backward
from lightning_spec.policy.core_attention import SplitAttention
from strategies import estimate
from strategies.attention import AttentionChoice
from strategies.checkpoints import CheckpointedStrategy


class MegatronStrategy(CheckpointedStrategy):
    """Trains a policy and its draft with Megatron-core's schedule, gradient buffers and optimizers.

    Args:
        token_budget: tokens per micro-batch; a longer sequence gets a micro-batch of its own.
        context_parallel: ranks that split the tokens of each sequence. They share rollouts, and one engine.
        policy_attention: how such ranks attend in the policy: "ring" (keys and values travel) or "ulysses" (all-to-all
            over heads, whose numbers must divide).
        draft_attention: the same for the draft: "stream" (trunk gathered once, chunks of rows run all passes), "ring",
            "ulysses", or "auto": stream where its memory fits, else ring.
        memory_limit_gib: memory of a device that "auto" may count on, in GiB; null: no limit.
        tensor_parallel: ranks that split each layer. Not supported yet, as all sizes above 1 below.
        pipeline_parallel: pipeline stages.
        virtual_pipeline: model chunks per pipeline stage.
        expert_parallel: ranks that split the experts.
        sequence_parallel: split activations outside attention and MLP over the tensor-parallel ranks.
        precision: "fp32", or "bf16": bf16 weights and activations, fp32 gradients and main weights.
        distributed_optimizer: shard optimiser state over the data x context parallel ranks.
        timeout_s: bound of every collective.

    Data parallelism is what remains of `trainer.devices` x `trainer.num_nodes`. Neither it nor context parallelism
    changes results.
    """

    def __init__(
        self,
        token_budget: int,
        context_parallel: int = 1,
        policy_attention: SplitAttention = "ring",
        draft_attention: AttentionMode = "auto",
        memory_limit_gib: float | None = None,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        virtual_pipeline: int = 1,
        expert_parallel: int = 1,
        sequence_parallel: bool = False,
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
        self.token_budget = token_budget
        self.attention = AttentionChoice(policy_attention, draft_attention, memory_limit_gib)
        self.sequence_parallel = sequence_parallel
        self.precision = precision
        self.distributed_optimizer = distributed_optimizer
        self._wrapped: dict[str, Any] = {}

    # ---- set-up -----------------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Megatron places its own parameters.
        yield

    @override
    def setup(self, trainer: L.Trainer) -> None:
        assert self.accelerator is not None
        module = self._module
        self.accelerator.setup(trainer)
        self._refuse_trainer_settings(trainer)
        self._refuse_trainer_precision()
        models = {name: model for name in MODELS if (model := getattr(module, name, None)) is not None}
        _refuse_shared_parameters(models)
        self.attention.apply(module, self.context.context)
        for name, model in models.items():
            self._prepare(name, model)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            estimate.report(self, module, trainer)
            self._wrap_models()
            trainer.fit_loop._skip_backward = True
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

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

    def _prepare(self, name: str, model: nn.Module) -> None:
        """Freeze what has no optimiser, cast to the strategy's precision, make the ranks' weights equal."""
        if getattr(self._module, f"{name}_optim", None) is None:
            model.requires_grad_(False)
        dtypes = {param.dtype for param in model.parameters()}
        if self.precision == "bf16":
            model.to(torch.bfloat16)
        elif dtypes & {torch.bfloat16, torch.float16}:
            raise ConfigError(
                f"the {name} was built in half precision",
                found=sorted(str(dtype) for dtype in dtypes),
                needed="float32 weights, or the strategy's precision: bf16",
                key=strategy_key("precision"),
            )
        self.tokens.broadcast_module(model)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _wrap_models(self) -> None:
        """Put what is trained behind Megatron's DistributedDataParallel: gradient buffers, summed over the
        ranks that split data or tokens."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        module = self._module
        config = module.policy.config
        config.calculate_per_token_loss = True  # neither the schedule nor the buffers rescale
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=self.precision == "bf16",
            use_distributed_optimizer=self.distributed_optimizer,
            overlap_grad_reduce=False,
        )
        for name in MODELS:
            model = getattr(module, name, None)
            trained = model is not None and any(param.requires_grad for param in model.parameters())
            known = self._wrapped.get(name)
            if not trained:
                self._wrapped.pop(name, None)
            elif known is None or known.module is not model:
                self._wrapped[name] = DistributedDataParallel(config, options, model)
        if not self._wrapped:
            raise ConfigError(
                "nothing to train", found="all parameters frozen", needed="policy_optim or draft_optim", key="model"
            )

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
        if set(configs) != set(self._wrapped):
            raise ConfigError(
                "optimisers and trained models differ",
                found=f"optimisers for {sorted(configs)}, parameters to train in {sorted(self._wrapped)}",
                needed="an optimiser for each model with parameters to train",
                key="model.policy_optim",
            )
        optimizer = JointOptimizer(
            {
                name: ModelOptimizer(
                    getattr(self._module, name), self._wrapped[name], config, distributed=self.distributed_optimizer
                )
                for name, config in configs.items()
            }
        )
        scheduler = make_scheduler(optimizer, configs, total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        # Micro-batches are moved, one by one. Lightning's walk would refuse the frozen dataclasses of a step batch.
        return batch

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _live(self, name: str) -> nn.Module | None:
        """The wrapped model where it is trained, else the model itself."""
        return self._wrapped.get(name) or getattr(self._module, name, None)

    @override
    def training_step(self, batch: StepBatch, batch_idx: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        """One optimiser step's forward, backward and reductions; the optimizer steps after it returns."""
        module = self._module
        assert self._step_seed is not None
        seed_step(self._step_seed, module.trainer.global_step, self.data.rank)
        self._joint.zero_grad()
        for wrapped in self._wrapped.values():
            wrapped.zero_grad_buffer()
        micro = self._micro_batches(batch)
        totals = self._totals(micro)
        draft = self._live("draft")

        def forward(policy: nn.Module, one: PackedBatch) -> tuple[Tensor, tuple[Tensor, MetricBag]]:
            output = module.micro_step(policy, draft, one, totals)
            return output.loss, (output.loss.detach().clone(), output.metrics)

        policy = self._live("policy")
        assert policy is not None
        parts = run_forward_backward(policy, micro, forward)
        self._finish_gradients()
        metrics, loss = self._gather(batch, parts)
        metrics.update(self._joint.measure())
        module.step_done(metrics, batch)
        return loss

    def _micro_batches(self, batch: StepBatch) -> list[PackedBatch]:
        """This replica's micro-batches: the same, whole, on each of its context-parallel ranks."""
        seed, step = self._step_seed or 0, self._module.trainer.global_step
        micro = self._module.micro_batches(batch, self.token_budget)
        if self.context.size > 1:
            # Ranks that attend over different documents would wait for each other, or learn from a mixture.
            every = self.context.gather([one.digest() for one in micro])
            if any(other != every[0] for other in every):
                raise ConfigError(
                    "context-parallel ranks of one replica were given different rollouts",
                    found=f"{[len(other) for other in every]} micro-batches",
                    needed="the same batches: shard data by the strategy's data_parallel_rank, not by the process",
                    key="data",
                )
        return [
            replace(one.to(self.root_device), seed=micro_seed(seed, step, self.data.rank, index))
            for index, one in enumerate(micro)
        ]

    def _totals(self, micro: list[PackedBatch]) -> dict[str, Tensor]:
        """Global normalisers: counted on whole micro-batches, so reduced over exactly the ranks that split the data."""
        totals = self.data.sum(self._module.counts(micro))
        return {name: value.to(self.root_device) for name, value in totals.items()}

    def _finish_gradients(self) -> None:
        from megatron.core.distributed import finalize_model_grads

        if "policy" in self._wrapped:
            finalize_model_grads([self._wrapped["policy"]])
        if "draft" in self._wrapped:
            self._wrapped["draft"].finish_grad_sync()

    def _gather(self, batch: StepBatch, parts: list[tuple[Tensor, MetricBag]]) -> tuple[MetricBag, Tensor]:
        """Metrics and loss over all micro-batches of all ranks, equal on every rank."""
        mine = self._own(batch.metrics)
        loss = torch.zeros((), dtype=torch.float64)
        for part, metrics in parts:
            mine.update(metrics)
            loss += part.to("cpu", torch.float64)
        # A rank without micro-batches has fewer names: bags are merged as wholes, in rank order.
        total = MetricBag()
        for bag, value in self.tokens.gather((mine, loss)):
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
        module = self._module
        micro = self._micro_batches(batch)
        totals = self._totals(micro)
        draft = self._live("draft")
        policy = self._live("policy")
        assert policy is not None

        def forward(policy: nn.Module, one: PackedBatch) -> tuple[Tensor, MetricBag]:
            output = module.micro_step(policy, draft, one, totals)
            return output.loss.detach().clone(), output.metrics

        metrics, _ = self._gather(batch, run_forward(policy, micro, forward))
        module.validation_done(metrics)

    def score(self, module: Any, batch: StepBatch) -> list[tuple[PackedBatch, Tensor]]:
        """Each micro-batch of `batch` with `module.score`'s row-aligned log-probs [T], on the CPU."""
        micro = self._micro_batches(batch)
        policy = self._live("policy")
        assert policy is not None
        return run_forward(policy, micro, lambda policy, one: (one.to("cpu"), module.score(policy, one).cpu()))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # Never reached while `_skip_backward` holds: the schedule has run the backward pass.
        return closure_loss.detach()


def _refuse_shared_parameters(models: dict[str, nn.Module]) -> None:
    owner: dict[int, str] = {}
    for name, model in models.items():
        for parameter_name, param in model.named_parameters():
            if owner.setdefault(id(param), name) != name:
                raise ConfigError(
                    "policy and draft share a parameter",
                    found=f"{name}.{parameter_name}",
                    needed="a borrowed tensor handed over detached in each step",
                    key="model.draft",
                )


def _require(good: bool, field: str, found: Any, needed: str) -> None:
    if not good:
        raise ConfigError(f"bad {field}", found=found, needed=needed, key=strategy_key(field))
