from __future__ import annotations

import random

import numpy as np
import torch

from lightning_spec.parallel.random_state import micro_seed, random_states, restore_random_states, seed_step


def draws() -> tuple[float, float, float, float]:
    return random.gauss(0, 1), float(np.random.randn()), float(torch.rand(())), random.random()


def test_restored_generators_draw_on_from_where_they_were(tmp_path: object) -> None:
    draws()
    states = random_states()
    first = [draws() for _ in range(3)]
    draws()
    restore_random_states(states)
    assert [draws() for _ in range(3)] == first


def test_states_survive_torchs_weights_only_load(tmp_path: object) -> None:
    states = random_states()
    path = f"{tmp_path}/states.pt"
    torch.save(states, path)
    first = draws()
    restore_random_states(torch.load(path, weights_only=True))
    assert draws() == first


def test_a_steps_draws_depend_on_seed_step_and_data_rank_alone() -> None:
    found = {}
    for seed in (1, 2):
        for step in (0, 1):
            for rank in (0, 1):
                seed_step(seed, step, rank)
                found[seed, step, rank] = draws()
    assert len(set(found.values())) == 8
    draws()
    seed_step(2, 1, 0)
    assert draws() == found[2, 1, 0]


def test_every_micro_batch_of_every_data_rank_and_step_has_a_seed_of_its_own() -> None:
    seeds = {micro_seed(seed, step, rank, i) for seed in (1, 2) for step in (0, 11) for rank in (0, 1) for i in (0, 1)}
    assert len(seeds) == 16
    assert micro_seed(1, 0, 0, 0) in seeds, "a function of its arguments alone"
    torch.Generator().manual_seed(max(seeds))
