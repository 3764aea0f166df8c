"""Starts worker processes that form one gloo world, with a bound, and leaves none behind."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tests.distributed.nursery import Child, fork, prepare

HERE = Path(__file__).parent


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spawn(folder: Path, world: int, script: str, *arguments: str) -> list[Child]:
    """Processes that run `script FOLDER ARGUMENTS...`, one a rank, each with a log in the folder. The caller ends
    them."""
    prepare(HERE / script)
    port = free_port()
    processes = []
    for rank in range(world):
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(HERE.parents[1]),
        }
        log = folder / f"log-{rank}.txt"
        processes.append(fork(rank, HERE / script, [str(folder), *arguments], environment, log))
    return processes


def start(folder: Path, world: int, script: str, *arguments: str, timeout_s: float = 400) -> None:
    """Run `script FOLDER ARGUMENTS...` on `world` processes; every process is gone when this returns."""
    processes = spawn(folder, world, script, *arguments)
    try:
        for process in processes:
            # The rank that ends first is often not the one with the cause, but one that lost its connection to it.
            assert process.wait(timeout_s) == 0, "\n".join(
                f"--- rank {rank}\n{(folder / f'log-{rank}.txt').read_text()[-3000:]}" for rank in range(world)
            )
    finally:
        for process in processes:
            process.kill()
            process.wait()
