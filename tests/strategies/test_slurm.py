"""SLURM's layout against the run's: every wrong one has an error of its own, before any process group is made."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.plugins.environments import SLURMEnvironment as FromYaml
from toy_module import trainer

from lightning_spec.errors import ConfigError
from lightning_spec.parallel.groups import ParallelSizes
from strategies import MegatronStrategy
from strategies.rendezvous import meet
from strategies.slurm import check_layout, check_start, warn_of_split_tensor_groups

GOOD = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "localhost",
}
"""Task 5 of two nodes with four tasks each."""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)
    # Ranks, too: Lightning leaves them behind in a process that has trained.
    for name in [n for n in os.environ if n.startswith(("SLURM_", "MASTER_", "TORCHELASTIC_")) or n.endswith("_RANK")]:
        monkeypatch.delenv(name)
    yield
    # Lightning sets MASTER_ADDR and MASTER_PORT when they are read.
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in before:
            os.environ.pop(name, None)


def slurm(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    for name, value in {**GOOD, **changes}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)


def test_the_layout_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(monkeypatch)
    check_layout(SLURMEnvironment(auto_requeue=False), devices=4, num_nodes=2)


# changes of GOOD, devices, nodes, the fault, what is found, what is needed, the key
WRONG: list[tuple[dict[str, str | None], int, int, str, str, str, str]] = [
    ({}, 2, 2, "another number of tasks than the trainer has devices", "=4", "devices = 2", "--ntasks-per-node"),
    ({}, 4, 1, "another number of nodes", "--nodes=2", "num_nodes = 1", "--nodes"),
    ({"SLURM_NTASKS": "6"}, 4, 2, "sizes disagree", "NTASKS=6", "2 x --ntasks-per-node=4 = 8", "--ntasks"),
    ({"SLURM_NTASKS": "3", "SLURM_NNODES": "1"}, 4, 1, "sizes disagree", "NTASKS=3", "= 4", "--ntasks"),
    ({"SLURM_NNODES": None}, 4, 3, "number of tasks than the trainer has processes", "=8", "3 x 4 = 12", "devices"),
    ({"SLURM_NTASKS_PER_NODE": None, "SLURM_NTASKS": "1"}, 4, 1, "another number", "=2", "num_nodes = 1", "--nodes"),
    ({"SLURM_NTASKS_PER_NODE": None, "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}, 4, 1, "processes", "=1", "= 4", "dev"),
    ({"SLURM_NTASKS_PER_NODE": None}, 4, 2, "for each node is not set", "--ntasks=8", "devices", "--ntasks-per-node"),
    ({"SLURM_STEP_ID": None}, 4, 2, "srun did not start this process", "SLURM_NTASKS=8", "`srun", "batch script"),
    ({"SLURM_JOB_NAME": "bash"}, 4, 2, "counts as interactive", "=bash with 8", "another name", "--job-name"),
    ({"SLURM_JOB_NAME": "interactive"}, 4, 2, "counts as interactive", "interactive", "without srun", "--job-name"),
    ({"SLURM_NTASKS": None}, 4, 2, "outside a SLURM job step", "SLURM_NTASKS is not set", "srun", "trainer.plugins"),
    ({"SLURM_PROCID": "3"}, 4, 2, "node by node", "task 3 is number 1 of node 1", "=block", "--distribution"),
    ({"SLURM_NTASKS": "8(x2)"}, 4, 2, "not a number", "8(x2)", "whole number", "SLURM_NTASKS"),
    ({"MASTER_PORT": "70000"}, 4, 2, "no such port", "70000", "65535", "MASTER_PORT"),
    ({"MASTER_PORT": "auto"}, 4, 2, "not a number", "auto", "whole number", "MASTER_PORT"),
]


@pytest.mark.parametrize(
    ("changes", "devices", "nodes", "what", "found", "needed", "key"), WRONG, ids=[f"{r[3]}-{r[4]}" for r in WRONG]
)
def test_each_wrong_layout_is_refused_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str | None],
    devices: int,
    nodes: int,
    what: str,
    found: str,
    needed: str,
    key: str,
) -> None:
    cluster = SLURMEnvironment(auto_requeue=False)
    slurm(monkeypatch, **changes)
    with pytest.raises(ConfigError) as caught:
        check_layout(cluster, devices, nodes)
    assert what in caught.value.what
    assert found in str(caught.value.found)
    assert needed in str(caught.value.needed)
    assert key in caught.value.key


def test_the_errors_for_a_start_come_before_lightning_makes_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(monkeypatch, SLURM_NTASKS_PER_NODE=None)
    with pytest.raises(RuntimeError, match="--ntasks=8"):
        SLURMEnvironment(auto_requeue=False)
    with pytest.raises(ConfigError, match="--ntasks-per-node"):
        check_start()


def test_several_nodes_without_srun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sbatch --nodes=2` without tasks: Lightning sees no SLURM and would wait for the second node for ever."""
    slurm(monkeypatch, SLURM_NTASKS=None, SLURM_STEP_ID=None)
    with pytest.raises(ConfigError, match="the other nodes have none"):
        check_layout(LightningEnvironment(), devices=4, num_nodes=2)
    check_layout(LightningEnvironment(), devices=4, num_nodes=1)
    monkeypatch.setenv("NODE_RANK", "1")
    check_layout(LightningEnvironment(), devices=4, num_nodes=2)


