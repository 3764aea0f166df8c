"""Two pipeline stages share one engine: it sits with the first, the draft and the head with the last.

Rollouts, refits checked tensor by tensor, the frozen draft, validation and export are those of one process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launch import HERE, start

sys.path.insert(0, str(HERE))
import context_rollouts

pytestmark = pytest.mark.distributed
Found = dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found, list[Found]]:
    """(folder, one process, the two stages)."""
    folder = tmp_path_factory.mktemp("replica")
    policy = context_rollouts.policy_folder(folder / "policy")
    one = context_rollouts.run(policy, folder / "one-files")
    start(folder, 2, "replica_worker.py", str(policy), "rollouts", "failing", "pipeline_parallel=2")
    return folder, one, [torch.load(folder / f"rollouts-{rank}.pt", weights_only=False) for rank in range(2)]


def test_stages_train_on_the_rollouts_of_one_engine_and_log_what_one_process_does(
    runs: tuple[Path, Found, list[Found]],
) -> None:
    _, one, ranks = runs
    assert [rank["starts"] for rank in ranks] == [1, 0]
    assert ranks[0]["rollouts"] == ranks[1]["rollouts"]
    for mine, theirs in zip(ranks[0]["rollouts"], one["rollouts"], strict=True):
        assert [r.completion.tokens for r in mine] == [r.completion.tokens for r in theirs]
        assert [(r.reward, r.advantage) for r in mine] == [(r.reward, r.advantage) for r in theirs]
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    for expected, found in zip(one["metrics"], ranks[0]["metrics"], strict=True):
        assert expected.keys() <= found.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert {"val/acceptance_frozen", "val/acceptance_cotrained"} <= ranks[0]["metrics"][-1].keys()
    assert {rank["refits"] for rank in ranks} == {one["refits"]}


@pytest.mark.parametrize("model", ["policy", "draft"])
def test_the_export_of_split_weights_is_that_of_one_process(runs: tuple[Path, Found, list[Found]], model: str) -> None:
    folder = runs[0]
    expected, found = (
        load_file(folder / run / "export" / model / "model.safetensors") for run in ("one-files", "rollouts-files")
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=name)
    assert not [path for path in (folder / "rollouts-files" / "export").iterdir() if path.name.startswith(".")]


def test_an_engine_that_dies_ends_both_stages(runs: tuple[Path, Found, list[Found]]) -> None:
    for rank in range(2):
        found = torch.load(runs[0] / f"failing-{rank}.pt", weights_only=False)
        assert "the worker died" in found["error"]
        assert len(found["rollouts"]) < 3
