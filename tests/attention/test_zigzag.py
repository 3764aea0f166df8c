"""The zigzag layout and what each rank computes by it, without any process group (SEMANTICS 3, CASES B5)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_spec.attention import Context, RowExchange, Shard, Zigzag, check_ulysses, layout, ring, ring_attention
from lightning_spec.attention.attend import Work
from lightning_spec.attention.context import Posted
from lightning_spec.errors import ConfigError

LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 70)), max_size=8)
SIZES = st.integers(1, 4)


def chunk_of(length: int, size: int, row: int) -> int:
    """Chunk of a row by the rule of SEMANTICS 3."""
    return row // math.ceil(length / (2 * size))


@given(LENGTHS, SIZES)
@example([1], 4)
@example([], 2)
def test_every_row_is_on_the_rank_that_the_chunk_rule_gives_it(lengths: list[int], size: int) -> None:
    zigzag = Zigzag(lengths, size)
    wanted = []
    for length in lengths:
        chunks = [chunk_of(length, size, row) for row in range(length)]
        wanted += [min(chunk, 2 * size - 1 - chunk) for chunk in chunks]
    assert zigzag.owner.tolist() == wanted
    for rank in range(size):
        rows = zigzag.rows(rank)
        assert rows.tolist() == [row for row, owner in enumerate(wanted) if owner == rank]  # ascending, each once
        assert zigzag.local_index[rows].tolist() == list(range(rows.numel()))


@given(LENGTHS, SIZES)
def test_counts_and_runs_describe_the_rows(lengths: list[int], size: int) -> None:
    zigzag = Zigzag(lengths, size)
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    for rank in range(size):
        rows = zigzag.rows(rank).tolist()
        assert zigzag.counts(rank) == [
            sum(start <= row < start + length for row in rows) for start, length in zip(starts, lengths, strict=True)
        ]
        told = []
        for run in zigzag.runs(rank):
            assert run.query == len(told)
            assert run.document in starts
            told += range(run.row, run.row + run.count)
        assert told == rows
    assert [sum(n) for n in zip(*map(zigzag.counts, range(size)), strict=True)] == lengths


@given(LENGTHS, SIZES)
def test_restore_undoes_split(lengths: list[int], size: int) -> None:
    zigzag = Zigzag(lengths, size)
    x = torch.randn(sum(lengths), 2, 3)
    assert torch.equal(zigzag.restore([zigzag.split(x, rank) for rank in range(size)]), x)


def test_one_rank_holds_everything_as_whole_documents() -> None:
    zigzag = Zigzag([5, 0, 1, 8], 1)
    assert zigzag.rows(0).tolist() == list(range(14))
    assert zigzag.runs(0) == layout.whole_documents((5, 0, 1, 8))


def test_a_wrong_number_of_rows_or_parts_is_refused() -> None:
    zigzag = Zigzag([5, 3], 2)
    with pytest.raises(ValueError, match="8"):
        zigzag.split(torch.zeros(7), 0)
    with pytest.raises(ValueError, match="2"):
        zigzag.restore([torch.zeros(8)])
    for bad in (([-1], 2), ([1], 0)):
        with pytest.raises(ValueError, match="layout"):
            Zigzag(*bad)
    with pytest.raises(ValueError, match="group of 1"):
        Shard(zigzag, Context.single())


def plan(lengths: Sequence[int], size: int, rank: int, rows: Tensor | None = None) -> list[tuple[slice, Work]]:
    shard = Shard(Zigzag(lengths, size), Context(None, rank, size))
    return [(step.rows, step.work) for step in ring._causal_plan(shard, rows, 0, None).steps]


def area(work: Work) -> int:
    """Scores that a kernel computes for this work, the half above a triangle's diagonal not counted."""
    assert work.given is None
    return sum(n * (n + 1) // 2 for _, n, _, _ in work.causal) + sum(n * keys for _, n, _, keys in work.full)


@given(LENGTHS, SIZES)
@settings(max_examples=50, deadline=None)
def test_causal_work_is_trimmed_not_masked(lengths: list[int], size: int) -> None:
    found = sum(area(work) for rank in range(size) for _, work in plan(lengths, size, rank))
    assert found == sum(n * (n + 1) // 2 for n in lengths)


@given(st.integers(1, 400), st.integers(2, 4))
@settings(max_examples=50, deadline=None)
def test_causal_work_is_balanced_over_the_ranks(length: int, size: int) -> None:
    works = [sum(area(work) for _, work in plan([length], size, rank)) for rank in range(size)]
    padded = 2 * size * math.ceil(length / (2 * size))
    # Equal where the chunks are full; a row that the last ones lack would see at most `padded` keys.
    assert max(works) - min(works) <= (padded - length) * padded


def test_a_step_computes_the_rectangles_of_the_zigzag() -> None:
    """One document of 8 chunks of 3 rows on 4 ranks; rank 2 holds chunks 2 and 5 as local rows 0..2 and 3..5."""
    (own_rows, own), (from_1_rows, from_1), (from_0_rows, from_0), (from_3_rows, from_3) = plan([24], 4, 2)
    assert (own_rows, own.causal, own.full) == (slice(0, 6), ((0, 6, 0, 6),), ())  # causal over [early | late]
    for rows, work in ((from_1_rows, from_1), (from_0_rows, from_0)):  # src < rank: all rows x early(src)
        assert (rows, work.causal, work.full) == (slice(0, 6), (), ((0, 6, 0, 3),))
    # src > rank: late rows x both(src); rows without work are cut off
    assert (from_3_rows, from_3.rows, from_3.causal, from_3.full) == (slice(3, 6), 3, (), ((0, 3, 0, 6),))


@given(LENGTHS, st.integers(2, 4), st.integers(0, 6), st.integers(1, 40), st.integers(0, 2**16))
@settings(max_examples=80, deadline=None)
def test_the_steps_show_each_query_row_exactly_its_keys(
    lengths: list[int], size: int, offset: int, window: int, seed: int
) -> None:
    zigzag = Zigzag(lengths, size)
    keep = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(seed)) < 0.6
    start = {
        row: run.document
        for run in layout.whole_documents(tuple(lengths))
        for row in range(run.row, run.row + run.count)
    }
    for limit in (None, window):
        for rank in range(size):
            shard = Shard(zigzag, Context(None, rank, size))
            rows = keep[shard.rows].nonzero().flatten() if seed % 2 else None
            made = ring._causal_plan(shard, rows, offset, limit)
            seen: list[set[int]] = [set() for _ in range(shard.rows.numel() if rows is None else rows.numel())]
            for number, step in enumerate(made.steps):
                block = zigzag.rows((rank - number) % size)
                if isinstance(made.hops, ring.DirectHops) and number:
                    source = (rank - number) % size
                    theirs = Shard(zigzag, Context(None, source, size))
                    sent = ring._causal_plan(theirs, None, offset, limit).hops.wanted[number]  # type: ignore[attr-defined]
                    block = block[sent]
                assert step.work.keys == block.numel() == made.hops.keys[number]
                low, high = step.work.intervals()
                for query, first, last in zip(
                    range(step.rows.start, step.rows.stop), low.tolist(), high.tolist(), strict=True
                ):
                    keys = set(block[first:last].tolist())
                    assert not keys & seen[query]
                    seen[query] |= keys
            queries = shard.rows if rows is None else shard.rows[rows]
            for row, keys in zip(queries.tolist(), seen, strict=True):
                wanted = range(start[row], row + 1)
                assert keys == {s for s in wanted if limit is None or row + offset - s < limit}


def test_a_window_fetches_only_rows_that_are_seen() -> None:
    shard = Shard(Zigzag([800], 4), Context(None, 1, 4))  # chunks of 100: 1 and 6
    hops = ring._causal_plan(shard, None, 0, 11).hops
    assert list(hops.keys) == [200, 10, 0, 10]  # of rank 0 the end of chunk 0, of rank 2 the end of chunk 5
    assert list(ring._causal_plan(shard, None, 4, 11).hops.keys) == [200, 6, 0, 6]  # pass 4 sees 4 rows fewer
    assert list(ring._causal_plan(shard, None, 0, 800).hops.keys) == [200, 200, 200, 200]  # hides nothing


def test_plans_are_made_once_for_each_selection_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(Zigzag([40, 9], 2), Context(None, 1, 2))
    calls = []
    make = ring._make_plan
    monkeypatch.setattr(ring, "_make_plan", lambda *a: (calls.append(a), make(*a))[1])
    rows = torch.tensor([1, 2, 7])
    for _ in range(3):
        for offset in (0, 1, 5):
            ring._causal_plan(shard, None, offset, None)
            ring._causal_plan(shard, rows.clone(), offset, None)
    assert len(calls) == 2  # without a window all passes see the same trunk keys
    assert ring._causal_plan(shard, rows, 0, None).steps != ring._causal_plan(shard, rows[:2], 0, None).steps


class Tape(Posted):
    def __init__(self, events: list[str], name: str) -> None:
        super().__init__((), ())
        self.events, self.name = events, name

    def wait(self) -> None:
        self.events.append(f"wait {self.name}")


def test_the_next_hop_is_posted_before_a_block_is_computed_and_the_branch_runs_under_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    class Recorder(Context):
        def post(self, sends, receives, tag=0):  # type: ignore[no-untyped-def]
            for x, _ in receives:
                x.zero_()
            name = "blocks" if tag == 0 else "gradients"
            events.append(f"post {name}")
            return Tape(events, name)

    def recorded(name: str):  # type: ignore[no-untyped-def]
        call = getattr(ring, name)
        monkeypatch.setattr(ring, name, lambda *a, **b: (events.append(name), call(*a, **b))[1])

    for name in ("attend", "attend_backward", "branch_backward"):
        recorded(name)
    shard = Shard(Zigzag([24], 3), Recorder(None, 2, 3))
    q, k, v, branch_k, branch_v = (torch.randn(8, h, 4, requires_grad=True) for h in (4, 2, 2, 2, 2))
    out = ring.ring_branch_attention(q, k, v, [branch_k], [branch_v], shard)
    step = ["post blocks", "attend", "wait blocks"]
    assert events == [*step, *step, "attend"]
    events.clear()
    out.sum().backward()
    assert events == [
        *("post blocks", "attend_backward", "post gradients", "wait blocks"),
        *("post blocks", "attend_backward", "wait gradients", "post gradients", "wait blocks"),
        *("attend_backward", "wait gradients", "post gradients", "branch_backward", "wait gradients"),
    ]


def test_bad_shapes_are_refused_before_any_message() -> None:
    shard = Shard(Zigzag([16], 2), Context(None, 0, 2))
    q, k = torch.zeros(8, 4, 8), torch.zeros(8, 2, 8)
    with pytest.raises(ValueError, match="the trunk has 7 rows"):
        ring_attention(q, k[:7], k[:7], shard)
    with pytest.raises(ValueError, match="expected 8"):
        ring_attention(q[:7], k, k, shard)
    with pytest.raises(ValueError, match="window"):
        ring_attention(q, k, k, shard, window=0)
    with pytest.raises(ValueError, match="equally many"):
        ring.ring_branch_attention(q, k, k, [k], [], shard)
    for rows in ([1, 1], [2, 1], [-1, 1], [0, 8]):
        with pytest.raises(ValueError, match="ascending"):
            ring.ring_branch_attention(q[:2], k, k, [], [], shard, rows=torch.tensor(rows))


def test_ulysses_names_the_numbers_of_ranks_that_divide() -> None:
    check_ulysses(32, 8, 4, "strategy.context_parallel")
    with pytest.raises(ConfigError, match=r"16 ranks.*1 or 2 or 4 or 8.*`strategy.context_parallel`"):
        check_ulysses(32, 8, 16, "strategy.context_parallel")
    with pytest.raises(ConfigError, match="of 1 or 2 for"):
        check_ulysses(6, 2, 4, "x")


def test_an_exchange_refuses_rows_held_twice_or_by_nobody() -> None:
    one = Context.single()
    rows = torch.tensor([3, 0, 5])
    x = torch.randn(3, 2)
    assert torch.equal(RowExchange([rows], [torch.tensor([5, 5, 3])], one).apply(x), x[[2, 2, 0]])
    with pytest.raises(ValueError, match="nobody"):
        RowExchange([rows], [torch.tensor([4])], one)
    with pytest.raises(ValueError, match="one rank each"):
        RowExchange([torch.tensor([1, 1])], [rows], one)
    with pytest.raises(ValueError, match="3 rows, found 2"):
        RowExchange([rows], [rows], one).apply(x[:2])
