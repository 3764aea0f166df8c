"""Where the ranks of a run meet: a store on rank 0 that all reach in time, or an error that names who is missing.

torch's own meeting ends, after half an hour, with the number of clients that came. Here each rank signs with its host,
under the job's number: a client of another job that was given the same port is told apart.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from lightning_spec.errors import ConfigError

LIMIT_S = 600.0
"""Longest wait for the ranks to appear; a run's own `timeout_s` may make it shorter."""
_SHOWN = 16


def meet(cluster: ClusterEnvironment, timeout_s: float, job: str | None = None) -> dist.Store:
    """A store that all ranks have reached. Collective.

    Args:
        cluster: knows rank, world size, address and port.
        timeout_s: bound of the run's collectives, also set on the store.
        job: what the ranks of one start have in common; by default the numbers of SLURM's job and job step.

    Raises:
        ConfigError: on every rank that came, once the bound is over: who is missing; or that rank 0 cannot be reached,
            or cannot listen on its port.
    """
    rank, size, bound = cluster.global_rank(), cluster.world_size(), min(timeout_s, LIMIT_S)
    store = _store(cluster.main_address, cluster.main_port, rank, bound)
    job = job or f"{os.environ.get('SLURM_JOB_ID', 'none')}.{os.environ.get('SLURM_STEP_ID', '0')}"
    ours = dist.PrefixStore(job, store)
    ours.set(f"rank-{rank}", socket.gethostname())
    failure = _call_the_roll(ours, size, bound) if rank == 0 else _listen(ours, rank, bound)
    if failure:
        raise _absent(failure, bound)
    store.set_timeout(timedelta(seconds=timeout_s))
    return dist.PrefixStore(f"{job}-world", store)


def _store(address: str, port: int, rank: int, bound: float) -> dist.Store:
    limit = timedelta(seconds=bound)
    try:
        return dist.TCPStore(address, port, None, rank == 0, timeout=limit, wait_for_workers=False)
    except dist.DistError as error:
        if rank == 0:
            raise ConfigError(
                "rank 0 cannot listen for the other ranks",
                found=f"port {port} on {socket.gethostname()}: {_first_line(error)}",
                needed="a free port; another run or job step on this node may have it",
                key="MASTER_PORT",
            ) from error
        raise ConfigError(
            f"rank {rank} on {socket.gethostname()} does not reach rank 0",
            found=f"no answer from {address}:{port} in {bound:g} s",
            needed="rank 0 running there (see its log), and a network on which this node reaches it",
            key="MASTER_ADDR and MASTER_PORT",
        ) from error


def _call_the_roll(store: dist.Store, size: int, bound: float) -> str:
    """On rank 0: wait for all ranks, and tell those that came. Returns who is missing, or nothing."""
    keys = [f"rank-{rank}" for rank in range(size)]
    everybody = _until(lambda: store.check(keys), bound)
    here = [rank for rank, key in enumerate(keys) if everybody or store.check([key])]
    missing = [rank for rank in range(size) if rank not in here]
    failure = ""
    if missing:
        hosts = sorted({store.get(keys[rank]).decode() for rank in here})
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        failure = f"ranks {', '.join(map(str, missing[:_SHOWN]))}{more} of {size}; those on {', '.join(hosts)} are here"
    store.set("answer", failure or "all")
    if missing:
        # The store ends with this process: not before the others have read the answer.
        _until(lambda: store.add("told", 0) >= len(here) - 1, 5.0)
    return failure


def _listen(store: dist.Store, rank: int, bound: float) -> str:
    # This rank may have come long before rank 0's last client, but never before rank 0's clock began.
    try:
        store.wait(["answer"], timedelta(seconds=bound + min(10.0, bound)))
        answer = store.get("answer").decode()
        if answer != "all":
            store.add("told", 1)
    except dist.DistError as error:
        return f"rank 0, which answered rank {rank}, but is gone or of another job ({_first_line(error)})"
    return "" if answer == "all" else answer


def _absent(missing: str, bound: float) -> ConfigError:
    return ConfigError(
        f"not all ranks came within {bound:g} s",
        found=f"missing: {missing}",
        needed="all of them: see their logs for an error, and whether srun started them",
        key="the job's tasks, or trainer.strategy.init_args.timeout_s",
    )


def _until(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
