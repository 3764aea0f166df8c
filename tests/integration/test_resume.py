"""Nothing is lost: kill -9 at a random moment, start again, and every step's metrics are those of a run left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Pair

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 6
# Speeds and seconds differ between any two runs.
TIMED = ("wall", "time/", "tokens_per_second", "engine_start")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def command(pair: Pair, root: Path) -> list[str]:
    return [
        sys.executable, "-m", "lightning_spec.cli", "fit", "-c", str(REPOSITORY / "configs/experiment/demo_grpo.yaml"),
        "--run.dir", str(root), "--vars.policy", str(pair.policy), "--model.draft.init_args.path", str(pair.draft),
        "--trainer.max_steps", str(STEPS), "--trainer.val_check_interval", "3", "--checkpoint.every_n_steps", "1",
        "--data.prompts_per_step", "4", "--data.validation_size", "8", "--data.updates_per_rollout", "2",
        "--rollout.samples_per_prompt", "4", "--rollout.sampling.max_tokens", "48",
        "--progress.kind", "none",
    ]  # fmt: skip


def start(pair: Pair, root: Path) -> subprocess.Popen[bytes]:
    root.mkdir(parents=True, exist_ok=True)
    with (root / "output.log").open("ab") as log:
        return subprocess.Popen(command(pair, root), stdout=log, stderr=log, cwd=REPOSITORY)


def finish(process: subprocess.Popen[bytes], root: Path) -> None:
    assert process.wait(300) == 0, (root / "output.log").read_text()[-4000:]


def records(root: Path) -> list[dict[str, Any]]:
    lines = (root / "metrics.jsonl").read_text().splitlines()
    kept = []
    for line in lines:
        row = json.loads(line)
        kept.append({name: value for name, value in row.items() if not any(mark in name for mark in TIMED)})
    return kept


def last_step(root: Path) -> int:
    try:
        return max((int(row.get("step", 0)) for row in records(root)), default=0)
    except (OSError, ValueError):
        return 0


def test_a_killed_run_resumes_to_the_same_metrics_step_by_step(pair: Pair, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    finish(start(pair, whole), whole)

    killed = tmp_path / "killed"
    process = start(pair, killed)
    deadline = time.monotonic() + 240
    while last_step(killed) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    # Anywhere in a step: generation, update, refit, or the writing of a checkpoint.
    time.sleep(random.uniform(0.0, 1.5))
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    assert last_step(killed) >= 2
    finish(start(pair, killed), killed)

    expected, found = records(whole), records(killed)
    trained = [row for row in expected if "policy/loss" in row]
    assert [row["step"] for row in trained] == list(range(1, STEPS + 1))
    assert all("draft/loss_0" in row for row in trained)
    assert [row["step"] for row in expected if "val/reward" in row] == [0, 3, STEPS]
    # Training and validation, every record once and in the same order.
    assert found == expected
