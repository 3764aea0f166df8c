"""Speculation that is slower than none is noticed and switched off, by batch size (CASES.md E3): the decisions alone,
in a world whose step times and acceptance are made up."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spec.errors import ConfigError
from lightning_spec.rollout.adaptive import AdaptiveConfig, AdaptiveSpeculation, Step


class World:
    """An engine of which only the clock and the counters exist.

    Args:
        ratio: seconds of a step with proposals over one without, by batch size.
        accepted: mean number of accepted proposals.
        noise: relative deviation of each step's time.
    """

    def __init__(
        self, ratio: Callable[[int], float], accepted: float, noise: float = 0.0, seed: int = 0, prefill: float = 0.0
    ) -> None:
        self.ratio, self.accepted, self.noise, self.prefill = ratio, accepted, noise, prefill
        self.random = random.Random(seed)
        self.asked = 0
        self.seconds = 0.0
        self.probe_steps = 0

    def run(self, adaptive: AdaptiveSpeculation, batch: int, steps: int) -> list[int]:
        """Let the engine make steps; returns the k of each."""
        made = []
        for _ in range(steps):
            k = adaptive.lookup()[batch]
            cost = (0.01 + 0.001 * batch) * (self.ratio(batch) if self.asked else 1.0)
            seconds = cost * max(0.1, self.random.gauss(1, self.noise)) if self.noise else cost
            accepted = sum(self.random.random() < self.accepted / self.asked for _ in range(batch * self.asked))
            prefill = self.random.random() < self.prefill
            adaptive.record(Step(batch, self.asked, k, prefill, batch + accepted, seconds * (3 if prefill else 1)))
            made.append(k)
            self.asked = k
            self.seconds += seconds
        return made


def adaptive(k: int = 3, sizes: int = 64, **config: float) -> AdaptiveSpeculation:
    return AdaptiveSpeculation([0] + [k] * sizes, AdaptiveConfig(**config))  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [1, 8, 33])
def test_a_draft_that_is_never_right_is_switched_off_soon_and_stays_off(batch: int) -> None:
    one = adaptive()
    made = World(lambda _: 1.5, accepted=0.0).run(one, batch, 2000)
    assert one.chosen()[batch] == 0
    assert sum(1 for k in made[:100] if k) < 60
    assert sum(1 for k in made[100:] if k) <= 0.06 * 1900
    assert one.gains()[one._band_of[batch]] == pytest.approx(1 / 1.5)


@pytest.mark.parametrize("batch", [1, 8, 33])
def test_a_draft_that_is_often_right_is_kept_on_and_probes_cost_little(batch: int) -> None:
    one = adaptive()
    made = World(lambda _: 1.5, accepted=2.0).run(one, batch, 2000)
    assert one.chosen()[batch] == 3
    assert sum(1 for k in made if not k) <= 0.07 * 2000


def test_each_band_of_batch_sizes_is_decided_by_itself() -> None:
    one = adaptive()
    world = World(lambda batch: 1.2 if batch < 16 else 3.0, accepted=1.0)
    for _ in range(6):
        for batch in (50, 40, 20, 12, 6, 2, 1):
            world.run(one, batch, 60)
    assert [one.chosen()[size] for size in (1, 2, 7, 15, 16, 31, 32, 63)] == [3, 3, 3, 3, 0, 0, 0, 0]


def test_a_draft_that_got_better_is_switched_on_again() -> None:
    one = adaptive()
    bad, good = World(lambda _: 1.5, accepted=0.1), World(lambda _: 1.5, accepted=2.2)
    bad.run(one, 8, 500)
    assert one.chosen()[8] == 0
    good.run(one, 8, 2500)
    assert one.chosen()[8] == 3


@given(seed=st.integers(0, 10_000), batch=st.sampled_from([1, 3, 8, 32]), gain=st.sampled_from([0.6, 0.8, 1.25, 1.6]))
@settings(max_examples=60, deadline=None)
def test_noise_of_a_fifth_does_not_hide_a_clear_gain_or_loss(seed: int, batch: int, gain: float) -> None:
    one = adaptive()
    World(lambda _: 2.0 / gain, accepted=1.0, noise=0.2, seed=seed, prefill=0.05).run(one, batch, 4000)
    assert bool(one.chosen()[batch]) == (gain > 1)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_a_draw_does_not_make_it_flutter(seed: int) -> None:
    one, flips, last = adaptive(), 0, 3
    world = World(lambda _: 2.0, accepted=1.0, noise=0.05, seed=seed)
    for _ in range(200):
        world.run(one, 8, 50)
        flips, last = flips + (one.chosen()[8] != last), one.chosen()[8]
    assert flips <= 3


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 70), st.booleans(), st.floats(0, 10), st.integers(0, 300)), min_size=1, max_size=400
    )
)
@settings(max_examples=50, deadline=None)
def test_whatever_it_sees_k_is_0_or_as_configured_and_sizes_configured_to_0_stay_0(
    steps: list[tuple[int, bool, float, int]],
) -> None:
    schedule = [0] + [4] * 10 + [2] * 10 + [0] * 44
    one, asked = AdaptiveSpeculation(schedule, AdaptiveConfig(every=4, probe=2, first=1, window=1)), 0
    for batch, prefill, seconds, tokens in steps:
        k = one.lookup()[min(batch, 64)]
        one.record(Step(batch, asked, k, prefill, tokens, seconds))
        asked = k
        assert len(one.lookup()) == len(schedule)
        assert all(now in (0, full) for now, full in zip(one.lookup(), schedule, strict=True))


@given(stop=st.integers(0, 900), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_restored_controller_goes_on_exactly_where_it_stood(stop: int, seed: int) -> None:
    def world() -> World:
        return World(lambda batch: 1.0 + batch / 20, accepted=1.0, noise=0.1, seed=seed)

    whole, first, second = adaptive(every=30), adaptive(every=30), adaptive(every=30)
    made, part = world(), world()
    expected = made.run(whole, 16, 900)
    found = part.run(first, 16, stop)
    second.restore(json.loads(json.dumps(first.state())))
    assert found + part.run(second, 16, 900 - stop) == expected
    assert second.state() == whole.state()


def test_a_state_of_other_settings_starts_anew() -> None:
    one, other = adaptive(3), adaptive(5)
    World(lambda _: 3.0, accepted=0.0).run(one, 8, 500)
    other.restore(one.state())
    assert other.chosen()[8] == 5
    other.restore({})
    assert other.lookup() == [0] + [5] * 64


def test_which_steps_are_probes_follows_from_counts_and_not_from_the_clock() -> None:
    quick, slow = adaptive(), adaptive()
    assert World(lambda _: 1.1, 2.0, noise=0.3, seed=1).run(quick, 8, 3000) == World(
        lambda _: 1.4, 2.0, noise=0.1, seed=2
    ).run(slow, 8, 3000)


@pytest.mark.parametrize(
    ("key", "settings_"),
    [
        ("probe", {"probe": 0}),
        ("first", {"first": 0}),
        ("window", {"window": 2}),
        ("every", {"every": 7}),
        ("margin", {"margin": 1.0}),
        ("margin", {"margin": -0.1}),
    ],
)
def test_numbers_out_of_range_are_refused(key: str, settings_: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"probes\.{key}"):
        AdaptiveConfig(**settings_)  # type: ignore[arg-type]
