"""The processes below the strategy: ranks, launcher, groups, the CPU stand-in, and Lightning's own collectives."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from typing import Any, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities import rank_zero as fabric_rank_zero
from lightning.fabric.utilities.distributed import _init_dist_connection, _sync_ddp_if_available
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero
from torch import Tensor
from typing_extensions import override

from lightning_spec.parallel.cpu_stand_in import cpu_stand_in
from lightning_spec.parallel.groups import (
    Assembly,
    ContextParallel,
    DataParallel,
    LayerRanks,
    ParallelSizes,
    PipelineParallel,
    Ranks,
    Replica,
    TensorParallel,
    TokenParallel,
    initialise_groups,
    start_single_process_world,
)
from strategies import slurm
from strategies.rendezvous import meet

R = TypeVar("R", bound=Ranks)


class MegatronProcesses(ParallelStrategy):
    """Everything of a Megatron strategy that does not know what is trained.

    Args:
        sizes: how many ways each axis is split.
        timeout_s: bound of every collective.
        accelerator, parallel_devices, cluster_environment: Lightning's.
    """

    # Read by Lightning by duck typing: without it every data rank would train the same rows.
    is_distributed = True

    def __init__(
        self,
        sizes: ParallelSizes,
        timeout_s: float,
        accelerator: L.pytorch.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment)
        self.sizes = sizes
        self.timeout_s = timeout_s
        self.num_nodes = 1  # Lightning fills it in
        self._ranks: dict[type[Ranks], Ranks] = {}
        self._stand_in = ExitStack()

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @override
    def _configure_launcher(self) -> None:
        # Called in the Trainer's constructor, once it has told the number of nodes: the first moment for these checks.
        assert self.cluster_environment is not None
        slurm.check_layout(self.cluster_environment, self.num_processes, self.num_nodes)
        slurm.take_over_requeue(self.cluster_environment)
        slurm.warn_of_split_tensor_groups(self.sizes, self.num_processes, self.num_nodes)
        # Always: under Slurm and torchrun it starts nothing, but Lightning relies on it.
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.cluster_environment is not None
        self.sizes.data_parallel(self.num_nodes * self.num_processes)
        reset_seed()
        self._set_world_ranks()
        backend = "nccl" if self.root_device.type == "cuda" else "gloo"
        if self.world_size == 1:
            start_single_process_world(self.timeout_s)
        else:
            options: dict[str, Any] = {"device_id": self.root_device} if backend == "nccl" else {}
            timeout = timedelta(seconds=self.timeout_s)
            if isinstance(self.cluster_environment, SLURMEnvironment) and not dist.is_initialized():
                options["store"] = meet(self.cluster_environment, self.timeout_s)
            _init_dist_connection(self.cluster_environment, backend, timeout=timeout, **options)
        self._enter_stand_in()
        initialise_groups(self.sizes, timeout_s=self.timeout_s)
        kinds: tuple[Any, ...] = (
            DataParallel,
            ContextParallel,
            TokenParallel,
            TensorParallel,
            PipelineParallel,
            Replica,
            Assembly,
            LayerRanks,
        )
        self._ranks = {kind: kind() for kind in kinds}

    def _set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        # The setters do nothing under Slurm and torchrun; only the getter is right everywhere.
        for module in (rank_zero, fabric_rank_zero):
            module.rank_zero_only.rank = self.global_rank

    def _enter_stand_in(self) -> None:
        # setup_environment runs again on every fit and validate; the stand-in is left in teardown.
        self._stand_in.close()
        self._stand_in = ExitStack()
        self._stand_in.enter_context(cpu_stand_in())

    @property
    def data(self) -> DataParallel:
        """The ranks that hold different rollouts."""
        return self._of(DataParallel)

    @property
    def context(self) -> ContextParallel:
        """The ranks that split this rank's rollouts' tokens."""
        return self._of(ContextParallel)

    @property
    def tokens(self) -> TokenParallel:
        """Data x context parallel ranks."""
        return self._of(TokenParallel)

    @property
    def tensor(self) -> TensorParallel:
        """The ranks that split this stage's layers."""
        return self._of(TensorParallel)

    @property
    def pipeline(self) -> PipelineParallel:
        """The stages of this rank's pipeline."""
        return self._of(PipelineParallel)

    @property
    def replica(self) -> Replica:
        """All ranks of this model replica; they hold the same rollouts."""
        return self._of(Replica)

    @property
    def assembly(self) -> Assembly:
        """The ranks that together hold every tensor of the model."""
        return self._of(Assembly)

    @property
    def layer_ranks(self) -> LayerRanks:
        """All ranks of this pipeline stage."""
        return self._of(LayerRanks)

    def _of(self, kind: type[R]) -> R:
        found = self._ranks.get(kind)
        if found is None:
            raise RuntimeError("the process groups exist only after the strategy's setup_environment")
        assert isinstance(found, kind)
        return found

    @property
    def data_parallel_rank(self) -> int:
        return self.data.rank

    @property
    def data_parallel_size(self) -> int:
        return self.data.size

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data.size, "rank": self.data.rank}

    # ---- collectives of the world (Lightning's control flow) --------------------------------------------------------

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    # ---- the end ----------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        """Leave the CPU stand-in. Groups stay: callbacks' `on_fit_end` and `teardown` come after this."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._stand_in.close()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        # Other ranks may wait in a collective that this one will never join; NCCL can be told, gloo notices itself.
        if dist.is_initialized() and dist.get_backend() == "nccl" and dist.get_world_size() > 1:
            dist.distributed_c10d._abort_process_group()
