"""Which stage gets which layers, where the draft lives, and what each stage sends: decided alike on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spec.draft import Eagle3
from lightning_spec.errors import ConfigError
from lightning_spec.parallel.groups import ParallelSizes
from lightning_spec.policy import new_policy_config, tap_owner
from lightning_spec.shapes import PolicyShape
from strategies.estimate import held_micro_batches
from strategies.layout import RowCost, balanced, resolve_layout
from strategies.place import Place
from strategies.taps import TapLayout


def shape(**changes: int) -> PolicyShape:
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_layers": 16, "num_heads": 4, **changes}
    return PolicyShape.from_hf(new_policy_config(**sizes))  # type: ignore[arg-type]


@given(st.integers(1, 40), st.integers(1, 8), st.floats(0, 30))
def test_balanced_layouts_are_as_fast_as_any(layers: int, stages: int, extra: float) -> None:
    if layers < stages:
        with pytest.raises(ConfigError, match="more pipeline stages than layers"):
            balanced(layers, stages, extra)
        return
    counts = balanced(layers, stages, extra)
    assert sum(counts) == layers
    assert min(counts) >= 1
    slowest = max([*counts[:-1], counts[-1] + extra])
    # Moving any layer from the last stage to another, or back, is no better.
    for last in range(1, layers - stages + 2):
        others = layers - last
        best = max(-(-others // max(1, stages - 1)) if stages > 1 else 0, last + extra)
        if stages > 1 or last == layers:
            assert slowest <= best + 1e-9


def test_auto_gives_the_stage_with_the_draft_fewer_layers() -> None:
    policy, draft = shape(), Eagle3(num_passes=4)
    draft.build(policy)
    cost = RowCost.of(policy, draft, trains_policy=True, recompute=False)
    sizes = ParallelSizes(pipeline_parallel=2)
    counts = resolve_layout("auto", 16, sizes, (cost.head + cost.draft) / cost.layer)
    assert counts is not None
    assert counts[1] < counts[0]
    without = RowCost.of(policy, None, trains_policy=True, recompute=False)
    assert without.draft == 0
    assert without.layer == cost.layer
    assert RowCost.of(policy, None, trains_policy=True, recompute=True).layer == pytest.approx(cost.layer * 4 / 3)
    assert RowCost.of(policy, draft, trains_policy=False, recompute=False).head == 0


def test_other_layouts_pass_and_unknown_words_are_refused() -> None:
    sizes = ParallelSizes(pipeline_parallel=2)
    assert resolve_layout(None, 8, sizes, 1.0) is None
    assert resolve_layout([5, 3], 8, sizes, 1.0) == [5, 3]
    with pytest.raises(ConfigError) as caught:
        resolve_layout("even", 8, sizes, 1.0)  # type: ignore[arg-type]
    assert caught.value.key.endswith("pipeline_layout")


def test_the_last_stage_by_any_name_runs_the_draft_inside_the_schedule() -> None:
    assert Place.of("last", 4) == Place.of(3, 4) == Place((3,), True)
    assert Place.of(0, 4) == Place((0,), False)
    assert Place.of("spread", 1).now
    for wrong in (4, -1, "first", True):
        with pytest.raises(ConfigError, match="no such place"):
            Place.of(wrong, 4)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(2, 6), st.floats(0, 4))
def test_turns_leave_no_rank_much_behind(tokens: list[int], stages: int, lead: float) -> None:
    place = Place.of("spread", stages, lead)
    turns = place.turns(tokens)
    assert turns == place.turns(tokens)
    assert len(turns) == len(tokens)
    mean = sum(tokens) / max(1, len(tokens))
    ends = [-rank * lead * mean for rank in range(stages)]
    for count, rank in zip(tokens, turns, strict=True):
        assert ends[rank] == min(ends)
        ends[rank] += count


def test_a_stage_sends_what_it_makes_and_stages_without_taps_send_nothing() -> None:
    """CASES C1, C6."""
    layout = TapLayout(owners={2: 0, 5: 2, 6: 2}, stages=4, pipeline=2, hidden_size=8)
    assert layout.blocks(0, hidden=False) == [("embeddings", 0), ("layer", 2)]
    assert layout.blocks(1, hidden=False) == layout.blocks(3, hidden=False) == []
    assert [(s.stage, s.rank, s.width) for s in layout.sources(hidden=False)] == [(0, 0, 16), (2, 0, 16)]
    assert [(s.stage, s.rank, s.width) for s in layout.sources(hidden=True)] == [(0, 0, 16), (2, 0, 16), (3, 1, 8)]


def test_a_draft_without_taps_is_sent_embeddings_alone() -> None:
    layout = TapLayout(owners=tap_owner([2, 2, 2, 2], ()), stages=4, pipeline=2, hidden_size=8)
    assert [(s.stage, s.width) for s in layout.sources(hidden=False)] == [(0, 8)]
    assert [(s.stage, s.width) for s in layout.sources(hidden=True)] == [(0, 8), (3, 8)]


def test_the_tap_after_the_last_layer_comes_from_the_last_stage() -> None:
    layout = TapLayout(owners=tap_owner([2, 2], (1, 4)), stages=2, pipeline=2, hidden_size=8)
    assert layout.blocks(0, hidden=False) == [("embeddings", 0), ("layer", 1)]
    assert layout.blocks(1, hidden=False) == [("layer", 4)]


def test_earlier_stages_hold_more_micro_batches() -> None:
    assert [held_micro_batches(ParallelSizes(pipeline_parallel=4), rank) for rank in range(4)] == [4, 3, 2, 1]
    assert held_micro_batches(ParallelSizes(), 0) == 1
    # Interleaved, two chunks a rank, two stages: three and five chunk passes before the first backward.
    sizes = ParallelSizes(pipeline_parallel=2, virtual_pipeline=2)
    assert [held_micro_batches(sizes, rank) for rank in range(2)] == [2.5, 1.5]
