"""benchmarks/gpu_check.py: without a GPU it says that nothing was checked; its checks run, and see a wrong kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from lightning_spec.attention import kernels

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SMALL = {"causal": gpu_check.Shape((30, 1, 20)), "branch of 6": gpu_check.Shape((30, 1, 20), passes=6)}
SMALL |= {"blocks of 8": gpu_check.Shape((30, 1, 20), slots=8, window=5)}


def test_without_a_gpu_it_says_that_nothing_was_checked_and_fails(tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--json", str(target)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == "gpu-check: no CUDA device; nothing was checked"
    assert not target.exists()


def test_every_check_runs_to_its_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU, small, with the plain kernel where a GPU has Triton's and gloo where it has NCCL."""
    monkeypatch.setattr(gpu_check, "PARITY", SMALL)
    monkeypatch.setattr(gpu_check, "WIDTHS", {"head size 64": gpu_check.Shape((9, 4), dim=64)})
    rows = gpu_check.run(gpu_check.checks(CPU, "plain", 64, "gloo"))
    assert [row.check for row in rows if not row.ok] == []
    assert len(rows) == 3 + 3 + 2 + 3 + 3 + 1
    assert all(row.ms is not None for row in rows if row.check.startswith("timing"))
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 1


def test_a_wrong_kernel_and_one_that_raises_are_failed_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = gpu_check.Shape((30, 1, 20))
    right = kernels.flash_attend_backward

    def without_delta(*given: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
        grad, q, k, v, out, lse = given
        return right(grad, q, k, v, out * 0, lse, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "flash_attend_backward", without_delta)
    assert not gpu_check.parity("causal", wrong, "flash", torch.float32, CPU).ok
    rows = gpu_check.run([("none", lambda: gpu_check.parity("causal", wrong, "triton", torch.float32, CPU))])
    assert [row.ok for row in rows] == [False]
    assert "no Triton kernel" in rows[0].note
    assert json.dumps(rows[0].note)
