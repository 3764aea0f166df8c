"""What the benchmarks share: fresh processes, interleaved runs, medians, CPU-seconds and peak memory.

Every case lives in processes of its own, so its peak memory is its own: one for a run that is measured for memory, with
the C library's keeping of freed memory switched off (it blurs the peak by tens of MiB), and one for the timed runs.
Timed cases take turns: timings of a shared machine drift, so only runs that lie next to each other are compared.

    results = measure([Case("ours", "benchmarks.branch:make", {"kind": "branch"}), ...], rounds=5, threads=2)
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import resource
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Case:
    """`target` is "module:function"; the function gets `arguments`, prepares everything, and returns what to time: a
    callable without arguments, which may return a dict of plain values to keep with the result."""

    name: str
    target: str
    arguments: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    """Processes that run it together; each finds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment.
    Times and memory are those of the slowest and of the largest, `extra` is rank 0's."""
    python: str = sys.executable
    """The interpreter, where the case needs an environment of its own."""


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    seconds: float
    """Median wall time of a run."""
    cpu_seconds: float
    """Median CPU time of a run, all threads."""
    peak_mib: float
    """Peak resident memory of a run, less what was resident before it."""
    wall: list[float]
    cpu: list[float]
    extra: dict[str, Any]


def machine(threads: int) -> dict[str, Any]:
    """Where the figures come from."""
    import torch

    model = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": threads,
        "load_before": round(os.getloadavg()[0], 2),
    }


def measure(cases: Sequence[Case], *, rounds: int = 5, threads: int = 2, timeout: float = 900.0) -> list[Result]:
    """Measure `cases` against each other: one run each for memory, one to warm up, then `rounds` rounds in turn.
    With no rounds, the times are those of the run for memory.

    Raises:
        RuntimeError: a case failed (its traceback is on stderr) or took longer than `timeout` seconds for one answer.
    """
    first = []
    for case in cases:
        team = Team(case, threads, timeout, keep_freed=False)
        try:
            first.append(team.ask("run"))
        finally:
            team.close()
    teams: list[Team] = []
    try:
        for case in cases if rounds else ():
            teams.append(Team(case, threads, timeout))
            teams[-1].ask("run")
        runs: list[list[dict[str, Any]]] = [[] for _ in cases]
        for number in range(rounds):
            order = range(len(cases)) if number % 2 == 0 else reversed(range(len(cases)))
            for index in order:
                runs[index].append(teams[index].ask("run"))
    finally:
        for team in teams:
            team.close()
    results = []
    for case, memory, timed in zip(cases, first, runs, strict=True):
        timed = timed or [memory]
        wall, cpu = [r["wall"] for r in timed], [r["cpu"] for r in timed]
        results.append(
            Result(
                case.name,
                statistics.median(wall),
                statistics.median(cpu),
                memory["peak_mib"],
                wall,
                cpu,
                memory["extra"],
            )
        )
    return results


def table(results: Sequence[Result], base: str) -> str:
    """The results as text, with ratios to the case named `base`; time ratios are medians of the rounds' ratios."""
    one = next(result for result in results if result.name == base)
    lines = [f"{'case':28}{'wall s':>9}{'x':>7}{'CPU s':>9}{'x':>7}{'peak MiB':>10}{'x':>7}"]
    for r in results:
        wall, cpu = ratio(r.wall, one.wall), ratio(r.cpu, one.cpu)
        memory = r.peak_mib / one.peak_mib if one.peak_mib else float("nan")
        lines.append(
            f"{r.name:28}{r.seconds:9.3f}{wall:7.2f}{r.cpu_seconds:9.3f}{cpu:7.2f}{r.peak_mib:10.1f}{memory:7.2f}"
        )
    return "\n".join(lines)


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def parser(description: str) -> argparse.ArgumentParser:
    """`--quick`, `--json FILE`, `--rounds`, `--threads`: the options of every benchmark."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    result.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    result.add_argument("--rounds", type=int, default=5, help="timed runs of each case (default 5)")
    result.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="CPU threads (default 2)")
    return result


def write_json(path: Path | None, name: str, options: argparse.Namespace, **figures: Any) -> None:
    """{"benchmark", "machine", "settings", ...figures}; Results become plain dicts. Nothing where `path` is None."""
    if path is None:
        return
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    document = {"benchmark": name, "machine": machine(options.threads), "settings": settings, **figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=asdict) + "\n")


class Team:
    """A case's processes, which get every command at once."""

    def __init__(self, case: Case, threads: int, timeout: float, keep_freed: bool = True) -> None:
        world = {"WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        self.workers: list[_Worker] = []
        try:
            for rank in range(case.ranks):
                self.workers.append(_Worker(case, threads, timeout, keep_freed, world | {"RANK": str(rank)}))
            self.ask("ready")
        except BaseException:
            self.close()
            raise

    def ask(self, command: str) -> dict[str, Any]:
        for worker in self.workers:
            worker.send(command)
        answers = [worker.receive(command) for worker in self.workers]
        return answers[0] | {
            key: max(answer[key] for answer in answers) for key in ("wall", "cpu", "peak_mib") if key in answers[0]
        }

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class _Worker:
    """One process of a case. Commands go in by stdin; each answer is one line of JSON on its stdout."""

    def __init__(self, case: Case, threads: int, timeout: float, keep_freed: bool, more: dict[str, str]) -> None:
        self.case, self.timeout = case, timeout
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **more}
        if not keep_freed:  # glibc: every block of 64 KiB or more is mapped, and unmapped when freed
            environment["MALLOC_MMAP_THRESHOLD_"] = environment["MALLOC_TRIM_THRESHOLD_"] = "65536"
        self.process = subprocess.Popen(
            [case.python, "-m", "benchmarks.common", case.target, json.dumps(case.arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `receive` finds that it has ended
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()

    def receive(self, command: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], self.timeout)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            why = "ended" if ready else f"did not answer within {self.timeout:.0f} s"
            raise RuntimeError(f"benchmark case {self.case.name!r} {why} at {command!r}")
        return json.loads(line)

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _serve(target: str, arguments: str) -> None:
    # The protocol keeps the real stdout; whatever the case prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    module, function = target.split(":")
    run: Callable[[], dict[str, Any] | None] = getattr(importlib.import_module(module), function)(
        **json.loads(arguments)
    )
    for line in sys.stdin:
        command = line.strip()
        answer = _timed(run) if command == "run" else {"ready": True}
        answers.write(json.dumps(answer) + "\n")


def _timed(run: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    _forget_peak()
    before = _resident("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    extra = run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall": wall, "cpu": cpu, "peak_mib": _resident("VmHWM") - before, "extra": extra or {}}


def _forget_peak() -> None:
    """Linux: 5 resets the peak. Elsewhere the peak is since the start, and only the first run's figure is used."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _resident(name: str) -> float:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    _serve(*sys.argv[1:])
