"""What an engine of several processes shares is gone when it ends, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from lightning_spec.errors import EngineError
from lightning_spec.rollout.process import ChildProcess, cpu_environment, shared_files
from lightning_spec.rollout.weight_transfer import checksum

HEAD = """
import multiprocessing, os, signal, subprocess, sys, time
from multiprocessing import shared_memory
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[sys.argv.index("--fd") + 1]))
block = shared_memory.SharedMemory(create=True, size=4096)
block.buf[0] = 1
lock = multiprocessing.get_context("spawn").Lock()
worker = subprocess.Popen(["sleep", "1000"])
"""
ANSWERS = """
while True:
    name, *rest = connection.recv()
    connection.send(("ok", [block.name, lock._semlock.name.strip("/"), worker.pid]))
"""
SERVER = """
from lightning_spec.rollout import vllm_worker
class Server:
    def __init__(self, progress): self.progress = progress
    def names(self): return [block.name, lock._semlock.name.strip("/"), worker.pid]
    def work(self): time.sleep(1000)
vllm_worker.Server = Server
vllm_worker._die_with_parent(signal.SIGKILL)
vllm_worker._watch_parent(os.getppid())
vllm_worker._die_with_parent(0)
vllm_worker.serve(connection)
"""
TRAINER = """
import os, sys, time
from lightning_spec.errors import EngineError
from lightning_spec.rollout.process import ChildProcess
child = ChildProcess("leaving", {**os.environ, "PYTHONPATH": sys.argv[1]}, None, "engine")
print(child.pid, *child.request("names", timeout_s=60), flush=True)
child.request("work", timeout_s=1000) if sys.argv[2] == "busy" else time.sleep(1000)
"""


def all_gone(pids: list[int], files: list[Path], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        alive = [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
        if not alive and not [file for file in files if file.exists()]:
            return True
        time.sleep(0.05)
    return False


def test_a_killed_engine_leaves_no_worker_and_no_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(HEAD + ANSWERS)
    child = ChildProcess("leaving", {**os.environ, "PYTHONPATH": str(tmp_path)}, None, "engine")
    block, lock, worker = child.request("names", timeout_s=60)
    files = [Path("/dev/shm") / block, Path("/dev/shm") / f"sem.{lock}"]
    assert set(files) <= shared_files(child.pid)
    assert not set(files) & shared_files(os.getpgrp())
    child.kill()
    child.close()
    assert all_gone([child.pid, worker], files, within_s=2)


@pytest.mark.parametrize("when", ["busy", "idle"])
def test_an_engine_of_several_processes_ends_whole_with_a_trainer_that_is_killed(tmp_path: Path, when: str) -> None:
    (tmp_path / "leaving.py").write_text(HEAD + SERVER)
    command = [sys.executable, "-c", TRAINER, str(tmp_path), when]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    engine, block, lock, worker = trainer.stdout.readline().split()
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert all_gone([int(engine), int(worker)], [Path("/dev/shm") / block, Path("/dev/shm") / f"sem.{lock}"])


def test_a_worker_s_empty_part_adds_nothing_to_a_checksum() -> None:
    assert checksum(torch.zeros(0, 8), (4, 8)) == 0


def test_workers_share_the_cores_equally_and_where_there_are_too_few_a_core() -> None:
    assert cpu_environment([0, 1, 2, 3])["VLLM_CPU_OMP_THREADS_BIND"] == "0,1,2,3"
    two = cpu_environment([4, 5, 6, 7, 8], 2)
    assert (two["VLLM_CPU_OMP_THREADS_BIND"], two["OMP_NUM_THREADS"]) == ("4,5|6,7", "2")
    assert "KMP_AFFINITY" not in two, "each worker has cores of its own"
    assert cpu_environment([3], 2)["VLLM_CPU_OMP_THREADS_BIND"] == "3|3"


def test_what_was_shared_is_removed_after_all_processes_died_at_once_by_another_s_hand(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(HEAD + ANSWERS)
    child = ChildProcess("leaving", {**os.environ, "PYTHONPATH": str(tmp_path)}, None, "engine")
    block, lock, _ = child.request("names", timeout_s=60)
    files = [Path("/dev/shm") / block, Path("/dev/shm") / f"sem.{lock}"]
    child.note_shared()
    # Python's own tracker of semaphores and blocks is one of the group, and dies with it.
    os.killpg(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while child.alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert shared_files(child.pid) == set()
    assert all(file.exists() for file in files)
    with pytest.raises(EngineError):
        child.request("names", timeout_s=10)
    assert not [file for file in files if file.exists()]
