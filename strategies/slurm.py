"""SLURM's sizes against the run's, before any process group is made: each wrong layout is refused with its own error.

Without these checks a wrong layout hangs until a timeout, trains several copies of the run, or leaves GPUs idle.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_spec.errors import ConfigError
from lightning_spec.parallel.groups import ParallelSizes, strategy_key

INTERACTIVE = ("bash", "interactive")
"""Job names at which Lightning takes no notice of SLURM and starts its processes itself."""
_STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_SRUN_COMM_PORT")


@dataclass(frozen=True, slots=True)
class Tasks:
    """What SLURM says of this process's job step; None where a variable is not set.

    `per_node` is what `--ntasks-per-node` was, `rank` counts over the job step, `in_step` tells whether srun started
    this process (and not the batch script).
    """

    count: int | None
    per_node: int | None
    nodes: int | None
    rank: int | None
    local_rank: int | None
    node: int | None
    name: str
    in_step: bool

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Tasks:
        return cls(
            count=_number(environment, "SLURM_NTASKS"),
            per_node=_number(environment, "SLURM_NTASKS_PER_NODE"),
            nodes=_number(environment, "SLURM_NNODES"),
            rank=_number(environment, "SLURM_PROCID"),
            local_rank=_number(environment, "SLURM_LOCALID"),
            node=_number(environment, "SLURM_NODEID"),
            name=environment.get("SLURM_JOB_NAME", ""),
            in_step=any(name in environment for name in _STEP_VARIABLES),
        )


def check_start(environment: Mapping[str, str] = os.environ) -> None:
    """How the processes were started, as far as SLURM's variables alone tell it. torchrun sees to its own.

    Raises:
        ConfigError: several tasks, but in a job named as an interactive one, or not started by srun, or without a
            number for each node; a task variable or MASTER_PORT that is no number.
    """
    tasks = Tasks.read(environment)
    _check_port(environment)
    if tasks.count is None or tasks.count == 1 or "TORCHELASTIC_RUN_ID" in environment:
        return
    if tasks.name in INTERACTIVE:
        if not tasks.in_step:
            # Typed into an allocation's shell: this process starts those of its node itself, tasks or not.
            return
        raise ConfigError(
            f"a job named `{tasks.name}` counts as interactive: each of its tasks would train a copy of the run",
            found=f"SLURM_JOB_NAME={tasks.name} with {tasks.count} tasks",
            needed="another name, or a start without srun, which makes the processes of one node itself",
            key="sbatch --job-name, or SLURM_JOB_NAME before srun",
        )
    if not tasks.in_step:
        raise ConfigError(
            "the job has several tasks, but srun did not start this process: the other ranks do not exist",
            found=f"SLURM_NTASKS={tasks.count} without a job step",
            needed="`srun lightning-spec ...` in the batch script",
            key="the batch script",
        )
    if tasks.per_node is None:
        raise ConfigError(
            "the number of tasks for each node is not set",
            found=f"--ntasks={tasks.count} without --ntasks-per-node",
            needed="--ntasks-per-node equal to trainer.devices",
            key="sbatch --ntasks-per-node",
        )


def check_layout(
    cluster: ClusterEnvironment, devices: int, num_nodes: int, environment: Mapping[str, str] = os.environ
) -> None:
    """The processes that run against those that the trainer counts on.

    Args:
        devices: processes on each node (`trainer.devices`).
        num_nodes: `trainer.num_nodes`.

    Raises:
        ConfigError: they differ; names both numbers and what to change.
    """
    if isinstance(cluster, LightningEnvironment):
        check_start(environment)
        _check_unmanaged(num_nodes, environment)
    elif isinstance(cluster, SLURMEnvironment):
        check_start(environment)
        _check_counts(Tasks.read(environment), devices, num_nodes)
        _check_order(Tasks.read(environment))


def take_over_requeue(cluster: ClusterEnvironment | None) -> None:
    """Turn Lightning's own requeue off: its signal handler saves, with collectives, wherever the run just is."""
    if isinstance(cluster, SLURMEnvironment) and cluster.auto_requeue:
        cluster.auto_requeue = False
        rank_zero_info("SLURMEnvironment.auto_requeue is off: `preemption.requeue` does it at the end of a step")


