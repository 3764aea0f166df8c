"""Process groups: the world, and how Megatron cuts it into tensor, pipeline, context, expert and data parallel ranks.

Three groups split what is trained on: `DataParallel` ranks hold different rollouts, the `ContextParallel` ranks of one
replica hold the same rollouts and split their tokens, and `TokenParallel` is both. What is counted on whole rollouts
is reduced over the first, what is summed over tokens over the last. `TensorParallel` and `PipelineParallel` ranks split
the model; a `Replica` is all ranks that together hold one model and one share of the rollouts, and an `Assembly` those
that together hold every tensor. Nothing outside `parallel/` touches Megatron's group state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_spec.attention.context import Context
from lightning_spec.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """How many ways each axis is split; the data-parallel size is what remains of the world.

    `virtual_pipeline` is the number of model chunks per pipeline stage.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"bad {field.name}", found=value, needed="a positive integer", key=strategy_key(field.name)
                )
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ConfigError(
                "virtual stages without a pipeline",
                found=f"virtual_pipeline={self.virtual_pipeline}, pipeline_parallel=1",
                needed="pipeline_parallel above 1, or virtual_pipeline: 1",
                key=strategy_key("virtual_pipeline"),
            )

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one replica of the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    def data_parallel(self, world_size: int) -> int:
        if world_size % self.model_ranks:
            raise ConfigError(
                "the world does not divide into model replicas",
                found=f"{world_size} processes",
                needed=f"a multiple of tensor x pipeline x context = {self.model_ranks}",
                key="trainer.devices",
            )
        layer_ranks = world_size // self.pipeline_parallel
        if layer_ranks % self.expert_parallel:
            raise ConfigError(
                "the ranks of a pipeline stage do not divide into expert-parallel groups",
                found=f"{layer_ranks} ranks a stage, expert_parallel={self.expert_parallel}",
                needed="an expert_parallel that divides tensor x context x data",
                key=strategy_key("expert_parallel"),
            )
        return world_size // self.model_ranks

    @property
    def stages(self) -> int:
        """Virtual pipeline stages."""
        return self.pipeline_parallel * self.virtual_pipeline


def strategy_key(name: str) -> str:
    """Configuration key of an argument of the strategy."""
    return f"trainer.strategy.init_args.{name}"


_sizes: ParallelSizes | None = None
_twins: dict[str, Any] = {}
"""Groups that Megatron does not make: gloo twins for Python objects, and those of replicas, by name."""
_targets: list[int] = []
"""Ranks of this rank's assembly that speak for their replicas."""
_ENGINE_LIMIT = timedelta(days=7)
"""Bound of a replica's broadcasts: peers wait there while a rank generates rollouts, for which the engine has bounds
itself. A peer that dies is noticed at once."""


def start_single_process_world(timeout_s: float) -> None:
    """A world of one process that opens no network port and sets no environment variable (Megatron needs a world)."""
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=timeout_s)
        )


def initialise_groups(sizes: ParallelSizes, *, timeout_s: float) -> None:
    """Create Megatron's groups on an initialised world, once; a second call with the same sizes does nothing.

    Collective: all ranks call it, in the same order.

    Raises:
        ConfigError: the groups exist with other sizes (one process cannot hold two layouts).
    """
    from megatron.core import parallel_state, tensor_parallel

    global _sizes
    sizes.data_parallel(dist.get_world_size())
    if parallel_state.model_parallel_is_initialized():
        if _sizes not in (None, sizes):
            raise ConfigError(
                "another layout is already running in this process",
                found=sizes,
                needed=_sizes,
                key=strategy_key("tensor_parallel"),
            )
        return
    on_gpu = dist.get_backend() == "nccl"
    virtual = sizes.virtual_pipeline if sizes.virtual_pipeline > 1 else None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor_parallel,
        pipeline_model_parallel_size=sizes.pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=sizes.context_parallel,
        expert_model_parallel_size=sizes.expert_parallel,
        expert_tensor_parallel_size=1,  # an expert is whole on its rank: gloo has no uneven gathers, and they are small
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
        # Counts and metrics are CPU tensors; under gloo the ordinary data group already carries them.
        create_gloo_process_groups=on_gpu,
    )
    _make_twins(timedelta(seconds=timeout_s))
    # On a CPU the tracker cannot fork a CUDA generator; Megatron's inference tracker is its official no-op.
    tensor_parallel.model_parallel_cuda_manual_seed(1234, inference_rng_tracker=not on_gpu, force_reset_rng=True)
    _sizes = sizes


