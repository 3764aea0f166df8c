"""The engine's process: CASES.md E6. Nothing hangs, nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_spec.errors import EngineError, EngineTimeoutError
from lightning_spec.rollout.engine import EngineFiles, Request, Sampling


def gone(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_an_engine_that_is_killed_hung_or_closed_fails_fast_leaves_nothing_and_starts_again(
    start_engine: Any, tied: Any
) -> None:
    long = [Request((1, 2, 3), seed=i) for i in range(64)]
    sampling = Sampling(max_tokens=400)
    engine = start_engine(tied.folder / "policy")
    pid = engine.pid
    assert pid is not None
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(EngineError, match="SIGKILL"):
        [engine.generate(long, sampling) for _ in range(50)]
    assert time.monotonic() - began < 30
    assert not engine.running
    assert gone(pid)
    with pytest.raises(EngineError):
        engine.generate(long, sampling)
    engine.start(EngineFiles(tied.folder / "policy"))
    again = engine.pid
    assert again is not None
    assert len(engine.generate(long[:2], Sampling(max_tokens=4))) == 2
    os.kill(again, signal.SIGSTOP)
    engine.timeout_s = 1.0
    with pytest.raises(EngineTimeoutError, match="longer than 1 s"):
        engine.generate(long[:2], Sampling(max_tokens=4))
    assert not engine.running
    assert gone(again)
    engine.close()
    engine.close()


def test_closing_ends_the_process_group_and_can_be_repeated(start_engine: Any, tied: Any) -> None:
    engine = start_engine(tied.folder / "policy")
    pid, log = engine.pid, engine._child.log_file
    assert pid is not None
    children = psutil.Process(pid).children(recursive=True)
    engine.close()
    engine.close()
    assert gone(pid)
    assert all(gone(child.pid) for child in children)
    assert not log.exists()
    assert not list(Path("/dev/shm").glob(f"*_{pid}_*"))
    assert not engine.running
    with pytest.raises(EngineError, match="does not run"):
        engine.stats()


def test_a_checkpoint_that_vllm_cannot_load_raises_with_vllm_s_own_words(
    start_engine: Any, tied: Any, tmp_path: Any
) -> None:
    import shutil

    shutil.copytree(tied.folder / "policy", tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(
        (tied.folder / "policy" / "model.safetensors").read_bytes()[:-1000]
    )
    with pytest.raises(Exception, match=r"(?i)safetensor|incomplete|header"):
        start_engine(tmp_path / "broken")
