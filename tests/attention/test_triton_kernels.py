"""The Triton kernels in Triton's interpreter, and compiled (not run) for a GPU that is not here.

What these tests cannot say: whether the compiled kernels are right on a GPU. `make gpu-check` says it, on one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3}


def run(script: str, interpret: bool, folder: Path) -> dict[str, Any]:
    """The JSON of a worker's last line. TRITON_INTERPRET is read when triton is first imported, hence the process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return run("triton_worker.py", True, tmp_path_factory.mktemp("triton"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_outputs_and_every_gradient_equal_an_explicit_softmax(
    interpreted: dict[str, dict[str, float]], dtype: str
) -> None:
    cases = {name: errors for name, errors in interpreted.items() if name.startswith(dtype)}
    assert len(cases) >= {"float64": 1, "float32": 15, "float16": 2}[dtype]
    for name, errors in cases.items():
        for part, error in errors.items():
            assert error <= TOLERANCE[dtype], f"{name}: {part} is off by {error}"


@pytest.mark.timeout(300)
def test_every_kernel_compiles_for_an_nvidia_gpu_within_its_shared_memory(tmp_path: Path) -> None:
    """To machine code for compute capability 9.0, by the ptxas that Triton brings; nothing runs."""
    compiled = run("triton_compile_worker.py", False, tmp_path)
    assert len(compiled) == 8  # four kernels in two types
    for name, facts in compiled.items():
        assert facts["cubin"] > 1000, name
        assert facts["shared"] <= 99 * 1024, name  # what a consumer card has
