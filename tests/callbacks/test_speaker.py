"""Context-parallel ranks share one engine: one calls it, all get its results and its failures."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from callbacks.speaker import SharedEngine, Speaker
from lightning_spec.batch import SpecStats
from lightning_spec.errors import ConfigError, EngineError
from lightning_spec.rollout.engine import Engine, Request, Sampling
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