def _make_twins(timeout: timedelta) -> None:
    from megatron.core import parallel_state

    on_gpu = dist.get_backend() == "nccl"
    for name, group in (
        ("tensor", parallel_state.get_tensor_model_parallel_group()),
        ("pipeline", parallel_state.get_pipeline_model_parallel_group()),
        ("context", parallel_state.get_context_parallel_group()),
    ):
        # Under gloo Megatron's own group carries objects already.
        mine = dist.get_process_group_ranks(group)
        _twins[name] = _partition(_everywhere(mine), "gloo", timeout) if on_gpu and group.size() > 1 else group
    replicas = _everywhere(parallel_state.get_data_parallel_rank())
    parts = [[rank for rank, data in enumerate(replicas) if data == replica] for replica in sorted(set(replicas))]
    experts = dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group())
    joined = _joined(parts, _everywhere(experts))
    _twins["replica"] = _partition(parts, "gloo", _ENGINE_LIMIT)
    _twins["replica_device"] = _partition(parts, "nccl", timeout) if on_gpu else _twins["replica"]
    same = joined == parts
    _twins["assembly"] = _twins["replica"] if same else _partition(joined, "gloo", timeout)
    _twins["assembly_device"] = (
        _twins["replica_device"] if same else _partition(joined, "nccl", timeout) if on_gpu else _twins["assembly"]
    )
    mine = next(part for part in joined if dist.get_rank() in part)
    _targets[:] = [mine.index(part[0]) for part in parts if part[0] in mine]


