"""Megatron's optimizer over one kind of a model's parameters, with AdamW below it.

A model has two kinds: its dense parameters, whose gradients are summed over the data x context parallel ranks, and its
experts, which are split over other ranks and summed over fewer. Each kind has gradient buffers of its own in Megatron's
`DistributedDataParallel`, and so an optimizer of its own here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_spec.optim import OptimConfig


class Adam:
    """AdamW on the gradient buffers of one or several model chunks. A rank without parameters of the kind takes part
    in the collectives all the same.

    Args:
        groups: kind -> parameters, over all chunks.
        wrapped: each chunk's `DistributedDataParallel`.
        buffers: each chunk's gradient buffers of these parameters.
        config: of the rates.
        norm_group: ranks whose parts of the gradient together are the whole gradient; None where this rank has it all.
        copies: `norm_group` holds copies of parameters, on tensor-parallel ranks (norms) and pipeline stages (a tied
            head): count those once that Megatron marks.
        half: bf16 parameters, with fp32 main copies.
        distributed: shard the state over the ranks that sum the gradient (Megatron's DistributedOptimizer).
    """

    def __init__(
        self,
        groups: Mapping[str, Sequence[nn.Parameter]],
        wrapped: Sequence[Any],
        buffers: Sequence[Sequence[Any]],
        config: OptimConfig,
        *,
        norm_group: dist.ProcessGroup | None,
        copies: bool,
        half: bool,
        distributed: bool,
    ) -> None:
        self._norm_group, self._copies, self._half, self._distributed = norm_group, copies, half, distributed
        held = [{"params": list(params), "name": kind} for kind, params in groups.items() if params]
        self._inner: Any = self._build(held, wrapped, buffers, config) if held else None
        self._fill_state()

    def _build(
        self,
        groups: list[dict[str, Any]],
        wrapped: Sequence[Any],
        buffers: Sequence[Sequence[Any]],
        config: OptimConfig,
    ) -> Any:
        from megatron.core import parallel_state
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

        adam = AdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
        )
        settings = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            bf16=self._half,
            params_dtype=torch.bfloat16 if self._half else torch.float32,
            use_distributed_optimizer=self._distributed,
            clip_grad=0.0,  # clipped by the model's optimizer, from the norm that is also logged
        )
        if not self._distributed:
            if self._half:
                return Float16OptimizerWithFloat16Params(adam, settings, None, None)
            return FP32Optimizer(adam, settings, None)
        return DistributedOptimizer(
            adam,
            settings,
            None,
            None,
            model_chunks=list(wrapped),
            per_model_buffers={index: list(one) for index, one in enumerate(buffers)},
            data_parallel_group=next(buffer.data_parallel_group for one in buffers for buffer in one),
            data_parallel_group_gloo=None,
            data_parallel_group_idx=parallel_state.get_model_parallel_group().rank(),
            distributed_optimizer_instance_id=0,
        )

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self._inner is None else self._inner.optimizer.param_groups

    def _fill_state(self) -> None:
        # AdamW makes its state at the first step; a checkpoint needs somewhere to load into before that.
        for group in self._groups:
            for param in group["params"]:
                self._inner.optimizer.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32, device=param.device),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }

    def stepped(self) -> Iterator[tuple[nn.Parameter, Tensor, int]]:
        """What AdamW steps on this rank: the model's parameter, the tensor that is stepped for it (itself, or a main
        copy), and where that tensor begins in the flattened parameter."""
        if self._inner is None:
            return
        if self._distributed:
            models = [*self._inner.model_fp32_groups, *self._inner.model_float16_groups]
            mains = [*self._inner.shard_fp32_groups, *self._inner.shard_fp32_from_float16_groups]
            for model_group, main_group in zip(models, mains, strict=True):
                for param, main in zip(model_group, main_group, strict=True):
                    yield param, main, self._inner._get_model_param_range_map(param)["param"].start
        elif self._half:
            for model_group, main_group, full_group in zip(
                self._inner.float16_groups,
                self._inner.fp32_from_float16_groups,
                self._inner.fp32_from_fp32_groups,
                strict=True,
            ):
                for param, main in zip(model_group, main_group, strict=True):
                    yield param, main, 0
                for param in full_group:
                    yield param, param, 0
        else:
            for group in self._groups:
                for param in group["params"]:
                    yield param, param, 0

    def state(self, main: Tensor) -> dict[str, Tensor]:
        """AdamW's state of a tensor that it steps."""
        return self._inner.optimizer.state[main]

    @torch.no_grad()
    def squared_norm(self) -> float:
        """Take the reduced gradients over, and return the squared 2-norm of the whole gradient of the kind. Collective
        over `norm_group`; summed in float64, equal on every rank."""
        if self._inner is not None:
            self._inner.prepare_grads()
        # A zero of the right device for a rank that holds nothing.
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
        squares = torch.zeros((), dtype=torch.float64, device=device)
        if gradients := [
            main.grad for param, main, _ in self.stepped() if main.grad is not None and self._counts(param)
        ]:
            squares += torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        if self._norm_group is not None:
            dist.all_reduce(squares, group=self._norm_group)
        return squares.item()

    def _counts(self, param: nn.Parameter) -> bool:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
        from megatron.core.transformer.module import param_is_not_shared

        if not self._copies:
            return True
        tensor_parallel = parallel_state.get_tensor_model_parallel_group()
        return param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param, tensor_parallel)

    @torch.no_grad()
    def step(self, factor: float, rates: Mapping[str, tuple[float, float]]) -> None:
        """Multiply the gradients that `squared_norm` took over, and step. `rates`: kind -> (lr, weight decay)."""
        if self._inner is None:
            return
        for group in self._groups:
            group["lr"], group["weight_decay"] = rates[group["name"]]
        gradients = [main.grad for _, main, _ in self.stepped() if main.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        self._inner.step_with_ready_grads()

    def release_gradients(self) -> None:
        """Let go of the gradients that `squared_norm` took over.

        Megatron points `param.grad` at the gradient buffer for the step. Left there, the next backward pass would add
        into the buffer twice: once as `param.grad` and once from the buffer's own hook.
        """
        if self._inner is not None:
            self._inner.zero_grad(set_to_none=True)

    def reload_main_copies(self) -> None:
        """The model's weights were overwritten: main copies follow them."""
        if self._inner is not None:
            self._inner.reload_model_params()

    def set_steps(self, steps: int) -> None:
        for _, main, _ in self.stepped():
            self.state(main)["step"].fill_(steps)
