"""Two gloo processes against one: loss, every gradient, norms, weights, checkpoints."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "strategies"))

import dp_worker  # noqa: E402
from launch import start  # noqa: E402

# Starting is two imports of torch, Lightning and Megatron: a minute and more on a loaded host.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    start(folder, 2, "dp_worker.py")
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    return {name: dp_worker.run(name, folder, 1, 0) for name in dp_worker.SCENARIOS}


def read(folder: Path, name: str, rank: int) -> dict[str, Any]:
    return torch.load(folder / f"{name}-{rank}.pt", weights_only=False)


@pytest.mark.parametrize("name", ["even", "uneven", "seeds"])
def test_two_ranks_give_the_loss_and_every_gradient_of_one_process(name: str, two: Path, one: dict[str, Any]) -> None:
    """uneven: the second rank has no micro-batch at all. seeds: it was built from other random weights."""
    single = one[name]
    for rank in (0, 1):
        double = read(two, name, rank)
        for mine, theirs in zip(double["logged"], single.logged, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-10)
        for mine, theirs in zip(double["gradients"], single.gradients, strict=True):
            for key, gradient in theirs.items():
                torch.testing.assert_close(mine[key], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", list(dp_worker.SCENARIOS))
def test_ranks_hold_the_same_bits_and_log_the_same_numbers(name: str, two: Path) -> None:
    first, second = read(two, name, 0), read(two, name, 1)
    assert first["logged"] == second["logged"]
    assert first["validated"] == second["validated"]
    for key, tensor in first["weights"].items():
        assert torch.equal(tensor, second["weights"][key]), key


@pytest.mark.parametrize(("name", "tolerance"), [("sharded", 1e-5), ("bf16", 2e-2)])
def test_the_distributed_optimizer_steps_as_one_process_does(
    name: str, tolerance: float, two: Path, one: dict[str, Any]
) -> None:
    double = read(two, name, 0)
    for mine, theirs in zip(double["logged"], one[name].logged, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=tolerance)
        assert mine["policy/grad_norm"] == pytest.approx(theirs["policy/grad_norm"], rel=tolerance)
    for key, tensor in one[name].state_dict().items():
        torch.testing.assert_close(double["weights"][key], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["even", "sharded", "bf16"])
def test_a_checkpoint_of_two_ranks_resumes_on_one(name: str, two: Path, one: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = two / f"{name}-checkpoints" / "step-00000002"
    assert sorted(p.name for p in checkpoint.glob("data-rank*")) == ["data-rank-00000.pt", "data-rank-00001.pt"]
    resumed = dp_worker.run(name, tmp_path, 1, 0, resume=checkpoint)
    for mine, theirs in zip(resumed.logged, one[name].logged[2:], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-2 if name == "bf16" else 1e-5)
        assert mine["draft/grad_norm"] == pytest.approx(theirs["draft/grad_norm"], rel=3e-2 if name == "bf16" else 1e-4)


def test_each_tensor_is_written_once(two: Path, tmp_path: Path) -> None:
    """Replicas are de-duplicated: two ranks write about as many bytes as one."""

    def size(folder: Path) -> int:
        return sum(p.stat().st_size for p in (folder / "even-checkpoints" / "step-00000002" / "tensors").iterdir())

    dp_worker.run("even", tmp_path, 1, 0)
    assert size(two) < 1.3 * size(tmp_path)
    shutil.rmtree(tmp_path / "even-checkpoints")