def _everywhere(value: T) -> list[T]:
    """Every rank's value, on every rank of the world."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def _partition(parts: list[list[int]], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """This rank's group of a partition of the world, given as parts or as every rank's part. Collective."""
    distinct = sorted({tuple(part) for part in parts})
    if all(len(part) == 1 for part in distinct):
        from megatron.core import parallel_state

        # Nobody talks in groups of one: any such group will do, and a large world is spared as many new ones.
        return parallel_state.get_tensor_model_parallel_group()
    group, _ = dist.new_subgroups_by_enumeration([list(part) for part in distinct], timeout=timeout, backend=backend)
    assert group is not None
    return group


def _joined(parts: list[list[int]], links: list[list[int]]) -> list[list[int]]:
    """The parts of the world, merged where a link holds ranks of several."""
    joined = [set(part) for part in parts]
    for link in links:
        touched = [part for part in joined if part & set(link)]
        joined = [part for part in joined if not part & set(link)] + [set().union(*touched)]
    return sorted(sorted(part) for part in joined)


def destroy_groups() -> None:
    """Undo `initialise_groups` and the world (tests; a run keeps its groups until the process ends)."""
    from megatron.core import parallel_state

    global _sizes
    _twins.clear()
    _targets.clear()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    _sizes = None


def speaks_for_data_rank() -> bool:
    """One rank of each model replica acts for its data-parallel rank (writes its files, logs its numbers)."""
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_pipeline_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )


class Ranks:
    """Ranks that share something: their number, this rank's place, and what they reduce or hand over.

    Args:
        group: for tensors on the device.
        cpu_group: for CPU tensors and Python objects, which NCCL cannot carry.
    """

    def __init__(self, group: dist.ProcessGroup, cpu_group: dist.ProcessGroup) -> None:
        self.group, self.cpu_group = group, cpu_group
        self.size: int = group.size()
        self.rank: int = group.rank()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank. One collective, also where values differ in size."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.cpu_group)
        return out

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of rank `source` on every rank; what the others give is not looked at."""
        if self.size == 1:
            return value
        objects: list[Any] = [value if self.rank == source else None]
        dist.broadcast_object_list(objects, dist.get_global_rank(self.cpu_group, source), group=self.cpu_group)
        return objects[0]

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Reduce a CPU tensor over the ranks, in place; returns it."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=self.cpu_group)
        return tensor

    def sum(self, totals: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sum named CPU tensors over the ranks, in rank order, so that every rank holds the same bits.

        Raises:
            ValueError: the ranks hold different names (every rank raises; none hangs).
        """
        parts = self.gather({name: value.detach().to("cpu", torch.float64) for name, value in totals.items()})
        names = sorted(totals)
        if any(sorted(part) != names for part in parts):
            raise ValueError(f"the ranks count different things: {[sorted(part) for part in parts]}")
        return {name: torch.stack([part[name] for part in parts]).sum(0) for name in names}

    @torch.no_grad()
    def broadcast_module(self, module: nn.Module) -> None:
        """Give every rank the first rank's parameters and buffers, but for experts, which differ from rank to rank."""
        if self.size == 1:
            return
        source = dist.get_global_rank(self.group, 0)
        for tensor in [*module.parameters(), *module.buffers()]:
            if getattr(tensor, "allreduce", True):
                dist.broadcast(tensor.data, source, group=self.group)


class DataParallel(Ranks):
    """The ranks that hold different rollouts: one of each model replica."""

    def __init__(self) -> None:
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group()
        nccl = dist.get_backend() == "nccl"
        super().__init__(group, parallel_state.get_data_parallel_group_gloo() if nccl else group)


class ContextParallel(Ranks):
    """The ranks that hold the same rollouts and split their tokens."""

    def __init__(self) -> None:
        from megatron.core import parallel_state

        super().__init__(parallel_state.get_context_parallel_group(), _twins["context"])

    @property
    def context(self) -> Context:
        """As the attention knows them."""
        return Context.of(self.group) if self.size > 1 else Context.single()


class TokenParallel(Ranks):
    """Data x context parallel: the ranks whose tokens together are the optimiser step's."""

    def __init__(self) -> None:
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        nccl = dist.get_backend() == "nccl"
        twin = parallel_state.get_data_parallel_group_gloo(with_context_parallel=True) if nccl else group
        super().__init__(group, twin)


class TensorParallel(Ranks):
    """The ranks that split each layer and the vocabulary of one pipeline stage."""

    def __init__(self) -> None:
        from megatron.core import parallel_state

        super().__init__(parallel_state.get_tensor_model_parallel_group(), _twins["tensor"])


class PipelineParallel(Ranks):
    """The ranks that hold the stages of one pipeline, in order."""

    def __init__(self) -> None:
        from megatron.core import parallel_state

        super().__init__(parallel_state.get_pipeline_model_parallel_group(), _twins["pipeline"])

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1


class Replica(Ranks):
    """All ranks of one model replica (tensor x pipeline x context), which hold the same rollouts. The first speaks."""

    def __init__(self) -> None:
        super().__init__(_twins["replica_device"], _twins["replica"])


class Assembly(Ranks):
    """The ranks that together hold every tensor of the model: a replica, or several whose experts are split over them.

    `targets` are those of them that speak for their replicas.
    """

    def __init__(self) -> None:
        super().__init__(_twins["assembly_device"], _twins["assembly"])
        self.targets = tuple(_targets)


class LayerRanks(Ranks):
    """Tensor x context x data: all ranks of a pipeline stage. Each holds the whole draft where the stage hosts it."""

    def __init__(self) -> None:
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        super().__init__(group, group)


class World(Ranks):
    """All ranks; each holds the draft where every stage takes its turn at it."""

    def __init__(self) -> None:
        group = dist.distributed_c10d._get_default_group()
        super().__init__(group, group)
