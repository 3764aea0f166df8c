"""Does speculation pay? Measured while tokens are generated, decided for each range of batch sizes (CASES.md E3).

The answer depends on the batch size (a busy machine has no room for proposals that are thrown away), on the draft, and
on the machine, and it changes while the draft is trained. So each *band* of batch sizes is measured by itself: every so
many steps a short *probe* runs the other setting (proposals where there were none, none where there were some).

    speed with / speed without = tokens of a request in a step with proposals * (seconds without / seconds with)

The tokens are averaged over many steps, since acceptance is noisy; the seconds are compared between the probe and the
steps just before and after it, since the machine and the batch drift. A band changes sides only when the median of its
last comparisons says so by a margin.

Which steps are probes follows from counts of steps alone; only a change of sides follows from the clock. So a run in
which no band changes sides samples the same tokens each time. Either way the distribution that tokens are drawn from is
the policy's: rejection sampling is exact for any number of proposals, also for one that changes between steps.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_spec.errors import ConfigError

KEY = "rollout.engine.speculation.probes"


@dataclass(frozen=True)
class AdaptiveConfig:
    """How speculation that does not pay is found out.

    Args:
        every: engine steps of a band between two probes. With the defaults a probe is 6 of 126 steps, so a setting
            that is half as fast costs 5 % while it is looked at.
        probe: steps that a probe measures, and as many of the ordinary ones before it and after it.
        first: comparisons that a band makes at its beginning, close together, and the fewest it needs to change sides.
        window: comparisons that the median is taken of; the oldest are forgotten.
        margin: change sides only when the other is faster by this share.
    """

    every: int = 120
    probe: int = 6
    first: int = 3
    window: int = 7
    margin: float = 0.05

    def __post_init__(self) -> None:
        for name, value, least in (("probe", self.probe, 1), ("first", self.first, 1), ("window", self.window, 1)):
            if value < least:
                raise ConfigError(f"bad {name}", found=value, needed=f"at least {least}", key=f"{KEY}.{name}")
        if self.every < 2 * self.probe:
            raise ConfigError(
                "probes leave too few ordinary steps",
                found=self.every,
                needed=f"at least {2 * self.probe}, twice the probe",
                key=f"{KEY}.every",
            )
        if self.window < self.first:
            raise ConfigError("bad window", found=self.window, needed=f"at least {self.first}", key=f"{KEY}.window")
        if not 0 <= self.margin < 1:
            raise ConfigError("bad margin", found=self.margin, needed="0 <= margin < 1", key=f"{KEY}.margin")


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step, as it was.

    Args:
        batch: running requests.
        asked: proposals per request that the step before asked for, so what this step verified.
        k: proposals per request that this step asks for.
        prefill: whether prompts were read in it.
        tokens: tokens that came out. seconds: time it took.
    """

    batch: int
    asked: int
    k: int
    prefill: bool
    tokens: int
    seconds: float


MEMORY = 48
"""Steps with proposals over which a band's tokens per request are averaged (with decaying weights)."""


@dataclass(slots=True)
class Band:
    """One range of batch sizes: what it does, and what it has seen.

    `costs` are seconds of a step with proposals over seconds of one without, one for each finished probe; `usual` and
    `probe` are seconds per request of the last steady steps of each setting, `after` of those behind the probe.
    """

    k: int
    on: bool
    costs: deque[float]
    stage: Literal["usual", "probe", "after"] = "usual"
    since: int = 0
    usual: deque[float] = field(default_factory=deque)
    probe: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    tokens: float = 0.0
    requests: float = 0.0

    @property
    def now(self) -> int:
        """Proposals to ask for in the next step."""
        return self.k if self.on != (self.stage == "probe") else 0

    @property
    def gain(self) -> float | None:
        """Speed with proposals over speed without; None before both are known."""
        if not self.costs or not self.requests:
            return None
        return self.tokens / self.requests / statistics.median(self.costs)


