"""The whole step (policy and draft) on two data-parallel processes equals the single-process step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from launch import start  # noqa: E402
from spec_worker import run  # noqa: E402

from tests.module.conftest import CONFIG  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    import json

    folder = tmp_path_factory.mktemp("dp")
    (folder / "policy").mkdir()
    (folder / "policy" / "config.json").write_text(json.dumps(CONFIG))
    start(folder, 2, "spec_worker.py", str(folder / "policy"))
    one = run(folder / "policy", 0, 1)
    return one, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_gradients_of_policy_and_draft_equal_the_single_process_ones(results: Any) -> None:
    """CASES B8, F2: global counts, summed once over data parallelism; a rank without rollouts hangs nobody (B9)."""
    one, ranks = results
    assert len(one["gradients"][0]) > 20
    for step in (0, 1):
        for rank in ranks:
            assert one["gradients"][step].keys() == rank["gradients"][step].keys()
            for name, expected in one["gradients"][step].items():
                torch.testing.assert_close(rank["gradients"][step][name], expected, rtol=1e-4, atol=1e-6, msg=name)


def test_metrics_are_equal_on_all_ranks_and_to_the_single_process(results: Any) -> None:
    """CASES G5; LIGHTNING.md section 7, item 11."""
    one, (first, second) = results
    assert first["metrics"] == second["metrics"]
    for mine, theirs in zip(one["metrics"], first["metrics"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert theirs[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_weights_after_two_steps_are_equal(results: Any) -> None:
    one, (first, second) = results
    for name, expected in one["weights"].items():
        assert torch.equal(first["weights"][name], second["weights"][name]), name
        torch.testing.assert_close(first["weights"][name], expected, rtol=0, atol=1e-5, msg=name)
