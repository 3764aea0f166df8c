"""Runs micro-batches through Megatron's forward-backward schedule, whatever the pipeline's layout.

The schedule is Megatron's, untouched. Losses come as a triple, and the model's config asks for per-token losses, so
that neither the schedule nor the gradient buffers rescale anything: the micro-batches' losses sum to the objective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_spec.parallel.cpu_stand_in import cpu_stand_in

M = TypeVar("M")
R = TypeVar("R")


def run_forward_backward(
    model: nn.Module, micro: Sequence[M], forward: Callable[[nn.Module, M], tuple[Tensor, R]]
) -> list[R]:
    """Forward and backward of every micro-batch; gradients are added up and not yet reduced over ranks.

    Args:
        model: the policy, wrapped in Megatron's DistributedDataParallel or not.
        micro: this rank's micro-batches; may be empty.
        forward: (model, micro-batch) -> (scalar loss, anything to hand back).

    Returns:
        what `forward` handed back, one per micro-batch, in order.
    """

    def step(batches: Iterator[M], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, R]]]:
        loss, extra = forward(model, next(batches))

        def as_triple(loss: Tensor) -> tuple[Tensor, Tensor, R]:
            # The token count is only summed by the schedule; our losses are already divided by global counts.
            return loss, torch.zeros((), dtype=torch.int), extra

        return loss, as_triple

    return _run(step, model, micro, forward_only=False)


@torch.no_grad()
def run_forward(model: nn.Module, micro: Sequence[M], forward: Callable[[nn.Module, M], R]) -> list[R]:
    """Forward only, without a graph; returns what `forward` returns, one per micro-batch, in order."""

    def step(batches: Iterator[M], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        result = forward(model, next(batches))
        return torch.zeros(()), lambda _, non_loss_data=False: result

    return _run(step, model, micro, forward_only=True, collect_non_loss_data=True)


def _run(step: Callable[..., Any], model: nn.Module, micro: Sequence[Any], **options: Any) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if not micro:
        # Megatron's schedule always runs a last micro-batch. A data-parallel rank without any still takes part in the
        # reductions that follow.
        return []
    # Nested inside a fit, where it costs nothing; a score between fits comes here without it.
    with cpu_stand_in():
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(micro),
            model=[model],
            num_microbatches=len(micro),
            seq_length=0,  # packed micro-batches differ in length; neither is read without pipelining
            micro_batch_size=1,
            **options,
        )