class AdaptiveSpeculation:
    """The number of proposals by batch size, kept up to date by the steps that are reported.

    Args:
        schedule: proposals by batch size as configured; entry b is for b requests, entry 0 is not used. Sizes that are
            configured to 0 stay at 0 and are never probed.
        config: cadence and margin.
    """

    def __init__(self, schedule: list[int], config: AdaptiveConfig | None = None) -> None:
        self.config = config or AdaptiveConfig()
        self.schedule = list(schedule)
        self.bands: dict[int, Band] = {}
        self._band_of = [0] * len(schedule)
        start = 1
        for size in range(1, len(schedule)):
            # 1, 2-3, 4-7, 8-15, ... and a new band where the configured number changes.
            if size & (size - 1) == 0 or schedule[size] != schedule[size - 1]:
                start = size
            self._band_of[size] = start
            if start not in self.bands:
                costs: deque[float] = deque(maxlen=self.config.window)
                self.bands[start] = Band(schedule[size], schedule[size] > 0, costs)

    def lookup(self) -> list[int]:
        """Proposals to ask for by batch size, as `schedule`."""
        return [0, *(self.bands[start].now for start in self._band_of[1:])]

    def chosen(self) -> list[int]:
        """Proposals by batch size as decided, probes left out."""
        bands = (self.bands[start] for start in self._band_of[1:])
        return [0, *(band.k if band.on else 0 for band in bands)]

    def is_off(self, batch: int) -> bool:
        """Whether proposals were found not to pay at this batch size."""
        band = self.bands[self._band_of[min(batch, len(self.schedule) - 1)]]
        return band.k > 0 and not band.on

    def record(self, step: Step) -> bool:
        """Take one step in. Returns whether `lookup` changed."""
        band = self.bands[self._band_of[min(step.batch, len(self.schedule) - 1)]]
        if not band.k:
            return False
        before = band.now
        # Only steps that verified what they ask for, and read no prompt, tell what a setting costs.
        steady = step.asked == step.k == before and not step.prefill and step.seconds > 0
        if steady and before:
            band.tokens += step.tokens - band.tokens / MEMORY
            band.requests += step.batch - band.requests / MEMORY
        self._advance(band, step.seconds / step.batch if steady else None)
        return band.now != before

    def _advance(self, band: Band, cost: float | None) -> None:
        """One step of a band's round: usual steps, a probe, usual steps again. `cost` is None for unsteady steps."""
        size, band.since = self.config.probe, band.since + 1
        if band.stage == "usual":
            if cost is not None:
                band.usual.append(cost)
                while len(band.usual) > size:
                    band.usual.popleft()
            wait = size if len(band.costs) < self.config.first else self.config.every - size
            if band.since >= wait and len(band.usual) == size:
                band.stage, band.since, band.probe, band.after = "probe", 0, [], []
            return
        seen = band.probe if band.stage == "probe" else band.after
        if cost is not None:
            seen.append(cost)
        if len(seen) == size and band.stage == "probe":
            band.stage, band.since = "after", 0
        elif len(seen) == size or band.since >= 4 * size:
            # Where prompts come in all the time few steps are steady: the round is given up before it costs much.
            if len(seen) == size:
                self._compare(band)
            band.stage, band.since = "usual", 0
            band.usual.clear()

    def _compare(self, band: Band) -> None:
        size = self.config.probe
        usual, probe = (sum(band.usual) + sum(band.after)) / (2 * size), sum(band.probe) / size
        band.costs.append(usual / probe if band.on else probe / usual)
        gain = band.gain
        if gain is None or len(band.costs) < self.config.first:
            return
        if band.on and gain * (1 + self.config.margin) < 1:
            band.on = False
        elif not band.on and gain > 1 + self.config.margin:
            band.on = True

    def gains(self) -> dict[int, float]:
        """Speed with proposals over speed without, by a band's first batch size, where it is known."""
        return {start: band.gain for start, band in self.bands.items() if band.gain is not None}

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint: a restored controller goes on where this one stands."""
        return {
            str(start): {name: _plain(getattr(band, name)) for name in Band.__slots__}
            for start, band in self.bands.items()
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take a state over. Bands that the settings no longer have, or that have another k, start anew."""
        for start, band in self.bands.items():
            old = state.get(str(start))
            if old is None or old["k"] != band.k:
                continue
            lists = {"probe": list(old["probe"]), "after": list(old["after"]), "usual": deque(old["usual"])}
            self.bands[start] = Band(**{**old, **lists, "costs": deque(old["costs"], maxlen=self.config.window)})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, deque | list) else value
