"""The ranks of a replica share one engine: one calls it, all get its results and its failures."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from callbacks.speaker import SharedEngine, Speaker, writes_with_first
from lightning_spec.batch import SpecStats
from lightning_spec.errors import ConfigError, EngineError
from lightning_spec.rollout.engine import Engine, RefitReport, Request, Sampling
from tests.callbacks.conftest import FakeEngine


class Ranks:
    """Two ranks in two threads; each rank's `broadcast` is the collective of the same name."""

    size = 2

    def __init__(self, rank: int, channel: queue.Queue[Any]) -> None:
        self.rank, self.channel = rank, channel

    def broadcast(self, value: Any) -> Any:
        if self.rank == 0:
            self.channel.put(value)
            return value
        return self.channel.get(timeout=20)


def both(action: Callable[[Speaker], Any]) -> list[Any]:
    """`action` on both ranks at once; exceptions are returned."""
    channel: queue.Queue[Any] = queue.Queue()

    def one(rank: int) -> Any:
        try:
            return action(Speaker(Ranks(rank, channel)))  # type: ignore[arg-type]
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, (0, 1)))


def requests(count: int) -> list[Request]:
    return [Request((1, 2), seed=i) for i in range(count)]


def test_alone_the_engine_is_the_engine_and_an_action_is_run_as_it_is() -> None:
    engine = FakeEngine([])
    assert Speaker().share(engine) is engine
    assert Speaker.of(object()).speaks
    assert Speaker().run(lambda: 3) == 3


def test_one_rank_generates_and_all_get_its_completions_and_figures() -> None:
    events: dict[bool, list[str]] = {True: [], False: []}

    def action(speaker: Speaker) -> Any:
        engine = speaker.share(FakeEngine(events[speaker.speaks]))
        assert speaker.share(engine) is engine
        engine.start(None)  # type: ignore[arg-type]
        assert engine.running
        engine.refit(iter([("policy.weight", 0)]), iter([("draft.weight", 1.0)]), version=1)  # type: ignore[list-item]
        completions = engine.generate(requests(3), Sampling())
        engine.close()
        return completions, engine.last, engine.stats(), engine.num_speculative_tokens, engine.running  # type: ignore[attr-defined]

    first, second = both(action)
    assert first == second
    assert first[1].spec == first[2] == SpecStats(3, 9, 6, (3, 3))
    assert (len(first[0]), first[3], first[4]) == (3, 3, False)
    assert events == {True: ["start", "refit@1", "generate@1", "close"], False: []}


@pytest.mark.parametrize("error", [EngineError("the worker died"), ConfigError("no", found=1, needed=2, key="a.b")])
def test_a_failure_reaches_every_rank_and_leaves_no_engine_that_could_be_used(error: Exception) -> None:
    class Failing(FakeEngine):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise error

    def action(speaker: Speaker) -> Any:
        engine = speaker.share(Failing([]))
        engine.start(None)  # type: ignore[arg-type]
        with pytest.raises((EngineError, ConfigError)) as caught:
            engine.generate(requests(1), Sampling())
        return caught.value, engine.running

    (mine, alive), (theirs, peer_alive) = both(action)
    assert mine is error
    assert isinstance(theirs, EngineError)
    assert str(error) in str(theirs)
    assert not alive
    assert not peer_alive


class Wire:
    """One stream on two ranks in lockstep: the peer's ends only when the speaker's has taken every item."""

    def __init__(self, items: int) -> None:
        self.items, self.channel = items, queue.Queue[tuple[str, float]](1)
        self.taken = 0

    def stream(self, speaks: bool) -> Iterator[tuple[str, float]]:
        for number in range(self.items):
            if speaks:
                yield self.channel.get(timeout=5)
                self.taken += 1
            else:
                self.channel.put((f"t{number}", 1.0), timeout=5)
        deadline = time.monotonic() + 5
        while not speaks and not self.channel.empty():
            assert time.monotonic() < deadline, "nobody takes the last item"
            time.sleep(0.001)


@pytest.mark.parametrize("taken", [0, 1, 3, 4, 6])
def test_an_engine_that_fails_inside_a_refit_leaves_no_peer_waiting_to_send(taken: int) -> None:
    """Before the first tensor, among the policy's, between policy and draft, among the draft's, and at the end."""
    wires = Wire(3), Wire(3)

    class Failing(FakeEngine):
        def refit(self, policy: Any, draft: Any, version: int, verify: bool = False) -> Any:
            stream = itertools.chain(policy, draft)
            for _ in range(taken):
                next(stream)
            raise EngineError("no room for the weights")

    def action(speaker: Speaker) -> Any:
        engine = speaker.share(Failing([]))
        with pytest.raises(EngineError, match="no room for the weights"):
            engine.refit(*(wire.stream(speaker.speaks) for wire in wires), version=1)  # type: ignore[arg-type,misc]
        return engine.running

    assert both(action) == [False, False]
    assert [wire.taken for wire in wires] == [3, 3]


def test_a_refit_takes_the_policy_and_then_the_draft_on_every_rank() -> None:
    wires = Wire(4), Wire(2)

    class Reading(FakeEngine):
        def refit(self, policy: Any, draft: Any, version: int, verify: bool = False) -> Any:
            return RefitReport(0.0, 0, len([*policy]) + len([*draft]), version)

    def action(speaker: Speaker) -> Any:
        engine = speaker.share(Reading([]))
        return engine.refit(*(wire.stream(speaker.speaks) for wire in wires), version=3)  # type: ignore[arg-type,misc]

    first, second = both(action)
    assert first == second == RefitReport(0.0, 0, 6, 3)


def test_a_replica_s_ranks_share_an_engine_and_without_one_the_context_parallel_ranks_do() -> None:
    channel: queue.Queue[Any] = queue.Queue()
    mine, context = Ranks(1, channel), Ranks(0, channel)
    assert not Speaker.of(SimpleNamespace(replica=mine, context=context)).speaks
    assert Speaker.of(SimpleNamespace(context=context)).speaks


@pytest.mark.parametrize("first", [True, False])
def test_the_ranks_that_hold_the_model_with_rank_0_help_it_write(first: bool) -> None:
    def action(speaker: Speaker) -> bool:
        ranks = speaker._ranks
        assert ranks is not None
        zero = first and ranks.rank == 0
        return writes_with_first(SimpleNamespace(strategy=SimpleNamespace(assembly=ranks), is_global_zero=zero))

    assert both(action) == [first, first]
    assert writes_with_first(SimpleNamespace(strategy=object(), is_global_zero=first)) == first


def test_closing_needs_no_other_rank() -> None:
    """A rank closes the engine when it fails, and nobody else may be there."""
    for rank in (0, 1):
        events: list[str] = []
        SharedEngine(FakeEngine(events), Speaker(Ranks(rank, queue.Queue()))).close()  # type: ignore[arg-type]
        assert events == (["close"] if rank == 0 else [])


def test_every_method_of_an_engine_goes_through_the_speaking_rank() -> None:
    """A method that the base class answers would be answered for an engine that never started."""
    own = {name for name, value in vars(Engine).items() if callable(value) or isinstance(value, property)}
    assert {name for name in own if not name.startswith("_")} <= vars(SharedEngine).keys()
