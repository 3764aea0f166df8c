"""Two emulated SLURM nodes with one task each: signals, checkpoints, one requeue, exit codes, and going on."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "strategies"))

import slurm_worker  # noqa: E402

from tests.distributed.nursery import Child, fork, prepare  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def scontrol(folder: Path) -> Path:
    """A fake `scontrol`, in a folder for the PATH, that writes its arguments to `requeued` beside it."""
    binary = folder / "bin" / "scontrol"
    binary.parent.mkdir(parents=True)
    binary.write_text(f'#!/bin/sh\necho "$@" >> {folder}/requeued\n')
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    return binary.parent


class Job:
    """A start of a two-node job: one process for each task, as srun would make them. None is left when it is closed."""

    def __init__(self, folder: Path, path: Path, *arguments: str) -> None:
        prepare(HERE / "slurm_worker.py")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.folder = folder
        self.tasks = [self._task(rank, port, path, *arguments) for rank in (0, 1)]

    def _task(self, rank: int, port: int, path: Path, *arguments: str) -> Child:
        slurm = {"JOB_ID": 4711, "JOB_NAME": "train", "STEP_ID": 0, "NTASKS": 2, "NTASKS_PER_NODE": 1, "NNODES": 2}
        place = {"PROCID": rank, "LOCALID": 0, "NODEID": rank, "NODELIST": "localhost"}
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))},
            **{f"SLURM_{name}": str(value) for name, value in {**slurm, **place}.items()},
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(HERE.parents[1]),
            "PATH": f"{path}:{os.environ['PATH']}",
        }
        script, log = HERE / "slurm_worker.py", self.folder / f"output-{rank}.txt"
        return fork(rank, script, [str(self.folder), *arguments], environment, log)

    def wait(self, seconds: float = 400) -> list[int]:
        deadline = time.monotonic() + seconds
        return [task.wait(max(0.1, deadline - time.monotonic())) for task in self.tasks]

    def output(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.folder.glob("output-*.txt")))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: Any) -> None:
        for task in self.tasks:
            task.kill()
            task.wait()


def lines(folder: Path, rank: int = 0) -> list[dict[str, float]]:
    file = folder / f"log-{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@dataclass
class First:
    """What a job left behind that was signalled: looked at before it starts again."""

    folder: Path
    codes: list[int]
    steps: list[int]
    saved: list[str]
    requeued: str


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> First:
    """A job whose rank 1 is sent TERM at a random moment."""
    folder = tmp_path_factory.mktemp("slurm")
    run = folder / "job"
    with Job(folder, scontrol(folder), "first") as job:
        deadline = time.monotonic() + 400
        while len(lines(run)) < 3 and job.tasks[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(random.uniform(0.0, 0.4))
        job.tasks[1].send_signal(signal.SIGTERM)
        codes = job.wait()
    assert (run / "saved").is_dir(), job.output()
    return First(
        folder,
        codes,
        [len(lines(run, rank)) for rank in (0, 1)],
        [path.name for path in (run / "saved").iterdir()],
        (folder / "requeued").read_text(),
    )


@pytest.fixture(scope="module")
def again(first: First) -> Path:
    with Job(first.folder, first.folder / "bin", "again") as job:
        assert job.wait() == [0, 0], job.output()
    return first.folder


def test_a_signal_from_outside_ends_the_job_by_that_signal_with_one_step_saved_and_one_requeue(first: First) -> None:
    assert first.codes == [143, 143]
    assert first.steps[0] == first.steps[1] < slurm_worker.LONG
    assert first.saved == [f"step-{first.steps[0]:08d}"]
    assert first.requeued == "requeue 4711\n"


def test_a_job_that_starts_again_goes_on_from_there(again: Path) -> None:
    for rank in (0, 1):
        assert [row["step"] for row in lines(again / "job", rank)] == list(range(1, slurm_worker.LONG + 1))


@pytest.mark.parametrize("name", slurm_worker.SCENARIOS)
def test_a_signal_to_one_rank_ends_both_at_one_step_which_is_saved(again: Path, name: str) -> None:
    _, _, _, signum, _, last = slurm_worker.SCENARIOS[name]
    for rank in (0, 1):
        found = json.loads((again / f"moments-{rank}.json").read_text())[name]
        assert found == {"code": 128 + signum, "saved": [f"step-{last:08d}"], "restored": True}


@pytest.mark.parametrize("name", slurm_worker.SCENARIOS)
def test_the_continued_run_makes_every_step_once_as_a_run_left_alone(again: Path, name: str) -> None:
    for rank in (0, 1):
        whole, found = lines(again / "whole", rank), lines(again / name.replace(" ", "-"), rank)
        assert [row["step"] for row in found] == list(range(1, slurm_worker.STEPS + 1))
        for mine, theirs in zip(found, whole, strict=True):
            # One process, other places in memory: some sums take another order.
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-8)


def test_each_preemption_queues_the_job_again_once(again: Path) -> None:
    assert (again / "requeued").read_text().splitlines() == ["requeue 4711"] * (1 + len(slurm_worker.SCENARIOS))