def warn_of_split_tensor_groups(sizes: ParallelSizes, devices: int, num_nodes: int) -> None:
    """Tensor-parallel ranks talk in every layer; over the network between nodes that takes most of the step."""
    if num_nodes > 1 and devices % sizes.tensor_parallel:
        rank_zero_warn(
            f"tensor-parallel groups span nodes: tensor_parallel={sizes.tensor_parallel} does not divide the {devices} "
            f"processes of a node; change `{strategy_key('tensor_parallel')}` or `trainer.devices`"
        )


def _check_unmanaged(num_nodes: int, environment: Mapping[str, str]) -> None:
    # Lightning starts the processes of this node, and nobody those of the others.
    alone = "NODE_RANK" not in environment and "GROUP_RANK" not in environment
    if num_nodes > 1 and "SLURM_JOB_ID" in environment and alone:
        raise ConfigError(
            "several nodes, but srun did not start this process: the other nodes have none",
            found=f"trainer.num_nodes={num_nodes} in a SLURM job without tasks",
            needed="`srun lightning-spec ...`, in a job with --nodes and --ntasks-per-node",
            key="the batch script",
        )


def _check_counts(tasks: Tasks, devices: int, num_nodes: int) -> None:
    if tasks.count is None:
        raise ConfigError(
            "SLURMEnvironment outside a SLURM job step",
            found="SLURM_NTASKS is not set",
            needed="a start by srun, or no SLURMEnvironment",
            key="trainer.plugins",
        )
    nodes, per_node = tasks.nodes, tasks.per_node
    if nodes is not None and per_node is not None and nodes * per_node != tasks.count:
        raise ConfigError(
            "SLURM's own sizes disagree",
            found=f"SLURM_NTASKS={tasks.count}",
            needed=f"--nodes={nodes} x --ntasks-per-node={per_node} = {nodes * per_node}, for sbatch and srun alike",
            key="--ntasks; leave it out",
        )
    if per_node is not None and per_node != devices:
        raise ConfigError(
            "a node runs another number of tasks than the trainer has devices",
            found=f"--ntasks-per-node={per_node}",
            needed=f"trainer.devices = {devices}",
            key="sbatch --ntasks-per-node or trainer.devices",
        )
    if nodes is not None and nodes != num_nodes:
        raise ConfigError(
            "the job has another number of nodes than the trainer",
            found=f"--nodes={nodes}",
            needed=f"trainer.num_nodes = {num_nodes}",
            key="sbatch --nodes or trainer.num_nodes",
        )
    if tasks.count != num_nodes * devices:
        raise ConfigError(
            "the job has another number of tasks than the trainer has processes",
            found=f"SLURM_NTASKS={tasks.count}",
            needed=f"trainer.num_nodes x trainer.devices = {num_nodes} x {devices} = {num_nodes * devices}",
            key="sbatch --ntasks-per-node, or trainer.devices",
        )


def _check_order(tasks: Tasks) -> None:
    if tasks.node is None or tasks.per_node is None or tasks.local_rank is None:
        return
    if tasks.rank != tasks.node * tasks.per_node + tasks.local_rank:
        raise ConfigError(
            "the tasks are not numbered node by node: neighbouring ranks, which talk most, would be on different nodes",
            found=f"task {tasks.rank} is number {tasks.local_rank} of node {tasks.node}",
            needed="--distribution=block",
            key="srun --distribution",
        )


def _check_port(environment: Mapping[str, str]) -> None:
    port = _number(environment, "MASTER_PORT")
    if port is not None and not 0 < port < 65536:
        raise ConfigError("no such port", found=port, needed="1 to 65535", key="MASTER_PORT")


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError("not a number", found=text, needed="a whole number", key=name) from None
