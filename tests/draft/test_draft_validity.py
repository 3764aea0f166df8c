"""Which rows a pass is scored on: the depth of every row against V[t, i] written out."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spec.batch import Completion, Prompt, Rollout, pack_documents
from lightning_spec.draft.validity import pass_counts, pass_depth

DOCUMENT = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=0, max_size=9)


@given(st.lists(DOCUMENT, max_size=4), st.integers(1, 7), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_depth_is_the_running_product_of_sampled_and_not_stopped(
    documents: list[list[tuple[bool, bool]]], passes: int, longest: int
) -> None:
    want: list[int] = []
    for doc in documents:
        length = len(doc)
        for t in range(length):
            v = [
                t + 1 + i <= length - 1
                and all(doc[t + j][0] for j in range(1, i + 2))
                and not any(doc[t + j][1] for j in range(1, i + 2))
                and t + 1 + i < longest
                for i in range(passes)
            ]
            assert v == sorted(v, reverse=True)  # nested, so one number says it all
            want.append(sum(v))
    flat = [pair for doc in documents for pair in doc]
    positions = torch.tensor([t for doc in documents for t in range(len(doc))], dtype=torch.int64)
    sampled = torch.tensor([m for m, _ in flat], dtype=torch.bool)
    stop = torch.tensor([s for _, s in flat], dtype=torch.bool)
    depth = pass_depth(positions, sampled, stop, passes, longest)
    assert depth.tolist() == want
    assert pass_counts(depth, passes).tolist() == [sum(d > i for d in want) for i in range(passes)]


def depth_of(prompt: int, completion: int, finish: str = "length", passes: int = 3, longest: int = 100) -> list[int]:
    rollout = Rollout(
        Prompt("u", tuple(range(prompt)), ""),
        Completion(tuple(range(completion)), (0.0,) * completion, finish),  # type: ignore[arg-type]
        "u",
    )
    batch = pack_documents([rollout], [0])
    return pass_depth(batch.positions, batch.sampled, batch.stop, passes, longest).tolist()


def test_the_last_prompt_row_is_the_first_supervised_one() -> None:
    # Tokens 4..8 are sampled: row 3 predicts past token 4 (its bonus); the last row has nothing to predict from.
    assert depth_of(4, 5) == [0, 0, 0, 3, 3, 3, 2, 1, 0]


def test_no_row_drafts_past_a_stop() -> None:
    assert depth_of(4, 5, "stop") == [0, 0, 0, 3, 3, 2, 1, 0, 0]


def test_completions_of_no_one_or_only_a_stop_token() -> None:
    assert depth_of(4, 0) == [0, 0, 0, 0]
    assert depth_of(4, 1) == [0, 0, 0, 1, 0]
    assert depth_of(4, 1, "stop") == [0, 0, 0, 0, 0]
    assert depth_of(0, 3) == [2, 1, 0]
    assert depth_of(0, 0) == []


def test_rows_past_the_longest_context_are_excluded() -> None:
    assert depth_of(4, 5, longest=7) == [0, 0, 0, 3, 2, 1, 0, 0, 0]
    assert depth_of(9, 3, longest=7) == [0] * 12


def test_a_tool_turn_interrupts_every_chain() -> None:
    sampled = torch.tensor([False, True, True, False, False, True, True, True])
    depth = pass_depth(torch.arange(8), sampled, torch.zeros(8, dtype=torch.bool), 4, 99)
    assert depth.tolist() == [2, 1, 0, 0, 3, 2, 1, 0]
