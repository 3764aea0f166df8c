"""One rollout phase as pure functions: seeds, requests, rollouts with advantages, and the metrics of each.

Nothing here knows an engine or a trainer, so each step can be tested alone and gives the same on every rank and after
a resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_spec.batch import Completion, Prompt, Rollout, SpecStats
from lightning_spec.loss.advantages import group_advantages, trained_flags
from lightning_spec.metrics import MetricBag
from lightning_spec.rollout.engine import Generation, Request


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages.

    Args:
        std: divide by the deviation of the prompt's group (GRPO), of all rewards of the step, or not (Dr. GRPO).
        baseline: the group's mean, or the mean of the other samples (RLOO).
        eps: added to the deviation, in reward units.
    """

    std: Literal["group", "batch", "none"] = "group"
    baseline: Literal["mean", "leave_one_out"] = "mean"
    eps: float = 1e-6


def request_seed(seed: int, step: int, uid: str, sample: int, occurrence: int = 0) -> int:
    """A 48-bit seed of one sample: the same on any rank, in any order, and after a resume.

    Args:
        seed: the run's seed.
        step: optimiser steps done when the phase starts.
        uid: the prompt's uid.
        sample: number of the sample in its group.
        occurrence: how many times the phase has already seen this prompt.
    """
    text = f"{seed}/{step}/{uid}/{occurrence}/{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion to make: its prompt, the group it belongs to, and the engine's request."""

    prompt: Prompt
    group: str
    request: Request


def make_asks(prompts: Sequence[Prompt], samples: int, *, seed: int, step: int, kind: str = "train") -> list[Ask]:
    """`samples` requests for each prompt, a prompt's samples next to each other. A prompt that comes twice in the phase
    makes two groups. `kind` keeps the seeds of training and validation apart.
    """
    asks: list[Ask] = []
    seen: dict[str, int] = {}
    for prompt in prompts:
        occurrence = seen.get(prompt.uid, 0)
        seen[prompt.uid] = occurrence + 1
        group = f"{kind}/{step}/{prompt.uid}/{occurrence}"
        for sample in range(samples):
            number = request_seed(seed, step, f"{kind}/{prompt.uid}", sample, occurrence)
            asks.append(Ask(prompt, group, Request(prompt.tokens, seed=number)))
    return asks


def make_rollouts(
    asks: Sequence[Ask],
    completions: Sequence[Completion],
    rewards: Sequence[tuple[float, dict[str, float]]],
    *,
    advantages: AdvantageConfig,
    overlong: Literal["train", "skip"] = "train",
) -> list[Rollout]:
    """Join requests, completions and rewards (total and its named parts); advantages over each prompt's group."""
    values = [total for total, _ in rewards]
    scores = group_advantages(
        values,
        [ask.group for ask in asks],
        std=advantages.std,
        baseline=advantages.baseline,
        eps=advantages.eps,
    ).tolist()
    kept = trained_flags([completion.finish for completion in completions], overlong=overlong)
    return [
        Rollout(ask.prompt, completion, ask.group, reward=total, reward_parts=parts, advantage=score, trained=keep)
        for ask, completion, (total, parts), score, keep in zip(asks, completions, rewards, scores, kept, strict=True)
    ]


def reward_metrics(rollouts: Sequence[Rollout], pass_reward: float | None) -> MetricBag:
    """What a batch's rollouts say of themselves. The same names on every rank, also for a rank without rollouts.

    Args:
        pass_reward: rewards of at least this count as passed; None: nothing scored the rollouts.
    """
    bag = MetricBag()
    n = len(rollouts)
    bag.add("rollout/length", sum(len(r.completion.tokens) for r in rollouts), n)
    bag.add("rollout/truncated", sum(r.completion.finish == "length" for r in rollouts), n)
    bag.add("rollout/skipped", sum(not r.trained for r in rollouts), n)
    if pass_reward is None:
        return bag
    groups: dict[str, list[float]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout.reward)
    deviations = [float(torch.tensor(group, dtype=torch.float64).std(correction=0)) for group in groups.values()]
    bag.add("reward", sum(r.reward for r in rollouts), n)
    bag.add("reward/group_std", sum(deviations), len(groups))
    bag.add("reward/pass_rate", sum(r.reward >= pass_reward - 1e-9 for r in rollouts), n)
    for name in sorted({name for r in rollouts for name in r.reward_parts}):
        bag.add(f"reward/{name}", sum(r.reward_parts.get(name, 0.0) for r in rollouts), n)
    bag.add("advantage/abs_mean", sum(abs(r.advantage) for r in rollouts), n)
    bag.add("advantage/max", max((r.advantage for r in rollouts), default=float("-inf")), reduction="max")
    bag.add("rollout/flat_groups", sum(max(g) - min(g) <= 1e-9 for g in groups.values()), len(groups))
    return bag


def speculation_metrics(spec: SpecStats, positions: int, prefix: str = "spec") -> MetricBag:
    """Acceptance of a phase. `positions` is the number of proposals of a full draft, so that ranks name the same."""
    bag = MetricBag()
    # 1 + accepted / drafts as one ratio of sums; no draft at all means one token a step, which is length 1.
    bag.add(f"{prefix}/acceptance_length", spec.drafts + spec.accepted or 1, spec.drafts or 1)
    bag.add(f"{prefix}/drafts", spec.drafts, reduction="sum")
    bag.add(f"{prefix}/drafted", spec.drafted, reduction="sum")
    bag.add(f"{prefix}/accepted", spec.accepted, reduction="sum")
    for position in range(positions):
        count = spec.per_position[position] if position < len(spec.per_position) else 0
        bag.add(f"{prefix}/accepted_at_{position}", count, spec.drafts)
    return bag


def generation_metrics(generation: Generation) -> MetricBag:
    """Tokens and speed of a phase; tokens/s is per engine (ranks run one each), its mean weighted by time. Where
    speculation is adaptive: proposals asked for a token step, and the share of steps for which they do not pay.
    """
    bag = MetricBag()
    bag.add("rollout/tokens", generation.tokens, reduction="sum")
    bag.add("rollout/tokens_per_second", generation.tokens, generation.seconds)
    if (adaptive := generation.adaptive) is not None:
        bag.add("rollout/k", adaptive.proposals, adaptive.requests)
        bag.add("rollout/spec_off", adaptive.off, adaptive.requests)
    return bag


def repeated(phase: MetricBag) -> MetricBag:
    """What a phase's second and later batches say of it: its means again, its sums and seconds not, so that every step
    logs the same names (Lightning would repeat the last value of a name that is missing) and totals stay right.
    """
    bag = MetricBag()
    for name, metric in phase.items():
        spent = metric.reduction == "sum" or name.startswith("time/")
        bag.add(name, 0.0 if spent else metric.num, metric.den, metric.reduction)
    return bag


def bag_to_plain(bag: MetricBag) -> dict[str, list[float | str]]:
    """Plain data of a bag, for checkpoints."""
    return {name: [metric.reduction, float(metric.num), float(metric.den)] for name, metric in bag.items()}


def bag_from_plain(plain: dict[str, list[Any]]) -> MetricBag:
    bag = MetricBag()
    for name, (reduction, num, den) in plain.items():
        bag.add(name, num, den, reduction)
    return bag
