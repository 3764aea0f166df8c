"""Packing: alignment of masks, labels and log-probs, and what the micro-batch cut may and may not depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_spec.batch import Completion, Prompt, Rollout, SpecStats, pack, pack_documents


def rollout(prompt: int, completion: int, *, finish: str = "stop", base: int = 10, **kwargs: object) -> Rollout:
    tokens = tuple(range(base, base + prompt))
    sampled = tuple(range(base + prompt, base + prompt + completion))
    logprobs = tuple(-0.1 * (i + 1) for i in range(completion))
    return Rollout(Prompt("p", tokens, ""), Completion(sampled, logprobs, finish), group="p", **kwargs)  # type: ignore[arg-type]


def test_rows_that_predict_sampled_tokens_are_trained_and_the_row_past_the_last_label_is_not() -> None:
    batch = pack_documents([rollout(3, 2, advantage=2.0)], [0])
    assert batch.labels.tolist() == [11, 12, 13, 14, -1]
    assert batch.loss_mask.tolist() == [False, False, True, True, False]
    assert batch.sampled.tolist() == [False, False, False, True, True]
    assert batch.stop.tolist() == [False, False, False, False, True]
    assert batch.advantages.tolist() == [0, 0, 2, 2, 0]
    torch.testing.assert_close(batch.engine_logprobs, torch.tensor([0, 0, -0.1, -0.2, 0]))


def test_a_truncated_completion_has_no_stop_token() -> None:
    assert not pack_documents([rollout(2, 3, finish="length")], [0]).stop.any()


def test_eos_is_trained_exactly_once() -> None:
    """CASES E5: the label EOS stands in exactly one supervised row."""
    batch = pack_documents([rollout(3, 1), rollout(2, 4)], [0, 1])
    for start, length in ((0, 4), (4, 6)):
        eos = int(batch.tokens[start + length - 1])
        rows = batch.loss_mask[start : start + length] & (batch.labels[start : start + length] == eos)
        assert int(rows.sum()) == 1


@pytest.mark.parametrize("completion", [0, 1])
def test_empty_and_single_token_completions_pack(completion: int) -> None:
    """CASES A13."""
    batch = pack_documents([rollout(1, completion)], [0])
    assert int(batch.loss_mask.sum()) == completion


def test_a_completion_without_a_prompt_cannot_supervise_its_first_token() -> None:
    batch = pack_documents([rollout(0, 3)], [0])
    assert batch.loss_mask.tolist() == [True, True, False]
    torch.testing.assert_close(batch.engine_logprobs, torch.tensor([-0.2, -0.3, 0.0]))


def test_an_untrained_rollout_has_no_loss_rows_but_still_teaches_the_draft() -> None:
    batch = pack_documents([rollout(2, 3, trained=False)], [0])
    assert not batch.loss_mask.any()
    assert int(batch.sampled.sum()) == 3


def test_old_log_probs_are_attached_only_when_every_rollout_has_them() -> None:
    a = rollout(2, 1, old_logprobs=(-0.5,))
    assert pack_documents([a], [0]).old_logprobs is not None
    assert pack_documents([a, rollout(2, 1)], [0, 1]).old_logprobs is None


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=0, max_size=20),
    st.integers(1, 30),
)
def test_packing_keeps_every_token_once_and_respects_the_budget(sizes: list[tuple[int, int]], budget: int) -> None:
    rollouts = [rollout(p, c, base=100 * i) for i, (p, c) in enumerate(sizes)]
    micro = pack(rollouts, budget)
    seen = sorted(i for m in micro for i in m.rollout_index)
    assert seen == [i for i, r in enumerate(rollouts) if r.length]
    for m in micro:
        assert sum(m.lengths) == len(m.tokens)
        assert len(m.tokens) <= budget or len(m.lengths) == 1
        start = 0
        for length, i in zip(m.lengths, m.rollout_index, strict=True):
            row = m.tokens[start : start + length].tolist()
            assert row == [*rollouts[i].prompt.tokens, *rollouts[i].completion.tokens]
            assert m.positions[start : start + length].tolist() == list(range(length))
            start += length


def test_worked_answers_become_supervised_rollouts_that_stop() -> None:
    made = Rollout.from_worked(Prompt("a", (1, 2), "", worked=(3, 4)))
    assert made.completion.tokens == (3, 4)
    assert made.completion.finish == "stop"
    with pytest.raises(ValueError, match="no worked answer"):
        Rollout.from_worked(Prompt("b", (1,), ""))


def test_spec_stats_subtract_and_count_the_bonus_token() -> None:
    late, early = SpecStats(10, 30, 20, (10, 6, 4)), SpecStats(4, 12, 6, (3, 2))
    diff = late - early
    assert (diff.drafts, diff.drafted, diff.accepted, diff.per_position) == (6, 18, 14, (7, 4, 4))
    assert diff.acceptance_length == pytest.approx(1 + 14 / 6)
    assert SpecStats().acceptance_length == 1.0


def test_completion_refuses_log_probs_of_another_length() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 log-probs"):
        Completion((1, 2), (0.0,), "stop")


def test_take_indexes_every_row_and_leaves_what_belongs_to_the_whole() -> None:
    batch = replace(pack([rollout(3, 4), rollout(2, 1)], 64)[0], seed=5)
    rows = torch.tensor([0, 3, 8])
    taken = batch.take(rows)
    for name in batch.__slots__:
        whole, part = getattr(batch, name), getattr(taken, name)
        if isinstance(whole, torch.Tensor):
            assert torch.equal(part, whole[rows]), name
        else:
            assert part == whole, name
    assert taken.lengths == [7, 3]
    assert batch.take(rows[:0]).tokens.shape == (0,)
