"""One optimizer object for policy and draft, each with its own AdamW, clip norm and groups.

Lightning's automatic optimization knows one optimizer. `JointOptimizer` is that one: its groups (always the same four,
in the same order, on every rank, empty where there is nothing) carry learning rate and weight decay, and below it each
model has its own Megatron optimizer, so neither model's gradients reach the other's clip factor (CASES.md F5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_spec.errors import CheckpointError
from lightning_spec.metrics import MetricBag
from lightning_spec.optim import OptimConfig, learning_rate_factor
from lightning_spec.parallel.sharded import Piece

MODELS = ("policy", "draft")
KINDS = ("decay", "no_decay")


@dataclass(slots=True)
class ClipReport:
    """What `measure` found: the gradient's global 2-norm before clipping, and what it was multiplied by."""

    norm: float
    factor: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm)


class ModelOptimizer:
    """AdamW of one model on the gradient buffers of its Megatron DDP wrapper.

    Args:
        module: the model itself; its parameter names name the state in checkpoints.
        wrapped: its `DistributedDataParallel`.
        config: rates and clip norm.
        distributed: shard the state over data x context parallel ranks (Megatron's DistributedOptimizer).
    """

    def __init__(self, module: nn.Module, wrapped: nn.Module, config: OptimConfig, *, distributed: bool) -> None:
        self.config = config
        self.steps = 0
        self.named = {name: param for name, param in module.named_parameters() if param.requires_grad}
        self.groups: dict[str, list[nn.Parameter]] = {kind: [] for kind in KINDS}
        for param in self.named.values():
            # Norms and biases have one axis.
            self.groups["decay" if param.ndim > 1 else "no_decay"].append(param)
        dtypes = {param.dtype for param in self.named.values()}
        self.half = bool(dtypes & {torch.bfloat16, torch.float16})
        self._distributed = distributed
        self._inner = self._build(wrapped)
        self._fill_state()

    def _build(self, wrapped: nn.Module) -> Any:
        from megatron.core import parallel_state
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

        groups = [{"params": list(params), "name": kind} for kind, params in self.groups.items() if params]
        adam = AdamW(
            groups,
            lr=self.config.lr,
            betas=self.config.betas,
            eps=self.config.eps,
            weight_decay=self.config.weight_decay,
            fused=True,
        )
        settings = OptimizerConfig(
            optimizer="adam",
            lr=self.config.lr,
            bf16=self.half,
            params_dtype=torch.bfloat16 if self.half else torch.float32,
            use_distributed_optimizer=self._distributed,
            clip_grad=0.0,  # clipped here, from the norm that is also logged
        )
        inner: Any
        if self._distributed:
            inner = DistributedOptimizer(
                adam,
                settings,
                None,
                None,
                model_chunks=[wrapped],
                per_model_buffers={0: wrapped.buffers},
                data_parallel_group=wrapped.intra_dp_cp_group,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=parallel_state.get_model_parallel_group().rank(),
                distributed_optimizer_instance_id=0,
            )
            inner.grad_stats_parallel_group = parallel_state.get_intra_distributed_optimizer_instance_group()
        else:
            inner = (
                Float16OptimizerWithFloat16Params(adam, settings, None, None)
                if self.half
                else FP32Optimizer(adam, settings, None)
            )
            inner.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
        inner.tp_group = parallel_state.get_tensor_model_parallel_group()
        return inner

    @property
    def _adam(self) -> AdamW:
        return self._inner.optimizer

    def _fill_state(self) -> None:
        # AdamW makes its state at the first step; a checkpoint needs somewhere to load into before that.
        for group in self._adam.param_groups:
            for param in group["params"]:
                self._adam.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32, device=param.device),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }

    def release_gradients(self) -> None:
        """Let go of the gradients that `measure` took over.

        Megatron points `param.grad` at the gradient buffer for the step. Left there, the next backward pass would add
        into the buffer twice: once as `param.grad` and once from the buffer's own hook.
        """
        self._inner.zero_grad(set_to_none=True)

    @torch.no_grad()
    def measure(self) -> ClipReport:
        """Take the reduced gradients over and measure their global norm. Collective over the model's ranks."""
        self._inner.prepare_grads()
        norm = float(self._inner.get_grad_norm())
        limit = self.config.clip_norm
        return ClipReport(norm, limit / (norm + 1e-6) if limit > 0 and norm > limit else 1.0)

    @torch.no_grad()
    def step(self, report: ClipReport, rates: dict[str, tuple[float, float]]) -> bool:
        """Clip and step; False, and nothing moves, where the norm is not finite. `rates`: kind -> (lr, decay)."""
        if not report.finite:
            return False
        for group in self._adam.param_groups:
            group["lr"], group["weight_decay"] = rates[group["name"]]
        if report.factor < 1.0:
            norm = torch.tensor(report.norm, dtype=torch.float32)
            nn.utils.clip_grads_with_norm_(self._inner.get_parameters(), self.config.clip_norm, norm)
        self._inner.step_with_ready_grads()
        self.steps += 1
        return True

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """This rank's part of the state, by parameter name, as ranges of each flattened parameter."""
        for name, param in self.named.items():
            held = self._main_and_range(param)
            if held is None:
                continue
            main, start = held
            state = self._adam.state[main]
            tensors = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            if param.dtype != main.dtype:
                tensors["master"] = main.detach()
            for kind, tensor in tensors.items():
                yield f"{kind}.{name}", Piece(tensor.view(-1), (start,), (param.numel(),))

    def _main_and_range(self, param: nn.Parameter) -> tuple[Tensor, int] | None:
        """The tensor that AdamW steps for `param` on this rank, and where it starts in the flattened parameter."""
        if self._distributed:
            if param not in self._inner.model_param_gbuf_map:
                return None
            group, order = self._inner.model_param_group_index_map[param]
            start: int = self._inner._get_model_param_range_map(param)["param"].start
            return self._adam.param_groups[group]["params"][order], start
        return (param.main_param if self.half and param.dtype != torch.float32 else param), 0  # type: ignore[attr-defined]

    def loaded(self, steps: int, *, with_state: bool) -> None:
        """Tell the optimizer that the tensors of `pieces` (or only the model's) were overwritten."""
        if not with_state:
            self._inner.reload_model_params()
        self.steps = steps
        for state in self._adam.state.values():
            state["step"].fill_(steps)


