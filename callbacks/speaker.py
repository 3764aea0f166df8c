"""One rank of each model replica speaks for it: it alone owns the rollout engine, and its peers get what came of it.

The tensor, pipeline and context parallel ranks of a replica train on the same rollouts. So one of them generates and
scores, and hands completions, rewards and failures over to the others: nobody waits for an engine that has died. A
refit takes all of them: the peers send the parts of the weights that they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lightning_spec.batch import Completion, SpecStats
from lightning_spec.errors import EngineError
from lightning_spec.parallel.assemble import drain
from lightning_spec.parallel.groups import Ranks
from lightning_spec.rollout.engine import (
    Engine,
    EngineFiles,
    Generation,
    NamedTensors,
    Progress,
    RefitReport,
    Request,
    Sampling,
)

T = TypeVar("T")


class Speaker:
    """Runs on the first of `ranks` what must happen once, and gives its outcome to all of them.

    Args:
        ranks: the ranks that hold the same rollouts; None where there is one.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks if ranks is not None and ranks.size > 1 else None

    @classmethod
    def of(cls, strategy: Any) -> Speaker:
        """Of all ranks of a model replica of the strategy, where it has such."""
        replica = getattr(strategy, "replica", None)
        return cls(replica if replica is not None else getattr(strategy, "context", None))

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one that acts."""
        return self._ranks is None or self._ranks.rank == 0

    def run(self, action: Callable[[], T]) -> T:
        """The result of `action` on the speaking rank, on every rank. Collective where there are several.

        Raises:
            whatever `action` raised, on the speaking rank; EngineError with its text on the others.
        """
        if self._ranks is None:
            return action()
        if not self.speaks:
            failure, result = self._ranks.broadcast(("", None))
            if failure:
                raise EngineError(f"the rank that runs this replica's engine failed: {failure}")
            return result  # type: ignore[return-value]
        try:
            value = action()
        except Exception as error:
            self._ranks.broadcast((f"{type(error).__name__}: {error}", None))
            raise
        self._ranks.broadcast(("", value))
        return value

    def share(self, engine: Engine) -> Engine:
        """The engine for all ranks: itself where there is one rank."""
        return engine if self._ranks is None or isinstance(engine, SharedEngine) else SharedEngine(engine, self)


def writes_with_first(trainer: Any) -> bool:
    """Whether this rank takes part when rank 0 writes the model: rank 0, and those that hold the model with it.
    Collective over each set of ranks that together hold every tensor."""
    assembly = getattr(trainer.strategy, "assembly", None)
    return trainer.is_global_zero if assembly is None else assembly.broadcast(trainer.is_global_zero)


def consumed(action: Callable[[], T], *streams: NamedTensors | None) -> T:
    """The result of `action`, which reads the streams in order; what it leaves of them, also when it fails, is drained,
    so that no rank that sends its parts of the tensors is left waiting."""
    try:
        result = action()
    except Exception:
        for stream in streams:
            drain(stream)
        raise
    for stream in streams:
        drain(stream)
    return result


class SharedEngine(Engine):
    """An engine that runs on the speaking rank; every rank calls its methods alike. `close` alone needs no other rank.

    What else the engine knows (its settings) is read from this rank's own, which has never started on the peers.
    """

    def __init__(self, engine: Engine, speaker: Speaker) -> None:
        self._engine, self._speaker = engine, speaker
        self._running = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._engine, name)

    @property
    def speculative(self) -> bool:
        return self._engine.speculative

    @property
    def takes_draft(self) -> bool:
        return self._engine.takes_draft

    @property
    def running(self) -> bool:
        # As of the last call that all ranks made, so that they agree.
        return self._running

    def start(self, files: EngineFiles) -> None:
        self._run(lambda: self._engine.start(files))

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_progress: Progress | None = None
    ) -> list[Completion]:
        def action() -> tuple[list[Completion], Generation]:
            return self._engine.generate(requests, sampling, on_progress), self._engine.last

        completions, self.last = self._run(action)
        return completions

    def refit(
        self, policy: NamedTensors | None, draft: NamedTensors | None, version: int, verify: bool = False
    ) -> RefitReport:
        if not self._speaker.speaks:
            # What the speaking rank's engine takes, this rank helps to assemble: in the same order, to the end.
            drain(policy)
            drain(draft)
        return self._run(lambda: consumed(lambda: self._engine.refit(policy, draft, version, verify), policy, draft))

    def stats(self) -> SpecStats:
        return self._run(self._engine.stats)

    def restore_speculation(self, state: dict[str, Any]) -> None:
        self._run(lambda: self._engine.restore_speculation(state))

    def sleep(self) -> bool:
        return self._run(self._engine.sleep)

    def wake(self) -> bool:
        return self._run(self._engine.wake)

    def close(self) -> None:
        self._running = False
        if self._speaker.speaks:
            self._engine.close()

    def _run(self, action: Callable[[], T]) -> T:
        try:
            result, self._running = self._speaker.run(lambda: (action(), self._engine.running))
        except Exception:
            # It may live on after a refused request, but the peers cannot know, and the run ends.
            self._running = False
            raise
        return result