def test_a_command_typed_into_an_allocations_shell_runs_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(monkeypatch, SLURM_JOB_NAME="interactive", SLURM_STEP_ID=None)
    check_layout(LightningEnvironment(), devices=4, num_nodes=1)


def test_torchrun_sees_to_its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(monkeypatch, SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE=None, SLURM_STEP_ID=None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    check_start()
    check_layout(TorchElasticEnvironment(), devices=4, num_nodes=2)


def test_the_trainer_refuses_a_wrong_layout_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(monkeypatch)
    with pytest.raises(ConfigError, match="another number of tasks"):
        trainer(MegatronStrategy(token_budget=8), devices=2, num_nodes=2, plugins=[FromYaml(auto_requeue=False)])
    assert not dist.is_initialized()


def test_a_world_that_does_not_divide_is_refused_before_any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(
        monkeypatch, SLURM_NTASKS="3", SLURM_NTASKS_PER_NODE="3", SLURM_NNODES="1", SLURM_PROCID="1", SLURM_NODEID="0"
    )
    strategy = MegatronStrategy(token_budget=8, context_parallel=2)
    trainer(strategy, devices=3, plugins=[FromYaml(auto_requeue=False)])
    with pytest.raises(ConfigError, match="3 processes"):
        strategy.setup_environment()
    assert not dist.is_initialized()


def test_lightnings_own_requeue_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(monkeypatch)
    one = trainer(MegatronStrategy(token_budget=8), devices=4, num_nodes=2)
    assert isinstance(one.strategy.cluster_environment, SLURMEnvironment)  # detected, with auto_requeue
    assert one.strategy.cluster_environment.auto_requeue is False


@pytest.mark.parametrize(
    ("tensor", "devices", "nodes", "warns"), [(8, 4, 2, 1), (3, 4, 2, 1), (4, 4, 2, 0), (8, 4, 1, 0)]
)
def test_tensor_groups_that_span_nodes_are_warned_of(
    tensor: int, devices: int, nodes: int, warns: int, recwarn: pytest.WarningsRecorder
) -> None:
    warn_of_split_tensor_groups(ParallelSizes(tensor_parallel=tensor), devices, nodes)
    assert len([one for one in recwarn if "span nodes" in str(one.message)]) == warns


# ---- rendezvous


class Cluster:
    main_address = "localhost"

    def __init__(self, rank: int, size: int, port: int) -> None:
        self._rank, self._size, self.main_port = rank, size, port

    def global_rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return self._size


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gather(
    ranks: list[int], size: int, seconds: float, port: int | None = None, jobs: dict[int, str] | None = None
) -> dict[int, Any]:
    """What `meet` gives or raises on each of `ranks`, which run as threads."""
    port, out = port or free_port(), {}

    def go(rank: int) -> None:
        try:
            out[rank] = meet(Cluster(rank, size, port), seconds, (jobs or {}).get(rank))  # type: ignore[arg-type]
        except ConfigError as error:
            out[rank] = error

    threads = [threading.Thread(target=go, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def test_ranks_that_all_come_share_a_store() -> None:
    found = gather([0, 1, 2], 3, 20.0)
    found[1].set("said", "yes")
    assert found[2].get("said") == b"yes"


def test_every_rank_that_came_is_told_who_did_not() -> None:
    found = gather([0, 2], 4, 1.0)
    for rank in (0, 2):
        assert "not all ranks came within 1 s" in found[rank].what
        assert "ranks 1, 3 of 4" in found[rank].found
        assert socket.gethostname() in found[rank].found


def test_a_rank_that_does_not_reach_rank_zero_says_so() -> None:
    (error,) = gather([1], 2, 1.0).values()
    assert "does not reach rank 0" in error.what
    assert "MASTER_ADDR" in error.key


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        (error,) = gather([0], 2, 1.0, port=int(other.getsockname()[1])).values()
    assert "cannot listen" in error.what
    assert error.key == "MASTER_PORT"


def test_a_client_of_another_job_on_the_port_is_told_apart() -> None:
    """Two jobs on one node whose numbers end alike get the same port from Lightning."""
    found = gather([0, 1], 2, 1.0, jobs={0: "10001.0", 1: "20001.0"})
    assert "ranks 1 of 2" in found[0].found
    assert "is gone or of another job" in found[1].found
