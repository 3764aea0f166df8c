"""math-verify behind a time bound that holds in any thread: a helper process that is ended when it takes too long."""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import IO, Any

from lightning_spec.errors import SpecError

STARTUP_SECONDS = 120.0
"""Bound for the helper's own start (importing sympy on a busy machine)."""


class MathChecker:
    """Compares mathematical expressions. One helper process, started at the first question; thread-safe.

    Args:
        timeout: seconds for one question. A question that takes longer counts as unequal, and costs a new helper.
    """

    def __init__(self, timeout: float = 5.0) -> None:
        self.timeout = timeout
        self.timeouts = 0
        """Questions that ran out of time."""
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes]

    def equal(self, gold: str, answer: str) -> bool:
        """Whether math-verify finds the answer equal to the gold one; False for what it cannot read.

        Raises:
            SpecError: the helper cannot be started (math-verify missing, for one).
        """
        with self._lock:
            helper = self._running()
            try:
                reply = self._ask(helper, {"gold": gold, "answer": answer}, self.timeout)
            except TimeoutError:
                self.timeouts += 1
                self._end()
                return False
            except (BrokenPipeError, EOFError):
                # sympy can exhaust the stack or memory on a hostile expression and take the helper with it.
                self._end()
                return False
            return bool(reply["equal"])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._helper is not None and self._helper.poll() is None:
            return self._helper
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        # A file and not a pipe: nobody reads it while the helper runs, and a full pipe would stop the helper.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the helper)
        self._helper = subprocess.Popen(
            [sys.executable, "-m", "lightning_spec.rollout.math_check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": paths},
        )
        atexit.register(self.close)
        try:
            self._ask(self._helper, {"hello": 1}, STARTUP_SECONDS)
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            trace = self._end()
            raise SpecError(f"the math-verify helper did not start: {trace or error!r}") from error
        return self._helper

    @staticmethod
    def _ask(helper: subprocess.Popen[bytes], question: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert helper.stdin is not None
        assert helper.stdout is not None
        helper.stdin.write(json.dumps(question).encode() + b"\n")
        helper.stdin.flush()
        deadline, reply = time.monotonic() + seconds, b""
        with DefaultSelector() as selector:
            selector.register(helper.stdout, EVENT_READ)
            while not reply.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError
                chunk = os.read(helper.stdout.fileno(), 65536)
                if not chunk:
                    raise EOFError
                reply += chunk
        return dict(json.loads(reply))

    def _end(self) -> str:
        helper, self._helper = self._helper, None
        if helper is None:
            return ""
        helper.kill()
        helper.communicate()
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")[-2000:]
        self._errors.close()
        return text

    def close(self) -> None:
        """End the helper process; the next question starts another."""
        with self._lock:
            self._end()
        atexit.unregister(self.close)


def main() -> None:
    """The helper: answers questions on standard input, one JSON object a line, until it closes."""
    # The protocol owns the real standard output; whatever the libraries print goes to standard error.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.WARNING)  # it warns at each question that its own time bounds are off
    from math_verify import parse, verify

    for line in sys.stdin:
        question = json.loads(line)
        equal = False
        if "gold" in question:
            try:
                gold = parse(question["gold"], parsing_timeout=None)
                if not gold:
                    gold = parse(f"${question['gold']}$", parsing_timeout=None)
                equal = bool(verify(gold, parse(question["answer"], parsing_timeout=None), timeout_seconds=None))
            except Exception:
                equal = False  # what cannot be read is not equal
        out.write(json.dumps({"equal": equal}) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
