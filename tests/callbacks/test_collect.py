"""One rollout phase as pure functions."""

from __future__ import annotations

import pytest

from callbacks.collect import (
    AdvantageConfig,
    bag_from_plain,
    bag_to_plain,
    make_asks,
    make_rollouts,
    repeated,
    request_seed,
    reward_metrics,
    speculation_metrics,
)
from lightning_spec.batch import Completion, Prompt, SpecStats

PROMPTS = [Prompt("a", (1, 2), "a"), Prompt("b", (3,), "b")]


def done(finish="stop"):
    return Completion((4, 5), (-1.0, -1.0), finish)


def test_seeds_depend_on_run_step_prompt_and_sample_and_on_nothing_else():
    base = request_seed(0, 5, "a", 1)
    assert base == request_seed(0, 5, "a", 1)
    others = [
        request_seed(1, 5, "a", 1),
        request_seed(0, 6, "a", 1),
        request_seed(0, 5, "b", 1),
        request_seed(0, 5, "a", 2),
    ]
    assert len({base, *others}) == 5
    assert all(0 <= seed < 2**48 for seed in others)


def test_seeds_of_a_prompt_do_not_depend_on_its_neighbours():
    alone = make_asks(PROMPTS[1:], 2, seed=3, step=9)
    together = make_asks(PROMPTS, 2, seed=3, step=9)
    assert [a.request.seed for a in alone] == [a.request.seed for a in together[2:]]


def test_a_prompt_drawn_twice_makes_two_groups_with_different_seeds():
    asks = make_asks([PROMPTS[0], PROMPTS[0]], 2, seed=0, step=0)
    assert len({ask.group for ask in asks}) == 2
    assert len({ask.request.seed for ask in asks}) == 4


def test_validation_and_training_never_share_a_seed():
    train = {a.request.seed for a in make_asks(PROMPTS, 4, seed=0, step=0)}
    assert not train & {a.request.seed for a in make_asks(PROMPTS, 4, seed=0, step=0, kind="val")}


def test_advantages_are_taken_inside_each_prompts_group():
    asks = make_asks(PROMPTS, 2, seed=0, step=0)
    rewards = [(1.0, {}), (0.0, {}), (5.0, {}), (5.0, {})]
    rollouts = make_rollouts(asks, [done()] * 4, rewards, advantages=AdvantageConfig(std="none"))
    assert [r.advantage for r in rollouts] == [0.5, -0.5, 0.0, 0.0]


def test_the_overlong_filter_skips_cut_completions_but_they_count_in_their_group():
    asks = make_asks(PROMPTS[:1], 2, seed=0, step=0)
    finished = [done(), done("length")]
    rewards = [(1.0, {}), (0.0, {})]
    config = AdvantageConfig(std="none")
    skipped = make_rollouts(asks, finished, rewards, advantages=config, overlong="skip")
    assert [r.trained for r in skipped] == [True, False]
    assert skipped[0].advantage == 0.5
    kept = make_rollouts(asks, finished, rewards, advantages=config, overlong="train")
    assert [r.trained for r in kept] == [True, True]


def test_reward_metrics_of_a_phase():
    asks = make_asks(PROMPTS, 2, seed=0, step=0)
    finished = [done(), done("length"), done(), done()]
    rewards = [(1.0, {"right": 1.0}), (0.0, {"right": 0.0}), (1.0, {"right": 1.0}), (1.0, {"right": 1.0})]
    rollouts = make_rollouts(asks, finished, rewards, advantages=AdvantageConfig(), overlong="skip")
    values = reward_metrics(rollouts, pass_reward=1.0).values()
    assert values["reward"] == 0.75
    assert values["reward/pass_rate"] == 0.75
    assert values["reward/right"] == 0.75
    assert values["reward/group_std"] == pytest.approx(0.25)
    assert values["rollout/flat_groups"] == 0.5
    assert values["rollout/truncated"] == 0.25
    assert values["rollout/skipped"] == 0.25
    assert values["rollout/length"] == 2


def test_acceptance_length_of_two_ranks_is_the_ratio_of_their_sums():
    one = speculation_metrics(SpecStats(10, 30, 20, (10, 6, 4)), 3)
    one.update(speculation_metrics(SpecStats(30, 90, 0, (0, 0, 0)), 3))
    values = one.values()
    assert values["spec/acceptance_length"] == pytest.approx(1 + 20 / 40)
    assert values["spec/accepted_at_1"] == pytest.approx(6 / 40)
    assert values["spec/drafted"] == 120


def test_no_draft_at_all_is_acceptance_length_one_and_the_same_names():
    empty, full = speculation_metrics(SpecStats(), 3), speculation_metrics(SpecStats(1, 3, 1, (1,)), 3)
    assert empty.values()["spec/acceptance_length"] == 1.0
    assert empty.values().keys() == full.values().keys()


def test_a_second_batch_repeats_means_and_spends_neither_seconds_nor_counts_again():
    bag = speculation_metrics(SpecStats(10, 30, 20, (10, 6, 4)), 3)
    bag.add("time/rollout", 4.0, reduction="max")
    again = repeated(bag).values()
    assert again["spec/acceptance_length"] == 3.0
    assert again["spec/drafts"] == 0
    assert again["time/rollout"] == 0
    assert again.keys() == bag.values().keys()


def test_a_bag_survives_a_checkpoint():
    bag = speculation_metrics(SpecStats(10, 30, 20, (10, 6, 4)), 3)
    bag.add("x", 2.0, reduction="same")
    assert bag_from_plain(bag_to_plain(bag)).values() == bag.values()
