"""Worker processes that cost no imports: forked from a process that has imported what their scripts import.

Importing torch, Lightning, Megatron and transformers takes a worker 10 to 18 seconds of CPU time, far more than most
of them work. Here one process imports them once a session (as a script: the server), and each worker is a fork of it
that then runs its script as `python script` would, up to the interpreter's normal end. There are two servers, for even
and odd ranks, because the ranks of a real world order sets of strings differently (PYTHONHASHSEED) and a test must
see that. A server has no threads and no process groups, so a fork finds no lock held.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parents[2]
IMPORTED_FIRST = {"torch", "lightning", "megatron", "transformers", "safetensors"}
IMPORTED_FIRST |= {"lightning_spec", "callbacks", "strategies", "tests"}


class Child:
    """What the tests use of subprocess.Popen, for a fork of a server."""

    def __init__(self, server: Server, pid: int, command: list[str]) -> None:
        self._server, self.pid, self.args = server, pid, command
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.code(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = 1.0 if end is None else end - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._server.code(self.pid, min(left, 1.0))
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The client's side of one server."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-W", "ignore", str(Path(__file__))]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._codes: dict[int, int] = {}
        atexit.register(self.close)

    def ask(self, **request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")

    def answer(self, kind: str) -> int:
        """What the server says to a request. Codes of children that ended meanwhile are kept."""
        while (value := self._read(kind)) is None:
            pass
        return value

    def fork(self, script: Path, arguments: list[str], environment: dict[str, str], log: Path) -> Child:
        """`script ARGUMENTS` in a process of its own, with its output appended to `log`."""
        self.ask(script=str(script), arguments=arguments, environment=environment, log=str(log))
        return Child(self, self.answer("pid"), [str(script), *arguments])

    def code(self, pid: int, timeout: float) -> int | None:
        """The exit code of a child as Popen gives it, if it ended within `timeout` seconds."""
        assert self._process.stdout is not None
        while pid not in self._codes and select.select([self._process.stdout], [], [], timeout)[0]:
            self._read("code")
        return self._codes.get(pid)

    def _read(self, kind: str) -> int | None:
        assert self._process.stdout is not None
        # Unbuffered by us: a line that lies in a buffer is one that `select` does not see.
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._process.stdout.fileno(), 1)
            if not byte:
                raise RuntimeError("the server of worker processes has ended")
            line += byte
        message = json.loads(line)
        if "code" in message:
            self._codes[message["pid"]] = message["code"]
            return None
        return int(message[kind])

    def close(self) -> None:
        """Ends the server, which kills the children that are left."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait(30)


_SERVERS: dict[int, Server] = {}


def prepare(script: Path) -> None:
    """Have both servers import what the script imports, at the same time, so that its ranks start together: a short
    time-out of theirs must not run while a server imports."""
    for parity in (0, 1):
        if parity not in _SERVERS:
            _SERVERS[parity] = Server()
        _SERVERS[parity].ask(script=str(script), prepare=True)
    for server in _SERVERS.values():
        server.answer("prepared")


def fork(rank: int, script: Path, arguments: list[str], environment: dict[str, str], log: Path) -> Child:
    """A worker from the server of even or odd ranks, after `prepare`."""
    return _SERVERS[rank % 2].fork(script, arguments, environment, log)


# ---- the server ------------------------------------------------------------------------------------------------------


def import_for(script: str) -> None:
    """What the script's own import statements name. What does not import here fails in the worker, which says so."""
    for node in ast.parse(Path(script).read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            if name.split(".")[0] in IMPORTED_FIRST:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        # The scripts lie beside each other and import each other.
        for name in names:
            beside = Path(script).parent / f"{name}.py"
            if beside.exists():
                import_for(str(beside))


def serve(requests: int, replies: TextIO) -> dict[str, Any] | None:
    """Forks a child for each request; returns the request in the child, None in the server at the end of requests."""
    children: dict[int, int] = {}  # pidfd: pid
    waiting = b""
    while True:
        ready = select.select([requests, *children], [], [])[0]
        for descriptor in ready:
            if descriptor in children:
                pid = children.pop(descriptor)
                os.close(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                print(json.dumps({"pid": pid, "code": code}), file=replies, flush=True)
        if requests not in ready:
            continue
        read = os.read(requests, 1 << 16)
        if not read:
            for pid in children.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return None
        *lines, waiting = (waiting + read).split(b"\n")
        for line in lines:
            request: dict[str, Any] = json.loads(line)
            if "prepare" in request:
                import_for(request["script"])
                print(json.dumps({"prepared": os.getpid()}), file=replies, flush=True)
                continue
            pid = os.fork()
            if pid == 0:
                # Closed as the object that it is: a later close by its number would close what has that number then.
                replies.close()
                for descriptor in children:
                    os.close(descriptor)
                return request
            children[os.pidfd_open(pid)] = pid
            print(json.dumps({"pid": pid}), file=replies, flush=True)


def become(request: dict[str, Any]) -> None:
    """Run the request's script as `python script` does."""
    with open(os.devnull) as nothing, open(request["log"], "a") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    if "lightning.fabric.utilities.rank_zero" in sys.modules:
        # Lightning reads the rank from the environment when it is imported.
        rank_zero = sys.modules["lightning.fabric.utilities.rank_zero"]
        rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = str(Path(request["script"]).parent)
    runpy.run_path(request["script"], run_name="__main__")


def main() -> None:
    # Whatever an import prints must not come between the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = serve(0, replies)
    if request is not None:
        become(request)


if __name__ == "__main__":
    main()
