"""Runs micro-batches through Megatron's forward-backward schedule, whatever the pipeline's layout.

The schedule is Megatron's, untouched: none, 1F1B or interleaved. Losses come as a triple, and the model's config asks
for per-token losses, so that neither the schedule nor the gradient buffers rescale anything: the micro-batches' losses
sum to the objective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_spec.parallel.cpu_stand_in import cpu_stand_in

M = TypeVar("M")
R = TypeVar("R")

Forward = Callable[[nn.Module, int, M], tuple[Tensor, R]]
"""(chunk, index of the micro-batch, micro-batch) -> (tensor, anything to hand back). The tensor goes to the next
virtual stage, and on the last one a scalar loss."""


def run_forward_backward(chunks: Sequence[nn.Module], micro: Sequence[M], forward: Forward[M, R]) -> list[R]:
    """Forward and backward of every micro-batch; gradients are added up and not yet reduced over ranks.

    Collective over the pipeline's ranks, which all have the same number of micro-batches.

    Args:
        chunks: this rank's chunks of the policy (one for each of its virtual stages), wrapped in Megatron's
            DistributedDataParallel or not.
        micro: this replica's micro-batches; may be empty.
        forward: called for each of them on each chunk.

    Returns:
        what `forward` handed back on the last virtual stage, one per micro-batch, in order; nothing on other ranks.
    """

    def step(batches: Iterator[tuple[int, M]], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        index, batch = next(batches)
        output, extra = forward(model, index, batch)

        def as_triple(loss: Tensor) -> tuple[Tensor, Tensor, R]:
            # The token count is only summed by the schedule; our losses are already divided by global counts.
            return loss, torch.zeros((), dtype=torch.int), extra

        return output, as_triple

    return _run(step, chunks, micro, forward_only=False)


@torch.no_grad()
def run_forward(chunks: Sequence[nn.Module], micro: Sequence[M], forward: Forward[M, R]) -> list[R]:
    """As `run_forward_backward`, forward only and without a graph."""

    def step(batches: Iterator[tuple[int, M]], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        index, batch = next(batches)
        output, extra = forward(model, index, batch)
        return output, lambda _, non_loss_data=False: extra

    return _run(step, chunks, micro, forward_only=True, collect_non_loss_data=True)


def _run(step: Callable[..., Any], chunks: Sequence[nn.Module], micro: Sequence[Any], **options: Any) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if not micro:
        # Megatron's schedule always runs a last micro-batch. A data-parallel rank without any still takes part in the
        # reductions that follow.
        return []
    # Nested inside a fit, where it costs nothing; a score between fits comes here without it.
    with cpu_stand_in():
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(enumerate(micro)) for _ in chunks] if len(chunks) > 1 else iter(enumerate(micro)),
            model=list(chunks),
            num_microbatches=len(micro),
            seq_length=0,  # packed micro-batches differ in length; with variable lengths the stages tell each other
            micro_batch_size=1,
            **options,
        )
