"""Rewards: what a completion is worth. Verifiers of reasoning-gym and math-verify, exact match, and their mixtures.

A reward never sees tokens that it must decode itself: it gets the prompt (with its task), the completion, and the
completion's text. Users name their own subclass of `Reward` by class path.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from lightning_spec.batch import Completion, Prompt
from lightning_spec.errors import ConfigError, SpecError
from lightning_spec.rollout.math_check import MathChecker


class RewardError(SpecError):
    """A reward raised or gave something that is not a finite number; names the prompt."""


class Reward(ABC):
    """Scores one completion; must be finite. Larger is better."""

    @property
    def name(self) -> str:
        """Name of this reward in logs."""
        return type(self).__name__

    @abstractmethod
    def __call__(self, prompt: Prompt, completion: Completion, text: str) -> float:
        """The score. A malformed completion is a low score, never an exception."""

    def parts(self, prompt: Prompt, completion: Completion, text: str) -> dict[str, float]:
        """Components by name for the logs; `total` is the score itself."""
        return {"total": float(self(prompt, completion, text))}

    def close(self) -> None:  # noqa: B027 (most rewards hold nothing)
        """Release helper processes; safe to call again."""


def score(reward: Reward, prompt: Prompt, completion: Completion, text: str) -> tuple[float, dict[str, float]]:
    """(score, its parts), with faults of user code reported for the prompt they happened on.

    Raises:
        RewardError: the reward raised, or some part is not a finite number. ConfigErrors pass through.
    """
    try:
        parts = {name: float(value) for name, value in reward.parts(prompt, completion, text).items()}
        total = parts.pop("total")
    except ConfigError:
        raise
    except Exception as error:
        raise RewardError(
            f"reward {reward.name} failed on prompt {prompt.uid!r}: {type(error).__name__}: {error}; "
            f"completion {text[:120]!r}"
        ) from error
    bad = {name: value for name, value in {"total": total, **parts}.items() if not math.isfinite(value)}
    if bad:
        raise RewardError(
            f"reward {reward.name} is not finite on prompt {prompt.uid!r}: {bad}; completion {text[:120]!r}"
        )
    return total, parts


class AnswerReward(Reward):
    """A reward of the final answer that is extracted from the text.

    Args:
        extract: regular expression; the answer is group 1 (or the whole match) of its last match, stripped. None takes
            the whole text. A text without a match has no answer and scores 0.
    """

    def __init__(self, extract: str | None = None) -> None:
        try:
            self._pattern = None if extract is None else re.compile(extract, re.DOTALL)
        except re.error as error:
            raise ConfigError(
                f"not a regular expression ({error})",
                found=extract,
                needed="a pattern such as '#([^#]*)$'",
                key=f"rollout.reward.{type(self).__name__}.extract",
            ) from error

    def extract(self, text: str) -> str | None:
        """The final answer, or None where there is none."""
        if self._pattern is None:
            return text.strip()
        matches = list(self._pattern.finditer(text))
        if not matches:
            return None
        found = matches[-1].group(1 if self._pattern.groups else 0)
        return None if found is None else found.strip()

    def __call__(self, prompt: Prompt, completion: Completion, text: str) -> float:
        answer = self.extract(text)
        return self.judge(prompt, answer) if answer else 0.0

    @abstractmethod
    def judge(self, prompt: Prompt, answer: str) -> float:
        """Score of a non-empty answer."""


def _task_field(prompt: Prompt, name: str, reward: str) -> Any:
    if name not in prompt.task:
        raise ConfigError(
            f"{reward}: prompt {prompt.uid!r} has no task field {name!r}",
            found=sorted(prompt.task),
            needed="prompts from a source that gives it",
            key="rollout.reward",
        )
    return prompt.task[name]


class ReasoningGymReward(AnswerReward):
    """The verifier of the reasoning-gym task that the prompt came from (`ReasoningGymPrompts`).

    Args:
        extract: see AnswerReward; `#([^#]*)$` for our worked tasks.
        partial: keep the verifier's partial credit; otherwise 1 for a full score and 0 for less.
    """

    def __init__(self, extract: str | None = None, partial: bool = False) -> None:
        super().__init__(extract)
        self.partial = partial

    def judge(self, prompt: Prompt, answer: str) -> float:
        recipe = [_task_field(prompt, name, self.name) for name in ("task", "config", "size", "seed", "index")]
        task, config, size, seed, index = recipe
        data = _verifier(task, _frozen(config), size, seed)
        value = float(data.score_answer(answer, entry=data[index]))
        return value if self.partial else float(value >= 1.0)


def _frozen(value: Any) -> Any:
    """A hashable twin of plain data."""
    if isinstance(value, Mapping):
        return ("map", tuple(sorted((name, _frozen(item)) for name, item in value.items())))
    if isinstance(value, list | tuple):
        return ("list", tuple(_frozen(item) for item in value))
    return value


def _thawed(value: Any) -> Any:
    if isinstance(value, tuple):
        kind, items = value
        return {name: _thawed(item) for name, item in items} if kind == "map" else [_thawed(item) for item in items]
    return value


@lru_cache(maxsize=64)
def _verifier(task: str, config: Any, size: int, seed: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=size, seed=seed, **_thawed(config))


class MathVerifyReward(AnswerReward):
    """Mathematical equality with the prompt's `answer`, by math-verify, in a helper process with a time bound.

    math-verify bounds its own time by signals, which only the main thread can use; a process of its own can be ended
    from any thread.

    Args:
        extract: see AnswerReward; None leaves the search for the final expression to math-verify.
        timeout: seconds for one completion; an answer that takes longer scores 0.
    """

    def __init__(self, extract: str | None = None, timeout: float = 5.0) -> None:
        super().__init__(extract)
        if not timeout > 0:
            raise ConfigError("bad time bound", found=timeout, needed="seconds > 0", key="rollout.reward.timeout")
        self._checker = MathChecker(timeout)

    def judge(self, prompt: Prompt, answer: str) -> float:
        return float(self._checker.equal(str(_task_field(prompt, "answer", self.name)), answer))

    def close(self) -> None:
        self._checker.close()


class ExactMatch(AnswerReward):
    """1 where the extracted answer equals the prompt's `answer`, else 0. Outer white space never counts.

    Args:
        extract: see AnswerReward.
        ignore_case: compare without regard to case.
    """

    def __init__(self, extract: str | None = None, ignore_case: bool = False) -> None:
        super().__init__(extract)
        self.ignore_case = ignore_case

    def judge(self, prompt: Prompt, answer: str) -> float:
        wanted = str(_task_field(prompt, "answer", self.name)).strip()
        if self.ignore_case:
            return float(answer.casefold() == wanted.casefold())
        return float(answer == wanted)


class LengthPenalty(Reward):
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): 0 up to `free` tokens, -1 from `limit` on, and a
    straight line between. Truncated completions get -1 whatever their length."""

    def __init__(self, free: int, limit: int) -> None:
        if not 0 <= free < limit:
            raise ConfigError(
                "bad length bounds",
                found=f"free {free}, limit {limit}",
                needed="0 <= free < limit",
                key="rollout.reward",
            )
        self.free, self.limit = free, limit

    def __call__(self, prompt: Prompt, completion: Completion, text: str) -> float:
        if completion.finish == "length":
            return -1.0
        over = (len(completion.tokens) - self.free) / (self.limit - self.free)
        return -min(1.0, max(0.0, over))


