"""Rewards: right answers score, malformed ones score low without raising, user faults name the prompt."""

from __future__ import annotations

import threading
import time

import pytest

from lightning_spec.batch import Completion, Prompt
from lightning_spec.errors import ConfigError
from lightning_spec.rollout.rewards import (
    ExactMatch,
    LengthPenalty,
    MathVerifyReward,
    ReasoningGymReward,
    Reward,
    RewardError,
    WeightedRewards,
    score,
)

HASH = r"#([^#]*)$"


def prompt(**task):
    return Prompt("p:7", (1, 2), "q", task)


def done(n=3, finish="stop"):
    return Completion((5,) * n, (-0.1,) * n, finish)


def gym(index=0, **config):
    from lightning_spec.sources import ReasoningGymPrompts

    item = ReasoningGymPrompts("chain_sum", config, size=10, seed=2).item(index)
    return Prompt(item.uid, (1,), str(item.prompt), item.task)


MALFORMED = ["", " ", "#", "##", "# ", "no mark", "#12#", "#\n", "\x00#\x00", "#" + "9" * 5000, "é#٣", "#nan", "#1e400"]


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_completions_score_zero_and_never_raise(text):
    for reward in (ReasoningGymReward(HASH), ReasoningGymReward(HASH, partial=True), ExactMatch(HASH)):
        value, _ = score(reward, gym(), done(), text)
        assert 0 <= value < 0.1


def test_the_last_marked_answer_counts():
    right = gym().task["answer"]
    reward = ReasoningGymReward(HASH)
    assert reward(gym(), done(), f"1+1=2;#{right}") == 1
    assert reward(gym(), done(), f"#{right}0#{right}") == 1
    assert reward(gym(), done(), f"#{right}#{right}9") == 0
    assert reward(gym(), done(), f"# {right} ") == 1
    assert ReasoningGymReward()(gym(), done(), f" {right}\n") == 1
    assert ReasoningGymReward(r"answer is (\S+)")(gym(), done(), f"answer is 0 no, answer is {right}") == 1
    assert ExactMatch(r"-?\d+")(prompt(answer="-4"), done(), "so 3-7 gives -4.") == 1


def test_each_problem_is_judged_by_its_own_entry():
    for index in range(10):
        p = gym(index, min_terms=3, max_digits=2)
        assert ReasoningGymReward()(p, done(), p.task["answer"]) == 1
        assert ReasoningGymReward()(p, done(), str(int(p.task["answer"]) + 1)) == 0


def test_partial_credit_is_kept_only_when_asked_for():
    from lightning_spec.sources import ReasoningGymPrompts

    item = ReasoningGymPrompts("spell_backward", size=3).item(0)
    p = Prompt(item.uid, (1,), "", item.task)
    nearly = item.task["answer"][:-1] + "?"
    assert ReasoningGymReward()(p, done(), nearly) == 0
    assert 0 < ReasoningGymReward(partial=True)(p, done(), nearly) < 1


def test_exact_match_ignores_outer_space_and_case_only_when_asked():
    assert ExactMatch()(prompt(answer=" Paris"), done(), "Paris\n") == 1
    assert ExactMatch()(prompt(answer="Paris"), done(), "paris") == 0
    assert ExactMatch(ignore_case=True)(prompt(answer="Paris"), done(), "pARIS") == 1
    assert ExactMatch()(prompt(answer=7), done(), "7") == 1


def test_length_penalty_is_a_ramp_and_full_for_truncation():
    penalty = LengthPenalty(free=10, limit=20)
    assert [penalty(prompt(), done(n), "") for n in (0, 10, 15, 20, 30)] == [0, 0, -0.5, -1, -1]
    assert penalty(prompt(), done(3, "length"), "") == -1


def test_weighted_rewards_sum_and_report_their_parts():
    mix = WeightedRewards([ExactMatch(), LengthPenalty(0, 10), ExactMatch()], [1.0, 0.5, 2.0])
    total, parts = score(mix, prompt(answer="2"), done(5), "2")
    assert total == pytest.approx(1 - 0.25 + 2)
    assert parts == {"ExactMatch": 1.0, "LengthPenalty": -0.5, "ExactMatch_2": 1.0}


class Raises(Reward):
    def __call__(self, prompt, completion, text):
        return 1 / 0


class Nan(Reward):
    def __call__(self, prompt, completion, text):
        return float("nan")


@pytest.mark.parametrize("reward", [Raises(), Nan(), WeightedRewards([ExactMatch(), Nan()], [1.0, 0.0])])
def test_a_faulty_reward_is_reported_with_its_prompt(reward):
    with pytest.raises(RewardError, match="'p:7'"):
        score(reward, prompt(answer="x"), done(), "text")


@pytest.mark.parametrize(
    "make",
    [
        lambda: ExactMatch("("),
        lambda: LengthPenalty(5, 5),
        lambda: WeightedRewards([]),
        lambda: WeightedRewards([ExactMatch()], [1.0, 2.0]),
        lambda: MathVerifyReward(timeout=0),
        lambda: score(ExactMatch(), prompt(), done(), "x"),
        lambda: score(ReasoningGymReward(), prompt(answer="1"), done(), "x"),
    ],
)
def test_bad_settings_and_missing_task_fields_are_config_errors(make):
    with pytest.raises(ConfigError):
        make()


@pytest.fixture(scope="module")
def math():
    reward = MathVerifyReward(timeout=20)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        ("1/2", "so it is $\\frac{2}{4}$", 1),
        ("\\frac{1}{2}", "The answer is \\boxed{0.5}", 1),
        ("1/2", "0.51", 0),
        ("12", "", 0),
        ("12", "\\frac{", 0),
        ("x^2+2x+1", "$(x+1)^2$", 1),
    ],
)
def test_math_verify_compares_values_off_the_main_thread(math, gold, text, value):
    found = []
    thread = threading.Thread(target=lambda: found.append(score(math, prompt(answer=gold), done(), text)[0]))
    thread.start()
    thread.join()
    assert found == [value]


def test_a_comparison_that_takes_too_long_scores_zero_and_the_next_one_works(math):
    checker = math._checker
    math(prompt(answer="2"), done(), "2")
    old, checker.timeout = checker.timeout, 0.5
    try:
        began = time.monotonic()
        assert math(prompt(answer="2"), done(), "$9^{9^{9^{9}}}!$") == 0
        assert time.monotonic() - began < 10
    finally:
        checker.timeout = old
    assert math(prompt(answer="2"), done(), "2") == 1
    helper = checker._helper
    math.close()
    assert helper.poll() is not None
