"""One optimizer object for policy and draft, each with its own AdamW, clip norm and groups.

Lightning's automatic optimization knows one optimizer. `JointOptimizer` is that one: its groups (always the same four,
in the same order, on every rank, empty where there is nothing) carry learning rate and weight decay, and below it each
model has its own Megatron optimizers, so neither model's gradients reach the other's clip factor (CASES.md F5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_spec.errors import CheckpointError
from lightning_spec.metrics import MetricBag
from lightning_spec.optim import OptimConfig, learning_rate_factor
from lightning_spec.parallel.adam import Adam
from lightning_spec.parallel.placement import Placement
from lightning_spec.parallel.sharded import NamedPieces, Piece

MODELS = ("policy", "draft")
KINDS = ("decay", "no_decay")


@dataclass(slots=True)
class ClipReport:
    """What `measure` found: the gradient's global 2-norm before clipping, and what it is multiplied by."""

    norm: float
    factor: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a model that this rank trains: all of it, or one of the virtual pipeline stages that the rank holds."""

    module: nn.Module
    wrapped: Any
    """Megatron's `DistributedDataParallel` of `module`, whose groups say which ranks sum the gradients."""
    placements: Mapping[str, Sequence[Placement]]
    """By parameter name inside `module`: where the parameter's rows stand in the checkpoint's tensors."""

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: param for name, param in self.module.named_parameters() if param.requires_grad}


class ModelOptimizer:
    """AdamW of one model on the gradient buffers of its Megatron DDP wrappers.

    Args:
        chunks: the model's parts on this rank, in order of virtual pipeline stage.
        config: rates and clip norm.
        distributed: shard the state over the ranks that sum the gradients (Megatron's DistributedOptimizer).
        replicated: every rank that has the model has all of it (a draft). The norm then involves these ranks only, and
            none of the other pipeline stages. Otherwise (a policy) the norm is over the ranks of a replica, each
            parameter counted once, and all of them must call `measure` together.
    """

    def __init__(
        self, chunks: Sequence[Chunk], config: OptimConfig, *, distributed: bool, replicated: bool = False
    ) -> None:
        self.config = config
        self.chunks = list(chunks)
        trained = [param for chunk in chunks for param in chunk.trained.values()]
        self.groups: dict[str, list[nn.Parameter]] = {kind: [] for kind in KINDS}
        for param in trained:
            # Norms and biases have one axis.
            self.groups["decay" if param.ndim > 1 else "no_decay"].append(param)
        self.half = any(param.dtype in (torch.bfloat16, torch.float16) for param in trained)
        self._step_count = torch.zeros((), dtype=torch.int64)
        self._adams = self._build(distributed, replicated)

    def _build(self, distributed: bool, replicated: bool) -> list[Adam]:
        from megatron.core import parallel_state

        wrapped = [chunk.wrapped for chunk in self.chunks]
        world = parallel_state.get_intra_distributed_optimizer_instance_group()

        def one(experts: bool, norm_group: dist.ProcessGroup | None) -> Adam:
            groups = {
                kind: [param for param in params if _is_expert(param) == experts]
                for kind, params in self.groups.items()
            }
            buffers = [each.expert_parallel_buffers if experts else each.buffers for each in wrapped]
            return Adam(
                groups,
                wrapped,
                buffers,
                self.config,
                norm_group=norm_group,
                copies=not (replicated or experts),
                half=self.half,
                distributed=distributed,
            )

        if replicated:
            # With sharded state each rank has taken over its own range of the gradient only.
            return [one(False, wrapped[0].intra_dp_cp_group if distributed else None)]
        adams = [one(False, world if distributed else parallel_state.get_model_parallel_group())]
        # By the whole model, not by what this rank holds: a stage of dense layers adds its zero to the experts' norm.
        if any(getattr(getattr(chunk.module, "config", None), "num_moe_experts", None) for chunk in self.chunks):
            experts = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
            adams.append(one(True, world if distributed else experts))
        return adams

    @property
    def steps(self) -> int:
        """Steps that were not skipped."""
        return int(self._step_count)

    def release_gradients(self) -> None:
        """Let go of the gradients that `measure` took over."""
        for adam in self._adams:
            adam.release_gradients()

    def measure(self) -> ClipReport:
        """Take the reduced gradients over and measure their global norm. Collective over the model's ranks."""
        norm = math.sqrt(sum(adam.squared_norm() for adam in self._adams))
        limit = self.config.clip_norm
        return ClipReport(norm, limit / (norm + 1e-6) if limit > 0 and norm > limit else 1.0)

    def step(self, report: ClipReport, rates: dict[str, tuple[float, float]]) -> bool:
        """Clip and step; False, and nothing moves, where the norm is not finite. `rates`: kind -> (lr, decay)."""
        if not report.finite:
            return False
        for adam in self._adams:
            adam.step(report.factor, rates)
        self._step_count += 1
        return True

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """This rank's part of the state, by the name of the tensor that it belongs to, and the number of steps."""
        yield "steps", Piece.whole(self._step_count)
        stepped = {
            param: (adam.state(main), main, first) for adam in self._adams for param, main, first in adam.stepped()
        }
        for chunk in self.chunks:
            for name, param in chunk.trained.items():
                if param not in stepped:
                    continue  # a sharded optimiser: other ranks have all of it
                state, main, first = stepped[param]
                tensors = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
                if param.dtype != main.dtype:
                    tensors["master"] = main
                for placement in chunk.placements[name]:
                    for kind, tensor in tensors.items():
                        for piece in _held(placement, tensor, first, param):
                            yield f"{kind}.{placement.name}", piece

    def loaded(self, *, with_state: bool) -> None:
        """Tell the optimizer that the tensors of `pieces`, or only the model's, were overwritten."""
        if not with_state:
            self._step_count.zero_()
        for adam in self._adams:
            if not with_state:
                adam.reload_main_copies()
            adam.set_steps(self.steps)