class WeightedRewards(Reward):
    """A weighted sum; each part is logged unweighted under its own name.

    Args:
        rewards: the parts.
        weights: one for each; 1 by default.
    """

    def __init__(self, rewards: Sequence[Reward], weights: Sequence[float] | None = None) -> None:
        weights = [1.0] * len(rewards) if weights is None else list(weights)
        if not rewards or len(weights) != len(rewards):
            raise ConfigError(
                "rewards and weights differ in number",
                found=f"{len(rewards)} rewards, {len(weights)} weights",
                needed="at least one reward, and one weight for each",
                key="rollout.reward.weights",
            )
        self.rewards, self.weights = list(rewards), weights

    def parts(self, prompt: Prompt, completion: Completion, text: str) -> dict[str, float]:
        out: dict[str, float] = {}
        total = 0.0
        for reward, weight in zip(self.rewards, self.weights, strict=True):
            value = float(reward(prompt, completion, text))
            name, number = reward.name, 2
            while name in out:
                name, number = f"{reward.name}_{number}", number + 1
            out[name] = value
            total += weight * value
        return {**out, "total": total}

    def __call__(self, prompt: Prompt, completion: Completion, text: str) -> float:
        return self.parts(prompt, completion, text)["total"]

    def close(self) -> None:
        for reward in self.rewards:
            reward.close()
