"""A policy split over ranks is the whole policy: hidden states, loss, every gradient, taps, first weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.launch import start
from tests.distributed.policy_worker import CASES, MICRO, Case

LAST_LAYER = 4
Runs = Callable[[str], list[dict[str, Any]]]


def world_of(case: Case) -> int:
    return case.sizes.model_ranks


NAMES = [
    # Whole training steps over four ranks are in test_layouts.py; here they take a minute more.
    pytest.param(name, marks=pytest.mark.slow) if world_of(case) > 2 else name
    for name, case in CASES.items()
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """runs(name): what each rank found. The first case of a world starts it, once for all its cases."""
    found: dict[str, list[dict[str, Any]]] = {}

    def ranks_of(name: str) -> list[dict[str, Any]]:
        if name not in found:
            world = world_of(CASES[name])
            folder = tmp_path_factory.mktemp(f"world-{world}-")
            names = [other for other, case in CASES.items() if world_of(case) == world]
            start(folder, world, "policy_worker.py", *names)
            for other in names:
                files = [folder / f"{other}-{rank}.pt" for rank in range(world)]
                found[other] = [torch.load(file, weights_only=False) for file in files]
        return found[name]

    return ranks_of


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_starts_with_its_part_of_the_same_weights(name: str, runs: Runs) -> None:
    held = set()
    for rank in runs(name):
        assert set(rank["weights"].values()) == {0.0}
        assert rank["padding"] == 0.0
        held |= set(rank["weights"])
    assert held == set(runs(name)[0]["scale"])


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_loss_and_every_gradient_equal_the_whole_policys(name: str, runs: Runs) -> None:
    bound = 1e-10 if CASES[name].dtype is torch.float64 else 1e-5
    seen = set()
    for rank in runs(name):
        assert rank["loss"] < bound
        for tensor, difference in rank["gradients"].items():
            assert difference < bound, tensor
        seen |= set(rank["gradients"])
    # No gradient is there by being zero, and none is missing.
    assert seen == set(runs(name)[0]["scale"])
    assert min(runs(name)[0]["scale"].values()) > 0.1
    hidden = [rank["hidden"] for rank in runs(name) if rank["hidden"] is not None]
    assert len(hidden) == world_of(CASES[name]) // CASES[name].sizes.pipeline_parallel
    assert all(len(one) == len(MICRO) and max(one) < bound for one in hidden)


@pytest.mark.parametrize("name", NAMES)
def test_taps_equal_the_whole_policys_and_pipelining_alone_changes_no_bit(name: str, runs: Runs) -> None:
    case = CASES[name]
    layers = case.sizes.model_ranks // case.sizes.pipeline_parallel
    bound = 0.0 if layers == 1 else 1e-12 if case.dtype is torch.float64 else 1e-5
    for rank in runs(name):
        assert rank["taps"] <= bound
        assert all(ids == rank["tap ids"][0] for ids in rank["tap ids"])
        assert not rank["recorded again"]
        assert rank["refused"]  # a layer that the policy lacks, by every stage alike
    # Each tap, and the embedding (-1), is recorded by one stage.
    recorded = sorted(k for rank in runs(name) for k in rank["tap ids"][0])
    assert recorded == sorted([*range(-1, LAST_LAYER + 1)] * layers)
