"""Advantages and the overlong filter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spec.errors import ConfigError
from lightning_spec.loss import group_advantages, trained_flags


def test_group_advantage_is_the_z_score_within_the_group() -> None:
    got = group_advantages([1.0, 0.0, 0.0, 5.0, 9.0], ["a", "a", "a", "b", "b"], eps=0.0)
    a = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    b = torch.tensor([5.0, 9.0], dtype=torch.float64)
    torch.testing.assert_close(got, torch.cat([(x - x.mean()) / x.std() for x in (a, b)]))


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    got = group_advantages([3.0, 0.0, 6.0], ["a"] * 3, std="none", baseline="leave_one_out")
    assert got.tolist() == pytest.approx([0.0, -4.5, 4.5])


def test_batch_std_uses_all_rewards_and_the_groups_mean() -> None:
    r = torch.tensor([1.0, 3.0, 10.0, 14.0], dtype=torch.float64)
    got = group_advantages(r, ["a", "a", "b", "b"], std="batch", eps=0.0)
    torch.testing.assert_close(got, torch.tensor([-1.0, 1.0, -2.0, 2.0], dtype=torch.float64) / r.std())


@settings(max_examples=50, deadline=None)
@given(
    data=st.lists(st.tuples(st.sampled_from("abcd"), st.floats(-10, 10)), min_size=1, max_size=20),
    seed=st.randoms(use_true_random=False),
    std=st.sampled_from(["group", "batch", "none"]),
    baseline=st.sampled_from(["mean", "leave_one_out"]),
)
def test_groups_are_found_wherever_their_samples_land(data, seed, std, baseline) -> None:
    order = list(range(len(data)))
    seed.shuffle(order)
    straight = group_advantages([r for _, r in data], [g for g, _ in data], std=std, baseline=baseline)
    shuffled = group_advantages([data[i][1] for i in order], [data[i][0] for i in order], std=std, baseline=baseline)
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-9, atol=1e-9)
    ids = torch.tensor([ord(g) for g, _ in data])
    torch.testing.assert_close(group_advantages([r for _, r in data], ids, std=std, baseline=baseline), straight)
    assert torch.isfinite(straight).all()


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2, 0.3, 0.3],
        [0.7, float(torch.tensor(0.7)), 0.7],
        [1e6 + 0.01, 1e6, 1e6 - 0.01],
        [0.0, 0.1 + 0.2 - 0.3, 0.0],
        [-5.0, -5.0, -5.0],
    ],
)
def test_rewards_equal_up_to_rounding_give_exactly_zero(rewards, std, baseline) -> None:
    # Another group makes the batch's deviation ordinary.
    got = group_advantages([*rewards, 0.0, 1.0], ["a"] * 3 + ["b"] * 2, std=std, baseline=baseline)
    assert got[:3].tolist() == [0.0, 0.0, 0.0]
    assert got[3] < 0 < got[4]
    assert group_advantages(torch.tensor(rewards, dtype=torch.float32), ["a"] * 3, std=std).tolist() == [0.0] * 3


def test_a_small_real_difference_is_not_taken_for_rounding() -> None:
    got = group_advantages([100.0, 100.001], ["a", "a"], eps=0.0)
    assert got.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-6)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_a_group_of_one_gets_zero(std, baseline) -> None:
    assert group_advantages([7.0], ["a"], std=std, baseline=baseline).tolist() == [0.0]
    assert group_advantages([7.0, 1.0, 2.0], ["a", "b", "b"], std=std, baseline=baseline)[0] == 0.0


def test_no_rewards_at_all_is_fine() -> None:
    assert group_advantages([], [], std="batch").shape == (0,)


def test_bad_rewards_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="sample 1 is not finite"):
        group_advantages([1.0, float("nan")], ["a", "a"])
    with pytest.raises(ConfigError, match="do not match"):
        group_advantages([1.0], ["a", "a"])
    with pytest.raises(ConfigError, match="`std`"):
        group_advantages([1.0], ["a"], std="groups")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`baseline`"):
        group_advantages([1.0], ["a"], baseline="median")  # type: ignore[arg-type]


def test_overlong_filter_skips_cut_completions_only_when_on() -> None:
    assert trained_flags(["stop", "length"], overlong="skip") == [True, False]
    assert trained_flags(["stop", "length"], overlong="train") == [True, True]


@pytest.mark.parametrize("reason", [None, "abort", "eos", ""])
@pytest.mark.parametrize("overlong", ["skip", "train"])
def test_overlong_filter_refuses_finish_reasons_it_does_not_know(reason, overlong) -> None:
    with pytest.raises(ConfigError, match="completion 1"):
        trained_flags(["stop", reason], overlong=overlong)


def test_overlong_filter_refuses_unknown_option() -> None:
    with pytest.raises(ConfigError, match="overlong"):
        trained_flags(["stop"], overlong="off")  # type: ignore[arg-type]
