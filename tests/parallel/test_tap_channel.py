"""The TapChannel between ranks that are threads of this process (both transports work between threads too)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_spec.errors import ConfigError, TapError
from lightning_spec.parallel.tap_channel import TapChannel, TapSource, TapStats
from tests.parallel.tap_threads import run


def left_behind() -> list[str]:
    """Threads, open files and mapped memory of channels in this process."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("tap-")]
    files = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    with open("/proc/self/maps") as maps:
        return threads + [name for name in (*files, *maps) if "memfd:tap-" in name]


BOTH = pytest.mark.parametrize("transport", ["shared_memory", "group"])
ONE = [TapSource(stage=0, rank=0, width=4)]


def channel(ranks: Any, sources: list[TapSource], host: int, **options: Any) -> TapChannel:
    settings: dict[str, Any] = {"rows": 8, "dtype": torch.float32, "bound_s": 10.0, "transport": "auto"}
    settings["depth"] = {source.stage: 2 for source in sources}
    return TapChannel(sources, host, ranks, **(settings | options))


def block(stage: int, step: int, micro: int, rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(hash((stage, step, micro)) % 2**31))


def played(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """Results of all ranks; the first error of any rank is raised."""
    results = run(size, work)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert left_behind() == []


@st.composite
def pipelines(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.integers(1, 3))
    virtual = draw(st.integers(1, 3))
    stages = draw(st.sets(st.integers(0, size * virtual - 1), min_size=1))
    return {
        "size": size,
        "host": draw(st.integers(0, size - 1)),
        "sources": [TapSource(stage, stage % size, draw(st.integers(1, 5))) for stage in sorted(stages)],
        "depth": {stage: draw(st.integers(1, 3)) for stage in stages},
        "lengths": draw(st.lists(st.lists(st.integers(0, 8), max_size=6), min_size=1, max_size=3)),
        "late": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
    }


def play(case: dict[str, Any], transport: str) -> list[Any]:
    def work(ranks: Any) -> TapStats:
        made = channel(
            ranks, case["sources"], case["host"], depth=case["depth"], transport=transport, dtype=case["dtype"]
        )
        try:
            for step, lengths in enumerate(case["lengths"]):
                with made.step(step):
                    for micro, rows in enumerate(lengths):
                        for s in case["sources"]:
                            if s.rank == ranks.rank:
                                taps = block(s.stage, step, micro, rows, s.width).to(case["dtype"])
                                made.put(s.stage, micro, taps.split(max(1, s.width // 2), dim=1))
                                taps.zero_()  # nobody looks at it any more
                        if ranks.rank == case["host"] and not case["late"]:
                            read(made, case, step, micro, rows)
                        made.drain() if case["late"] and ranks.rank == case["host"] else None
                    for micro, rows in enumerate(lengths if case["late"] and ranks.rank == case["host"] else []):
                        read(made, case, step, micro, rows)
            return made.last_stats
        finally:
            made.close()

    return played(case["size"], work)


def read(made: TapChannel, case: dict[str, Any], step: int, micro: int, rows: int) -> None:
    for s in case["sources"]:
        got = made.get(s.stage, micro, rows)
        assert torch.equal(got, block(s.stage, step, micro, rows, s.width).to(case["dtype"]))
        got.fill_(7.0)  # ours to write


@given(pipelines())
@settings(max_examples=60, deadline=None)
def test_blocks_arrive_bit_equal_in_order_through_shared_memory(case: dict[str, Any]) -> None:
    play(case, "auto")


@given(pipelines())
@settings(max_examples=15, deadline=None)
def test_blocks_arrive_bit_equal_in_order_through_a_group(case: dict[str, Any]) -> None:
    play(case, "group")


@BOTH
def test_a_put_never_waits_and_a_source_may_be_steps_ahead(transport: str) -> None:
    ahead = threading.Event()

    def work(ranks: Any) -> Any:
        made = channel(ranks, ONE, 1, transport=transport, depth={0: 1})
        try:
            if ranks.rank == 0:
                start = time.perf_counter()
                made.begin(3)
                for micro in range(20):
                    made.put(0, micro, block(0, 3, micro, 5, 4))
                spent = time.perf_counter() - start
                ahead.set()
                first = made.finish()
                with made.step(5):
                    made.put(0, 0, block(0, 5, 0, 8, 4))
                return spent, first
            assert ahead.wait(10)  # nothing has been read until all was put
            for step, lengths in ((3, [5] * 20), (5, [8])):
                with made.step(step):
                    for micro, rows in enumerate(lengths):
                        assert torch.equal(made.get(0, micro, rows), block(0, step, micro, rows, 4))
            return None
        finally:
            made.close()

    spent, stats = played(2, work)[0]
    assert spent < 1.0
    assert stats.blocks_sent == 20
    assert stats.bytes_sent == 20 * 5 * 4 * 4
    assert stats.blocks_deferred >= 19


@BOTH
def test_arrived_and_drain_never_wait_and_free_the_slots(transport: str) -> None:
    sent = threading.Event()

    def work(ranks: Any) -> Any:
        made = channel(ranks, ONE, 1, transport=transport, depth={0: 3})
        try:
            made.begin(0)
            if ranks.rank == 0:
                for micro in range(6):
                    made.put(0, micro, block(0, 0, micro, 2, 4))
                stats = made.finish()  # the slots are fewer: only draining lets this return
                sent.set()
                return stats
            assert not made.arrived(0, 1)
            moved, end = 0, time.monotonic() + 10
            while moved < 6 and time.monotonic() < end:
                moved += made.drain()
            assert sent.wait(10)
            assert made.arrived(0, 0)
            assert not made.arrived(0, 1)
            for micro in range(6):
                assert torch.equal(made.get(0, micro, 2), block(0, 0, micro, 2, 4))
            return moved, made.finish()
        finally:
            made.close()

    _, (moved, stats) = played(2, work)
    assert moved == 6
    assert stats.blocks_received == 6
    assert stats.bytes_received == 6 * 2 * 4 * 4


@BOTH
def test_ranks_may_close_in_any_order_and_late_ones_are_told(transport: str) -> None:
    first, second = threading.Event(), threading.Event()
    sources = [TapSource(0, 0, 4), TapSource(1, 1, 4)]

    def puts_and_waits(made: TapChannel) -> None:
        for micro in range(3):
            made.put(1, micro, torch.ones(1, 4))
        made.finish()

    def work(ranks: Any) -> Any:
        made = channel(ranks, sources, 2, transport=transport, bound_s=20.0, depth={0: 1, 1: 1})
        made.begin(0)
        if ranks.rank == 2:
            assert first.wait(10)
        if ranks.rank == 1:
            assert second.wait(10)
            with pytest.raises(TapError, match=r"closed|lost"):
                puts_and_waits(made)
        start = time.perf_counter()
        made.close()
        (first, threading.Event(), second)[ranks.rank].set()
        return time.perf_counter() - start

    assert max(played(3, work)) < 3.0


def test_memory_is_the_hosts_slots_and_nothing_on_the_sources() -> None:
    def work(ranks: Any) -> Any:
        made = channel(ranks, [*ONE, TapSource(1, 1, 6)], 1, rows=1000, depth={0: 3})
        try:
            return made.memory, made.transports
        finally:
            made.close()

    source, host = played(2, work)
    assert source[0] == 0
    assert 3 * 1000 * 4 * 4 <= host[0] <= 3 * 1000 * 4 * 4 + 4096
    assert source[1] == host[1] == {0: "shared_memory", 1: "local"}


def failing(source: Callable[[TapChannel], None], host: Callable[[TapChannel], None], **options: Any) -> list[str]:
    """Both ranks' error texts; each rank keeps looking at the channel until it knows."""

    def work(ranks: Any) -> str:
        made = channel(ranks, ONE, 1, **options)
        try:
            (source if ranks.rank == 0 else host)(made)
            end = time.monotonic() + 10
            while time.monotonic() < end:
                made.check()
                time.sleep(0.01)
            return "no error"
        except TapError as error:
            return str(error)
        finally:
            made.close()

    return played(2, work)


def same_first(texts: list[str], *words: str) -> None:
    """Each rank's text is the first error's; those that did not raise it add their own place."""
    first = texts[0].partition(" [seen by ")[0]
    assert {text.partition(" [seen by ")[0] for text in texts} == {first}
    for word in words:
        assert word in first


def puts(*blocks: tuple[int, int], step: int = 0) -> Callable[[TapChannel], None]:
    def body(made: TapChannel) -> None:
        with made.step(step):
            for micro, rows in blocks:
                made.put(0, micro, torch.ones(rows, 4))

    return body


def gets(*blocks: tuple[int, int], step: int = 0) -> Callable[[TapChannel], None]:
    def body(made: TapChannel) -> None:
        with made.step(step):
            for micro, rows in blocks:
                made.get(0, micro, rows)

    return body


@BOTH
def test_a_header_that_does_not_match_ends_both_ranks_with_one_error(transport: str) -> None:
    for source, host, found, needed in (
        (puts((1, 3)), gets((0, 3)), "(0, 1, 3)", "(0, 0, 3)"),
        (puts((0, 3)), gets((0, 4)), "(0, 0, 3)", "(0, 0, 4)"),
        (puts((0, 3), step=7), gets((0, 3), step=6), "(7, 0, 3)", "(6, 0, 3)"),
    ):
        texts = failing(source, host, transport=transport)
        same_first(texts, "pipeline rank 1", "stage 0, micro-batch 0", f"found {found}, needed {needed}")


@BOTH
def test_faulty_puts_are_refused_where_they_happen(transport: str) -> None:
    texts = failing(puts((0, 9)), gets((0, 9)), transport=transport)
    same_first(texts, "pipeline rank 0", "a slot holds 8 rows, micro-batch 0 has 9", "init_args.tap_rows")
    texts = failing(puts((0, 1), (0, 1)), gets((0, 1), (1, 1)), transport=transport)
    same_first(texts, "step 0, put of stage 0, micro-batch 0", "already put")

    def wide(made: TapChannel) -> None:
        with made.step(0):
            made.put(0, 0, torch.ones(2, 5))

    same_first(failing(wide, gets((0, 2)), transport=transport), "parts [(2, 5)] where [2, 4] is due")

    def double(made: TapChannel) -> None:
        with made.step(0):
            made.put(0, 0, torch.ones(2, 4, dtype=torch.float64))

    same_first(failing(double, gets((0, 2)), transport=transport), "torch.float64", "torch.float32")


@BOTH
def test_a_consumer_that_never_frees_is_named_with_its_slot(transport: str) -> None:
    texts = failing(puts(*[(m, 2) for m in range(4)]), lambda made: made.begin(0), transport=transport, bound_s=0.5)
    # The block that warmed the link up was the first: block 3 of the step is the fourth, and lies in slot 3 % 2.
    same_first(texts, "put of stage 0, micro-batch 2", "slot 1 of stage 0 still unconsumed after 0.5 s")
    assert "pipeline rank 1" in texts[0]
    assert transport == "group" or "is alive" in texts[0]


@BOTH
def test_a_stage_that_sends_nothing_is_named_with_its_micro_batch(transport: str) -> None:
    texts = failing(puts((0, 2)), gets((0, 2), (1, 2)), transport=transport, bound_s=0.5)
    same_first(texts, "stage 0 sent nothing for micro-batch 1 within 0.5 s", "pipeline rank 0")


@BOTH
def test_an_error_inside_a_step_is_told_to_the_other_rank(transport: str) -> None:
    def broken(made: TapChannel) -> None:
        def forward() -> None:
            with made.step(2):
                made.put(0, 0, torch.ones(1, 4))
                raise ZeroDivisionError("of the source's own")

        with pytest.raises(ZeroDivisionError):
            forward()

    texts = failing(broken, gets((0, 1), (1, 1), step=2), transport=transport)
    same_first(texts, "pipeline rank 0", "step 2: ZeroDivisionError: of the source's own")


@BOTH
def test_a_block_that_was_never_read_is_found_at_the_end_of_the_step(transport: str) -> None:
    def reads_one(made: TapChannel) -> None:
        with made.step(0):
            made.get(0, 0, 2)
            while not made.arrived(0, 1):
                time.sleep(0.01)

    texts = failing(puts((0, 2), (1, 2)), reads_one, transport=transport)
    same_first(texts, "micro-batch 1 of stage 0, step 0, was never read")


def test_a_local_source_that_put_nothing_fails_at_once() -> None:
    def work(ranks: Any) -> None:
        made = channel(ranks, ONE, 0)
        try:
            with made.step(0):
                made.get(0, 0, 1)
        finally:
            made.close()

    start = time.perf_counter()
    with pytest.raises(TapError, match="has put nothing"):
        played(1, work)
    assert time.perf_counter() - start < 5


def test_ranks_that_set_up_different_channels_all_refuse() -> None:
    results = run(2, lambda ranks: channel(ranks, ONE, 1, rows=8 + ranks.rank))
    assert [type(result) for result in results] == [ConfigError, ConfigError]
    assert all("set up different tap channels" in str(result) for result in results)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sources": [*ONE, *ONE]}, "two tap sources on one virtual stage"),
        ({"sources": [TapSource(2, 2, 4)]}, "outside the pipeline"),
        ({"rows": 0}, "landing slots without room"),
        ({"depth": {}}, "without landing slots"),
        ({"dtype": torch.int32}, "cannot travel"),
        ({"transport": "cuda_ipc"}, "no cuda_ipc between"),
    ],
)
def test_sizes_that_cannot_be_are_refused_on_every_rank(options: dict[str, Any], text: str) -> None:
    options = {"sources": ONE, "host": 1, **options}
    for result in run(2, lambda ranks: channel(ranks, **options)):
        assert isinstance(result, ConfigError)
        assert text in str(result)


def test_wrong_ranks_and_step_numbers_are_refused() -> None:
    def work(ranks: Any) -> None:
        made = channel(ranks, ONE, 1)
        try:
            made.begin(4)
            with pytest.raises(ValueError, match="must grow"):
                made.begin(4)
            if ranks.rank == 0:
                with pytest.raises(ValueError, match="receives nothing from stage 0"):
                    made.get(0, 0, 1)
            else:
                with pytest.raises(ValueError, match="sends nothing for stage 0"):
                    made.put(0, 0, torch.ones(1, 4))
        finally:
            made.close()
            made.close()

    played(2, work)
