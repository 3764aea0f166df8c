"""One child process that answers requests: clean environment, bounded waits, no orphans.

The child is started with `subprocess` rather than `multiprocessing`, so `__main__` is not imported again, and talks
over a socket pair that nobody else can reach. It leads a process group of its own, which is what gets killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lightning_spec.errors import ConfigError, EngineError, EngineTimeoutError

LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "NODE_RANK",
    "GROUP_",
    "ROLE_",
    "LOCAL_",
    "MASTER_",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "PET_",
    "SLURM_",
    "SRUN_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "PL_",
    "VLLM_DP_",
    "VLLM_CPU_",
    "VLLM_HOST_IP",
    "VLLM_PORT",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_NUM_THREADS",
    "NCCL_ASYNC_ERROR_HANDLING",
)
"""Variables (or their beginnings) of the launcher and of the trainer's threads: an engine that inherits them joins the
trainer's process group or binds to the wrong cores."""
TAIL_LINES = 40


def cleaned_environment(source: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without what belongs to the trainer's launcher."""
    source = os.environ if source is None else source
    return {name: value for name, value in source.items() if not name.startswith(LAUNCHER_VARIABLES)}


def cpu_environment(cores: Sequence[int], workers: int = 1) -> dict[str, str]:
    """Settings with which vLLM's CPU build is fast, for an engine that owns `cores` while it generates.

    OpenMP threads sleep soon after a parallel region (KMP_BLOCKTIME, ms), so an idle engine takes nothing from the
    trainer. The libraries are preloaded only where they are found.

    Args:
        workers: processes that share the model (tensor parallelism); each gets an equal part of the cores, and where
            there are fewer cores than workers, one core that others use too.
    """
    each = max(1, len(cores) // workers)
    parts = [[cores[(worker * each + i) % len(cores)] for i in range(each)] for worker in range(workers)]
    listed = [",".join(str(core) for core in part) for part in parts]
    settings = {
        "OMP_NUM_THREADS": str(each),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(listed),
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }
    if workers == 1:
        # Several workers are bound by vLLM, one by one; from a parent that was bound they would inherit its cores.
        settings["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{listed[0]}]"
    found = [path for path in (_find("libiomp5.so"), _find("libtcmalloc_minimal.so.4")) if path]
    inherited = os.environ.get("LD_PRELOAD", "")
    if found:
        settings["LD_PRELOAD"] = ":".join([*found, *([inherited] if inherited else [])])
    return settings


def _find(library: str) -> str | None:
    folders = [
        Path(sys.prefix) / "lib",
        Path(sysconfig.get_paths()["data"]) / "lib",
        Path("/usr/lib") / f"{os.uname().machine}-linux-gnu",
        Path("/usr/lib64"),
        Path("/usr/lib"),
    ]
    return next((str(folder / library) for folder in folders if (folder / library).is_file()), None)


SHARED_MEMORY = Path("/dev/shm")
LEFT_BEHIND = ("psm_*", "sem.mp-*", "vllm_dist_*-cpushm_*")
"""What vLLM's processes share: queues, semaphores of Python's multiprocessing, tensor-parallel ranks' buffers."""


def shared_files(group: int) -> set[Path]:
    """Files in shared memory that only the processes of a process group use, and that a SIGKILL leaves there.

    Intel's OpenMP, too, registers each process in a file that it removes only at an ordinary exit.
    """
    found: set[Path] = set()
    mapped: set[str] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(entry.name)) == group:
                found |= set(SHARED_MEMORY.glob(f"__KMP_REGISTERED_LIB_{entry.name}_*"))
                # By inode: a semaphore's maker knows it under another name.
                lines = (entry / "maps").read_text().splitlines()
                mapped |= {line.split()[4] for line in lines if str(SHARED_MEMORY) in line}
    for file in (file for pattern in LEFT_BEHIND for file in SHARED_MEMORY.glob(pattern)):
        with contextlib.suppress(OSError):
            if str(file.stat().st_ino) in mapped:
                found.add(file)
    return found


def unlink_all(files: Iterable[Path]) -> None:
    """Remove files, some of which may be gone already."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


@contextlib.contextmanager
def _warnings_blocked() -> Iterator[None]:
    """What is started here, and all that it starts, never sees USR1 and USR2.

    SLURM sends its warning ahead of the time limit to every process of a job step; by default it ends a process. The
    trainer answers it at the end of its step, for which it needs the engine.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ChildProcess:
    """A running child. Every method is safe to call after the child has died; `request` then raises.

    Args:
        module: run with `python -m`; it is given `--fd N --parent PID [--die-with-parent]`.
        environment: the child's whole environment.
        log_file: where its stdout and stderr go; a file in a private folder, removed by `close`, if None.
    """

    def __init__(self, module: str, environment: Mapping[str, str], log_file: Path | None, name: str) -> None:
        self.name = name
        self._owner = os.getpid()
        self._ended = False
        self._lock = threading.Lock()
        self._shared: set[Path] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="lightning-spec-engine-") if log_file is None else None
        self.log_file = Path(self._folder.name) / "engine.log" if self._folder else Path(str(log_file))
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        mine, its = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
        command = [sys.executable, "-P", "-m", module, "--fd", str(its.fileno()), "--parent", str(os.getpid())]
        if threading.current_thread() is threading.main_thread():
            # The kernel sends the death signal when the *thread* that forked ends, so only the main thread may ask.
            command.append("--die-with-parent")
        try:
            with open(self.log_file, "ab") as log, _warnings_blocked():
                self._process = subprocess.Popen(
                    command,
                    env={**environment, "PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[its.fileno()],
                    start_new_session=True,
                )
        except BaseException:
            mine.close()
            raise
        finally:
            its.close()
        self._socket = mine
        self._connection = Connection(os.dup(mine.fileno()))
        atexit.register(self.kill)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._owner == os.getpid() and self._process.poll() is None

    def note_shared(self) -> None:
        """Remember which files in shared memory belong to the child and its workers.

        To be called while all of them live: a file of two processes that die at once can no longer be told from
        other people's, and `kill` ends the process of Python's that would have removed it.
        """
        if self.alive:
            self._shared |= shared_files(self._process.pid)

    def request(self, *message: Any, timeout_s: float, on_progress: Callable[[int, int], None] | None = None) -> Any:
        """Send a request and wait for its answer, at most `timeout_s` seconds.

        Raises:
            EngineError: the child raised (with its traceback; it lives on), or died (with the end of its output).
            EngineTimeoutError: no answer in time; the child has been killed.
            ConfigError: the child refused the request.
        """
        what = f"{self.name}: {message[0]!r}"
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if self._ended:
                raise self._death(what)
            try:
                self._send(message, deadline)
                while True:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise EngineTimeoutError(f"{what} took longer than {timeout_s:g} s.{self._tail()}")
                    if self._connection.poll(min(left, 0.5)):
                        kind, *answer = self._connection.recv()
                        if kind != "progress":
                            break
                        if on_progress is not None:
                            on_progress(*answer)
                    elif self._process.poll() is not None:
                        raise EOFError
            except (EOFError, ConnectionError) as error:
                raise self._death(what) from error
            except BaseException:
                # Also an interrupt or a failing callback: an answer would stay in the pipe and meet the wrong request.
                self.kill()
                raise
        if kind == "ok":
            return answer[0]
        if kind == "refused" and isinstance(answer[0], ConfigError):
            raise answer[0]
        raise EngineError(f"{what} failed in the engine.\n{answer[0]}")

    def _send(self, message: tuple[Any, ...], deadline: float) -> None:
        # A stopped child does not empty the socket; the bound holds for sending too.
        seconds = max(0.1, deadline - time.monotonic())
        timeval = int(seconds).to_bytes(8, sys.byteorder) + int(seconds % 1 * 1e6).to_bytes(8, sys.byteorder)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        try:
            self._connection.send(message)
        except BlockingIOError as error:
            raise EngineTimeoutError(f"{self.name} does not read its requests.{self._tail()}") from error

    def _death(self, what: str) -> EngineError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.poll()
        self.kill()
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        else:
            how = f"exited with status {code}"
        return EngineError(f"{what}: the engine process {self._process.pid} {how}.{self._tail()}")

    def _tail(self) -> str:
        try:
            lines = self.log_file.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        except OSError:
            return ""
        return f" The end of its output ({self.log_file}):\n" + "\n".join(lines) if lines else ""

    def close(self, grace_s: float = 10.0) -> None:
        """Ask the child to end, then make it. Waits until the whole process group is gone."""
        if self.alive and self._lock.acquire(timeout=0.5):
            self._shared |= shared_files(self._process.pid)
            try:
                with contextlib.suppress(OSError, EngineError):
                    self._send(("close",), time.monotonic() + 1.0)
                    self._process.wait(timeout=grace_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                self._lock.release()
        self.kill()
        if self._folder is not None and self._owner == os.getpid():
            self._folder.cleanup()

    def kill(self) -> None:
        """End the child and its children at once. Does nothing in a process that did not start it."""
        if self._owner != os.getpid() or self._ended:
            return
        self._ended = True
        atexit.unregister(self.kill)
        # The group lives as long as any member does, and its number is not reused before that: this also ends
        # workers that the child left behind.
        self._shared |= shared_files(self._process.pid)
        self._shared |= set(SHARED_MEMORY.glob(f"__KMP_REGISTERED_LIB_{self._process.pid}_*"))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
        unlink_all(self._shared)
        self._connection.close()
        self._socket.close()