class JointOptimizer(Optimizer):
    """Steps policy and draft together. `step` expects gradients that are reduced over ranks already.

    Args:
        models: "policy" and / or "draft"; a missing one is frozen or absent.
    """

    def __init__(self, models: dict[str, ModelOptimizer]) -> None:
        if unknown := set(models) - set(MODELS):
            raise ValueError(f"unknown models {sorted(unknown)}")
        self._models = {name: models[name] for name in MODELS if name in models}
        self._reports: dict[str, ClipReport] | None = None
        groups: list[dict[str, Any]] = []
        for model in MODELS:
            for kind in KINDS:
                one = models.get(model)
                groups.append(
                    {
                        "name": f"{model}/{kind}",
                        "params": one.groups[kind] if one else [],
                        "lr": one.config.lr if one else 0.0,
                        "weight_decay": one.config.weight_decay if one and kind == "decay" else 0.0,
                    }
                )
        super().__init__(groups, {})

    def measure(self) -> MetricBag:
        """Measure every model's gradient norm; the next `step` uses these. Returns what it found as metrics."""
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

    def pieces(self) -> dict[str, Piece]:
        """All state tensors of this rank, to save or to load into."""
        return {
            f"optimizer.{name}.{key}": piece for name, model in self._models.items() for key, piece in model.pieces()
        }

    def state_dict(self) -> dict[str, Any]:
        """The state that is not a tensor, under string keys; `pieces` holds the rest."""
        return {
            "models": {name: {"steps": model.steps} for name, model in self._models.items()},
            "groups": {g["name"]: {"lr": float(g["lr"]), "initial_lr": g.get("initial_lr")} for g in self.param_groups},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the tensors of `pieces` were filled before.

        Raises:
            CheckpointError: it was saved with other models training.
        """
        saved = sorted(state_dict["models"])
        if saved != sorted(self._models):
            raise CheckpointError(f"the checkpoint trained {saved}, this run trains {sorted(self._models)}")
        for name, model in self._models.items():
            model.loaded(int(state_dict["models"][name]["steps"]), with_state=True)
        for group in self.param_groups:
            group["lr"] = state_dict["groups"][group["name"]]["lr"]

    def weights_loaded(self) -> None:
        """Only the models' weights were overwritten: main copies follow them, moments start from zero."""
        for model in self._models.values():
            model.loaded(0, with_state=False)


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
