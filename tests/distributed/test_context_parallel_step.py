"""The whole training step (policy and draft) on ranks that split each sequence equals the single-process step.

Two processes (context parallel 2) and four (context x data parallel, 2 x 2), all cases in one launch of each: documents
of odd lengths and of one row, ranks without rows, a data rank without rollouts.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import context_rollouts  # noqa: E402
import context_worker  # noqa: E402
from launch import start  # noqa: E402

from tests.module.conftest import CONFIG, write_weights  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

LAUNCHES = {2: tuple(context_worker.CASES), 4: ("sequences", "sharded")}
RUNS = [(world, name) for world, names in LAUNCHES.items() for name in names]
EXACT = [run for run in RUNS if run[1] != "sharded"]


@dataclass
class Results:
    """What the single process and the ranks of each world found, and where their checkpoints are."""

    folder: Path
    policy: Path
    one: dict[str, dict[str, Any]]

    def rank(self, world: int, name: str, rank: int) -> dict[str, Any]:
        return torch.load(self.folder / str(world) / f"{name}-{rank}.pt", weights_only=False)

    def ranks(self, world: int, name: str) -> list[dict[str, Any]]:
        return [self.rank(world, name, rank) for rank in range(world)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("cp")
    policy = folder / "policy"
    policy.mkdir()
    (policy / "config.json").write_text(json.dumps(CONFIG))
    write_weights(policy)
    talking = context_rollouts.policy_folder(folder / "talking")
    for world, names in LAUNCHES.items():
        (folder / str(world)).mkdir()
        more = ("rollouts", "failing") if world == 4 else ("apart",)
        start(folder / str(world), world, "context_worker.py", str(policy), "2", *names, *more)
    one = {name: context_worker.run(case, folder / "1" / name, policy) for name, case in context_worker.CASES.items()}
    one["rollouts"] = context_rollouts.run(talking, folder / "1" / "rollouts")
    return Results(folder, policy, one)


@pytest.mark.parametrize(("world", "name"), EXACT)
def test_every_gradient_of_policy_and_draft_is_the_single_process_one(results: Results, world: int, name: str) -> None:
    """CASES B5, B7, B8, B9: three steps, so that later ones start from weights that agree."""
    expected = results.one[name]["gradients"]
    models = {"draft"} if name == "distill" else {"policy", "draft"}
    assert {key.split(".")[0] for key in expected[0]} == models
    for model in models:
        assert all(any(g.any() for key, g in step.items() if key.startswith(model)) for step in expected)
    for rank in results.ranks(world, name):
        for step in range(3):
            assert rank["gradients"][step].keys() == expected[step].keys()
            for key, gradient in expected[step].items():
                torch.testing.assert_close(
                    rank["gradients"][step][key], gradient, rtol=1e-10, atol=1e-10, msg=f"step {step} {key}"
                )


@pytest.mark.parametrize(("world", "name"), RUNS)
def test_metrics_of_steps_and_validation_are_equal_on_all_ranks_and_to_the_single_process(
    results: Results, world: int, name: str
) -> None:
    """CASES G5: numbers of rollouts are counted once, means over tokens stay means over tokens."""
    one, first = results.one[name], results.rank(world, name, 0)
    for other in results.ranks(world, name):
        assert other["metrics"] == first["metrics"]
        assert other["validated"] == first["validated"]
    # Logged numbers, the loss and Megatron's gradient norm are float32.
    close = {"rel": 1e-5 if name == "sharded" else 1e-6, "abs": 1e-6}
    for mine, theirs in zip([*one["metrics"], one["validated"]], [*first["metrics"], first["validated"]], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert theirs[key] == pytest.approx(value, **close), key
    assert first["metrics"][0]["rollouts"] == 9
    assert first["metrics"][0]["loss"] != 0


@pytest.mark.parametrize(("world", "name"), RUNS)
def test_weights_after_three_steps_are_the_same_bits_on_all_ranks_and_those_of_one_process(
    results: Results, world: int, name: str
) -> None:
    first, *others = results.ranks(world, name)
    tolerance = 1e-5 if name == "sharded" else 1e-9  # the clip factor is float32
    for key, expected in results.one[name]["weights"].items():
        assert all(torch.equal(other["weights"][key], first["weights"][key]) for other in others), key
        torch.testing.assert_close(first["weights"][key], expected, rtol=0, atol=tolerance, msg=key)


@pytest.mark.parametrize(("world", "name"), EXACT)
def test_hidden_states_and_scores_are_those_of_one_process(results: Results, world: int, name: str) -> None:
    """Scores: the log-probs that `prepare_rollouts` attaches, all rows on every rank that shares the rollouts."""
    expected = results.one[name]
    ranks = results.ranks(world, name)
    for rank in ranks:
        for mine, whole in zip(rank["hidden"], expected["hidden"], strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-10)
        for key, row in rank["scores"].items():
            assert row == pytest.approx(expected["scores"][key], rel=1e-10)
    assert ranks[0]["scores"].keys() == ranks[1]["scores"].keys()
    assert set().union(*(rank["scores"] for rank in ranks)) == set(expected["scores"])


@pytest.mark.parametrize(("world", "name"), [(2, "sequences"), (2, "sharded"), (4, "sharded")])
def test_a_checkpoint_of_ranks_that_share_sequences_resumes_on_one_process(
    results: Results, world: int, name: str, tmp_path: Path
) -> None:
    checkpoint = results.folder / str(world) / f"{name}-checkpoints" / "step-00000001"
    local = sorted(file.name for file in checkpoint.glob("data-rank*"))
    assert local == [f"data-rank-{rank:05d}.pt" for rank in range(world // 2)], "one for each data rank"
    case = context_worker.CASES[name]
    resumed = context_worker.run(case, tmp_path, results.policy, resume=checkpoint, scored=results.one[name]["batches"])
    expected = results.one[name]
    for mine, theirs in zip(resumed["metrics"], expected["metrics"][1:], strict=True):
        for key in ("loss", "policy/grad_norm", "draft/grad_norm", "draft/lr"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4 if name == "sharded" else 1e-6), key
    for key, tensor in expected["weights"].items():
        torch.testing.assert_close(resumed["weights"][key], tensor, rtol=0, atol=1e-5 if name == "sharded" else 1e-9)


def test_ranks_that_share_rollouts_share_an_engine_and_the_run_is_the_single_process_one(results: Results) -> None:
    """Rollouts, old log-probs, rewards, validation, the frozen draft's acceptance: all as one process makes them."""
    one, ranks = results.one["rollouts"], results.ranks(4, "rollouts")
    assert [rank["starts"] for rank in ranks] == [1, 0, 1, 0]
    for first, peer in ((ranks[0], ranks[1]), (ranks[2], ranks[3])):
        assert first["rollouts"] == peer["rollouts"]
    for step, expected in enumerate(one["rollouts"]):
        both = [*ranks[0]["rollouts"][step], *ranks[2]["rollouts"][step]]
        assert [r.completion.tokens for r in both] == [r.completion.tokens for r in expected]
        assert [(r.reward, r.advantage) for r in both] == [(r.reward, r.advantage) for r in expected]
        for mine, theirs in zip(both, expected, strict=True):
            assert mine.old_logprobs == pytest.approx(theirs.old_logprobs, abs=1e-5)
    assert ranks[0]["files"] == [f"step-00000{step}-rank-{rank}.jsonl" for step in (0, 2) for rank in (0, 1)]
    for rank in ranks:
        assert rank["metrics"] == ranks[0]["metrics"]
    for mine, theirs in zip(one["metrics"], ranks[0]["metrics"], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert theirs[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert {"val/acceptance_frozen", "val/reward", "spec/acceptance_length"} <= one["metrics"][-1].keys()
    for key, tensor in one["weights"].items():
        torch.testing.assert_close(ranks[3]["weights"][key], tensor, rtol=0, atol=1e-5, msg=key)


def test_an_engine_that_dies_ends_every_rank_that_waits_for_its_rollouts(results: Results) -> None:
    for rank in results.ranks(4, "failing"):
        assert "the worker died" in rank["error"]
        assert len(rank["rollouts"]) < 3


def test_data_that_is_split_by_process_is_refused_on_every_rank(results: Results) -> None:
    for rank in (0, 1):
        said = (results.folder / "2" / f"apart-{rank}.txt").read_text()
        assert "different rollouts" in said
        assert "data_parallel_rank" in said
