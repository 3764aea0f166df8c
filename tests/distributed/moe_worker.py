"""One rank of test_moe_parallel.py: `python moe_worker.py OUT POLICY_FOLDER CASE ...`.

Runs the micro-batches of its data-parallel rank through Megatron's schedule, reduces gradients as Megatron does, and
writes OUT/CASE-RANK.pt: hidden states, its part of every gradient, and the gradient's norm.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_spec.attention.zigzag import Shard, Zigzag
from lightning_spec.parallel.cpu_stand_in import cpu_stand_in
from lightning_spec.parallel.groups import (
    ContextParallel,
    DataParallel,
    ParallelSizes,
    destroy_groups,
    initialise_groups,
)
from lightning_spec.parallel.schedule import run_forward_backward
from lightning_spec.policy import policy_from_folder
from lightning_spec.policy.weights import chunks, local_gradients, unwrap

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass
class Case:
    """A layout of `world` processes; what remains of them after `sizes` is data parallel."""

    world: int
    sizes: ParallelSizes
    sequence_parallel: bool = False
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "one": Case(1, ParallelSizes()),
    "ep2": Case(2, ParallelSizes(expert_parallel=2), options=RECOMPUTE),
    "tp2": Case(2, ParallelSizes(tensor_parallel=2), True),
    "tp2-ep2": Case(2, ParallelSizes(tensor_parallel=2, expert_parallel=2), True, RECOMPUTE),
    "cp2-ep2": Case(2, ParallelSizes(context_parallel=2, expert_parallel=2)),
    "pp2-vpp2-ep2": Case(4, ParallelSizes(pipeline_parallel=2, virtual_pipeline=2, expert_parallel=2)),
    "tp2-dp2-ep4": Case(4, ParallelSizes(tensor_parallel=2, expert_parallel=4), True),
    "tp2-dp2-ep2": Case(4, ParallelSizes(tensor_parallel=2, expert_parallel=2), True),
}
"""Two consecutive ranks make an expert-parallel pair: of the data ranks, or of the tensor or context ranks of one."""


@dataclass
class Micro:
    """A packed micro-batch and the coefficients of its loss, which is a sum over rows."""

    tokens: Tensor
    positions: Tensor
    lengths: list[int]
    target: Tensor
    weight: float

    def loss(self, hidden: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        return self.weight * ((hidden * self.target[rows]).sum() + 0.05 * hidden.square().sum())


def micro_batches(data_rank: int, data_size: int) -> list[Micro]:
    """Different numbers of tokens on every rank; the last one is idle: a single row that no loss looks at."""
    every = []
    for seed, lengths in enumerate([[7, 3], [1], [9, 2, 4], [5, 5], [2], [6, 1, 8], [3], [1]]):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 96, (sum(lengths),), generator=generator)
        target = torch.randn(sum(lengths), 32, generator=generator, dtype=torch.float64)
        positions = torch.cat([torch.arange(length) for length in lengths])
        every.append(Micro(tokens, positions, lengths, target, 0.0 if seed == 7 else 1.0))
    return every[data_rank::data_size]


def wrapped(policy: nn.Module) -> list[nn.Module]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=False, overlap_grad_reduce=False)
    return [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks(policy)]


def gradient_norm(models: Sequence[nn.Module]) -> float:
    """As Megatron's optimisers measure it: dense parameters over tensor x pipeline ranks, experts over their own."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    total = torch.zeros(2, dtype=torch.float64)
    for model in models:
        for parameter in model.parameters():
            if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
                total[int(not getattr(parameter, "allreduce", True))] += parameter.main_grad.square().sum()
    dense, experts = total[:1], total[1:]
    dist.all_reduce(dense, group=parallel_state.get_model_parallel_group())
    dist.all_reduce(experts, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return float(total.sum().sqrt())


def run(case: Case, folder: Path) -> dict[str, Any]:
    """The groups of the case's layout must exist."""
    from megatron.core.distributed import finalize_model_grads

    options = {"calculate_per_token_loss": True, **case.options}
    policy = policy_from_folder(
        folder, dtype=torch.float64, sizes=case.sizes, sequence_parallel=case.sequence_parallel, **options
    )
    models, data, context = wrapped(policy), DataParallel(), ContextParallel()

    def forward(model: nn.Module, index: int, micro: Micro) -> tuple[Tensor, Tensor]:
        if context.size > 1:
            shard = Shard(Zigzag(micro.lengths, context.size), context.context)
            rows = shard.rows
            out = model(micro.tokens[rows], micro.positions[rows], micro.lengths, shard)
            return micro.loss(out, rows), out.detach()
        out = model(micro.tokens, micro.positions, micro.lengths)
        return (micro.loss(out) if unwrap(model).post_process else out), out.detach()

    for model in models:
        model.zero_grad_buffer()
    hidden = run_forward_backward(models, micro_batches(data.rank, data.size), forward)
    finalize_model_grads(models, None)
    return {
        "data": (data.rank, data.size),
        "hidden": [one.clone() for one in hidden],
        "norm": gradient_norm(models),
        "gradients": [
            (place.name, piece.offset, piece.shape, piece.tensor.clone())
            for place, gradient in local_gradients(policy)
            for piece in place.pieces(gradient)
        ],
    }


def main() -> None:
    torch.set_num_threads(1)
    out, policy, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    rank = int(os.environ["LOCAL_RANK"])
    for name in names:
        world = CASES[name].world
        if rank >= world:
            continue
        # Groups are made once for a world, so every case has a world of its own, of as many ranks as it needs.
        store = dist.FileStore(str(out / f"{name}-store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
        with cpu_stand_in():
            initialise_groups(CASES[name].sizes, timeout_s=120)
            torch.save(run(CASES[name], policy), out / f"{name}-{rank}.pt")
            dist.barrier()
            destroy_groups()


if __name__ == "__main__":
    main()