def _is_expert(param: nn.Parameter) -> bool:
    """Megatron's mark of a parameter whose gradient is summed over the ranks that hold the same experts."""
    return not getattr(param, "allreduce", True)


def _held(placement: Placement, tensor: Tensor, first: int, param: nn.Parameter) -> Iterator[Piece]:
    if tensor.shape == param.shape:
        return placement.pieces(tensor)
    return placement.pieces_of_range(tensor, first, tuple(param.shape))


class JointOptimizer(Optimizer):
    """Steps policy and draft together. `step` expects gradients that are reduced over ranks already.

    Args:
        models: "policy" and / or "draft", those that this rank trains.
        absent: settings of those that only other ranks train (a draft on another pipeline stage). They have their
            groups and learning rates here too, so that every rank logs the same, but nothing to step.
    """

    def __init__(self, models: dict[str, ModelOptimizer], absent: Mapping[str, OptimConfig] | None = None) -> None:
        configs = {**(absent or {}), **{name: one.config for name, one in models.items()}}
        if unknown := set(configs) - set(MODELS):
            raise ValueError(f"unknown models {sorted(unknown)}")
        if both := set(absent or {}) & set(models):
            raise ValueError(f"both held and absent: {sorted(both)}")
        self._models = {name: models[name] for name in MODELS if name in models}
        self._trained = sorted(configs)
        self._reports: dict[str, ClipReport] | None = None
        groups: list[dict[str, Any]] = []
        for model in MODELS:
            for kind in KINDS:
                config = configs.get(model)
                groups.append(
                    {
                        "name": f"{model}/{kind}",
                        "params": models[model].groups[kind] if model in models else [],
                        "lr": config.lr if config else 0.0,
                        "weight_decay": config.weight_decay if config and kind == "decay" else 0.0,
                    }
                )
        super().__init__(groups, {})

    def measure(self) -> MetricBag:
        """Measure the gradient norm of each model that this rank trains; the next `step` uses these.

        Returns:
            What it found as metrics, of these models only.
        """
        self._reports = {name: model.measure() for name, model in self._models.items()}
        bag = MetricBag()
        for name, report in self._reports.items():
            bag.add(f"{name}/grad_norm", report.norm if report.finite else math.inf, 1.0, "same")
            bag.add(f"{name}/clip_factor", report.factor if report.finite else 0.0, 1.0, "same")
            bag.add(f"{name}/skipped_steps", 0.0 if report.finite else 1.0, 1.0, "same")
            bag.add(f"{name}/lr", self._group(name, "decay")["lr"], 1.0, "same")
        return bag

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure (forward, backward, reductions), then step each model whose gradient norm is finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._reports is None:
            self.measure()
        assert self._reports is not None
        for name, model in self._models.items():
            rates = {
                kind: (float(g["lr"]), float(g["weight_decay"])) for kind in KINDS if (g := self._group(name, kind))
            }
            model.step(self._reports[name], rates)
        self.zero_grad()
        return loss

    def _group(self, model: str, kind: str) -> dict[str, Any]:
        return self.param_groups[MODELS.index(model) * len(KINDS) + KINDS.index(kind)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the last step's gradients; the buffers themselves are the strategy's to zero, before each step."""
        self._reports = None
        for model in self._models.values():
            model.release_gradients()

    def pieces(self) -> NamedPieces:
        """All state tensors of this rank, to save or to load into."""
        return [
            (f"optimizer.{name}.{key}", piece) for name, model in self._models.items() for key, piece in model.pieces()
        ]

    def state_dict(self) -> dict[str, Any]:
        """The state that is not a tensor, under string keys, equal on every rank; `pieces` holds the rest."""
        return {
            "models": self._trained,
            "groups": {g["name"]: {"lr": float(g["lr"]), "initial_lr": g.get("initial_lr")} for g in self.param_groups},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the tensors of `pieces` were filled before.

        Raises:
            CheckpointError: it was saved with other models training.
        """
        if state_dict["models"] != self._trained:
            raise CheckpointError(f"the checkpoint trained {state_dict['models']}, this run trains {self._trained}")
        for model in self._models.values():
            model.loaded(with_state=True)
        for group in self.param_groups:
            group["lr"] = state_dict["groups"][group["name"]]["lr"]

    def weights_loaded(self) -> None:
        """Only the models' weights were overwritten: main copies follow them, moments start from zero."""
        for model in self._models.values():
            model.loaded(with_state=False)


def make_scheduler(optimizer: JointOptimizer, configs: dict[str, OptimConfig], total_steps: int) -> LambdaLR:
    """Each model's own warm-up and decay over optimiser steps, as one torch scheduler with a factor per group.

    The factors are plain functions: torch does not save them, so a resumed run follows its configuration.
    """

    def factor(model: str) -> Callable[[int], float]:
        config = configs.get(model)
        if config is None:
            return lambda _: 1.0
        return lambda step: learning_rate_factor(config, step, config.total_steps or total_steps)

    return LambdaLR(optimizer, [factor(group["name"].split("/")[0]) for group in optimizer.param_groups])
