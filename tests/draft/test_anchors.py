"""Which rows block drafters put blocks behind, and what is scored there (SEMANTICS.md 2; CASES A3, A4, A5, B10)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_spec.draft.anchors import Anchors, slot_depth


def depth_of(
    lengths: Sequence[int], sampled: Sequence[bool], stop: Sequence[bool], slots: int, longest: int = 99
) -> list[int]:
    positions = torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(n) for n in lengths)])
    m, ends = torch.tensor(sampled, dtype=torch.bool), torch.tensor(stop, dtype=torch.bool)
    found: list[int] = slot_depth(positions, m, ends, slots, longest).tolist()
    return found


def plain(
    lengths: Sequence[int], sampled: Sequence[bool], stop: Sequence[bool], slots: int, longest: int = 99
) -> list[int]:
    """By the definition: a label counts when all of x_a .. label are sampled, in the document, and none before the
    label stops."""
    found, start = [], 0
    for length in lengths:
        for place in range(length):
            depth = 0
            for s in range(slots):
                label = place + 1 + s
                good = place >= 1 and label < min(length, longest)
                good = good and all(sampled[start + n] for n in range(place, label + 1))
                good = good and not any(stop[start + n] for n in range(place, label))
                if not good:
                    break
                depth += 1
            found.append(depth)
        start += length
    return found


def test_a_turn_of_tokens_8_to_39_scores_two_slots_of_a_block_of_four_at_anchor_37() -> None:
    """CASES A5: DSpark's four slots are [1, 1, 0, 0], DFlash's slots 1 to 3 [1, 1, 0]."""
    sampled = [8 <= n <= 39 for n in range(50)]
    for slots in (4, 3):
        depth = depth_of([50], sampled, [False] * 50, slots)
        assert depth[37] == 2
        assert depth[38] == 1
        assert depth[39] == 0
    # The first sampled token is the first bonus token: blocks begin there, and their first label is the next one.
    assert depth_of([50], sampled, [False] * 50, 4)[7:9] == [0, 4]


def test_validity_is_a_prefix_with_no_slot_after_a_hole() -> None:
    sampled = [False, True, True, False, True, True, True]
    assert depth_of([7], sampled, [False] * 7, 5) == [0, 1, 0, 0, 2, 1, 0]


def test_a_stop_is_a_label_but_nothing_is_drafted_after_it() -> None:
    stop = [False, False, False, True, False, False]
    assert depth_of([6], [True] * 6, stop, 4) == [0, 2, 1, 0, 1, 0]


def test_a_documents_first_row_is_no_anchor_and_blocks_do_not_reach_the_next_document() -> None:
    assert depth_of([1, 2, 3, 0, 4], [True] * 10, [False] * 10, 3) == [0, 0, 0, 0, 1, 0, 0, 2, 1, 0]


def test_labels_past_the_last_position_are_none() -> None:
    assert depth_of([6], [True] * 6, [False] * 6, 4, longest=4) == [0, 2, 1, 0, 0, 0]


@pytest.mark.parametrize("lengths", [[], [0], [1], [1, 1]])
def test_nothing_to_score_gives_no_anchors(lengths: list[int]) -> None:
    total = sum(lengths)
    depth = torch.tensor(depth_of(lengths, [True] * total, [False] * total, 3), dtype=torch.int64)
    for per in (None, 2):
        found = Anchors.choose(depth, lengths, 3, per, None, 0)
        assert found.rows.numel() == found.depth.numel() == 0
        assert found.counts().tolist() == [0, 0, 0]


def test_random_masks_agree_with_the_definition() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        lengths = torch.randint(0, 9, (4,), generator=g).tolist()
        total = sum(lengths)
        sampled = (torch.rand(total, generator=g) < 0.8).tolist()
        stop = (torch.rand(total, generator=g) < 0.1).tolist()
        slots, longest = int(torch.randint(1, 6, (1,), generator=g)), int(torch.randint(1, 10, (1,), generator=g))
        assert depth_of(lengths, sampled, stop, slots, longest) == plain(lengths, sampled, stop, slots, longest)


# ---- choice -------------------------------------------------------------------------------------------------------

LENGTHS = [30, 3, 1, 40]


def choose(per: int | None, seeds: list[int] | None, seed: int = 0, lengths: Sequence[int] = LENGTHS) -> Anchors:
    positions = torch.cat([torch.arange(n) for n in lengths])
    depth = slot_depth(positions, torch.ones_like(positions, dtype=torch.bool), positions < 0, 4, 99)
    return Anchors.choose(depth, lengths, 4, per, seeds, seed)


def by_document(rows: Tensor, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    starts = [0, *itertools.accumulate(lengths)]
    return [[int(r) - a for r in rows if a <= r < b] for a, b in itertools.pairwise(starts)]


def test_without_a_limit_every_valid_anchor_is_taken() -> None:
    found = choose(None, None)
    assert by_document(found.rows) == [list(range(1, 29)), [1], [], list(range(1, 39))]
    assert found.counts().tolist() == [67, 64, 62, 60]


def test_the_limit_holds_for_each_document_and_draws_without_repeats() -> None:
    found = choose(5, [1, 2, 3, 4])
    parts = by_document(found.rows)
    assert [len(part) for part in parts] == [5, 1, 0, 5]
    assert all(part == sorted(set(part)) for part in parts)
    assert found.depth.tolist() == [min(4, n - 1 - p) for n, part in zip(LENGTHS, parts, strict=True) for p in part]


def test_the_same_seed_draws_the_same_anchors_and_another_step_others() -> None:
    """CASES B10."""
    one, again, other = choose(5, [1, 2, 3, 4]), choose(5, [1, 2, 3, 4]), choose(5, [11, 12, 13, 14])
    assert one.rows.tolist() == again.rows.tolist() != other.rows.tolist()


def test_a_documents_anchors_depend_on_its_own_seed_alone() -> None:
    """Whatever micro-batch it lies in, and at whatever place."""
    packed = by_document(choose(5, [1, 2, 3, 4]).rows)
    assert by_document(choose(5, [4], lengths=[40]).rows, [40]) == packed[3:]
    assert by_document(choose(5, [4, 1], lengths=[40, 30]).rows, [40, 30]) == [packed[3], packed[0]]


def test_without_document_seeds_the_drafts_seed_decides() -> None:
    nothing: tuple[list[int] | None, ...] = (None, [])
    for seeds in nothing:
        assert choose(5, seeds, seed=1).rows.tolist() == choose(5, seeds, seed=1).rows.tolist()
        assert choose(5, seeds, seed=1).rows.tolist() != choose(5, seeds, seed=2).rows.tolist()


def test_the_draw_is_uniform_over_the_valid_anchors() -> None:
    times = torch.zeros(10)
    for seed in range(2000):
        times[choose(3, [seed], lengths=[12]).rows - 1] += 1
    assert ((times - 600).abs() < 5 * (2000 * 0.3 * 0.7) ** 0.5).all()


def test_choosing_leaves_the_global_random_state_alone() -> None:
    state = torch.get_rng_state()
    choose(5, None)
    assert torch.equal(state, torch.get_rng_state())


def test_seeds_of_another_number_of_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="2 seeds for 4 documents"):
        choose(5, [1, 2])
