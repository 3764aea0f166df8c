"""The types that flow through one step: Prompt -> Completion -> Rollout -> StepBatch -> PackedBatch.

Two alignments are used, and every field says which. *Token-aligned*: entry t is about the token x_t. *Row-aligned*:
entry t is about row t of the network, which predicts x_{t+1}. Nothing is shifted after packing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_spec.attention.zigzag import Shard
from lightning_spec.metrics import MetricBag

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question. `task` carries what the reward needs; `worked` is a worked answer's tokens, for supervised work."""

    uid: str
    tokens: tuple[int, ...]
    text: str
    task: dict[str, Any] = field(default_factory=dict)
    worked: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class SpecStats:
    """Counters of speculative decoding. A *draft* is one verification step that had proposals to verify."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()

    def __add__(self, other: SpecStats) -> SpecStats:
        width = max(len(self.per_position), len(other.per_position))
        a = self.per_position + (0,) * (width - len(self.per_position))
        b = other.per_position + (0,) * (width - len(other.per_position))
        return SpecStats(
            self.drafts + other.drafts,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            tuple(x + y for x, y in zip(a, b, strict=True)),
        )

    def __sub__(self, other: SpecStats) -> SpecStats:
        negated = SpecStats(
            -other.drafts, -other.drafted, -other.accepted, tuple(-count for count in other.per_position)
        )
        return self + negated

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per verification step, counting the bonus token: 1 + accepted / drafts."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Share of drafts whose proposal at each position was accepted (a running product, by construction)."""
        return tuple(count / self.drafts if self.drafts else 0.0 for count in self.per_position)


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled for a prompt. `logprobs[i]` is the engine's log-prob of `tokens[i]` under the sampling
    temperature; `finish` is "stop" when the last token ended generation; `version` is the weights' version."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    version: int = 0
    spec: SpecStats | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.logprobs)} log-probs")


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion with its reward. All rollouts of one prompt in one phase share `group`, wherever they land."""

    prompt: Prompt
    completion: Completion
    group: str
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    advantage: float = 0.0
    trained: bool = True
    """False: the policy loss skips it (overlong filter). It still counts for group statistics."""
    old_logprobs: tuple[float, ...] | None = None
    ref_logprobs: tuple[float, ...] | None = None

    @property
    def length(self) -> int:
        return len(self.prompt.tokens) + len(self.completion.tokens)

    @classmethod
    def from_worked(cls, prompt: Prompt) -> Rollout:
        """A supervised example: the worked answer as if it had been sampled, ending generation at its last token."""
        if prompt.worked is None:
            raise ValueError(f"prompt {prompt.uid!r} has no worked answer")
        completion = Completion(prompt.worked, (0.0,) * len(prompt.worked), "stop")
        return cls(prompt, completion, group=prompt.uid)


@dataclass(slots=True)
class StepBatch:
    """One data-parallel rank's share of one optimiser step, with the metrics of the rollout phase it came from."""

    rollouts: list[Rollout]
    metrics: MetricBag = field(default_factory=MetricBag)
    version: int = 0
    """Policy version (optimiser steps done) whose weights sampled the rollouts; supervised data: the current one."""

    def to(self, *_args: Any, **_kwargs: Any) -> StepBatch:
        """The batch itself: it holds no tensors. Lightning moves batches to the device, and what has a `to` is a leaf
        for it; without one it would try to rebuild the frozen dataclasses inside, and raise."""
        return self


@dataclass(slots=True)
class PackedBatch:
    """One micro-batch: documents laid end to end, no padding. All tensors have T entries unless said otherwise."""

    tokens: Tensor
    """int64, token-aligned."""
    positions: Tensor
    """int64, position inside the document."""
    lengths: list[int]
    """Rows of each document; they sum to T."""
    document: Tensor
    """int64, index of the row's document in this micro-batch."""
    sampled: Tensor
    """bool, token-aligned: m_t, x_t was sampled by the policy."""
    stop: Tensor
    """bool, token-aligned: x_t ended generation."""
    labels: Tensor
    """int64, row-aligned: x_{t+1} in the same document, -1 at a document's last row."""
    loss_mask: Tensor
    """bool, row-aligned: the row predicts a sampled token of a rollout that the policy loss trains on."""
    advantages: Tensor
    """float32, row-aligned."""
    engine_logprobs: Tensor
    """float32, row-aligned: the engine's log-prob of the label; 0 where loss_mask is False."""
    old_logprobs: Tensor | None
    """float32, row-aligned: the trainer's log-prob at rollout weights, or None when it equals the current one."""
    ref_logprobs: Tensor | None
    """float32, row-aligned."""
    rollout_index: list[int]
    """Position of each document in the StepBatch."""
    seed: int = 0
    """Of draws that belong to this micro-batch (row sampling): equal on the ranks that share it, else different."""
    document_seeds: list[int] = field(default_factory=list)
    """Of draws that belong to a document (its anchors), one for each document: equal on the ranks that share it and in
    whatever micro-batch it lies, another one at every optimiser step and data-parallel rank."""
    shard: Shard | None = field(default=None, repr=False, compare=False)
    """Which rows this rank computes (context parallelism), made by the first who asks: see `Share.shard_of`."""

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [documents + 1], cumulative lengths."""
        ends = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return ends.to(self.tokens.device)

    @property
    def max_length(self) -> int:
        return max(self.lengths, default=0)

    def take(self, rows: Tensor) -> PackedBatch:
        """The given rows of every tensor, [T] -> [rows]: what one context-parallel rank holds of the micro-batch.

        `lengths` and `rollout_index` stay those of the whole, and `document` keeps its numbers.
        """
        rows = rows.to(self.tokens.device)
        taken = {name: value[rows] for name in self.__slots__ if isinstance(value := getattr(self, name), Tensor)}
        return replace(self, **taken)  # type: ignore[arg-type]

    def digest(self) -> bytes:
        """Tells micro-batches apart that hold other tokens, documents or advantages."""
        found = hashlib.blake2b(repr(self.lengths).encode(), digest_size=16)
        for tensor in (self.tokens, self.loss_mask, self.advantages):
            found.update(tensor.cpu().numpy().tobytes())
        return found.digest()

    def to(self, device: torch.device | str) -> PackedBatch:
        moved = {
            name: value.to(device, non_blocking=True)
            for name in self.__slots__
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **moved)  # type: ignore[arg-type]


def pack_documents(rollouts: Sequence[Rollout], index: Sequence[int]) -> PackedBatch:
    """Lay the given rollouts end to end in the order given. `index[i]` is rollouts[i]'s place in the StepBatch."""
    tokens: list[int] = []
    positions: list[int] = []
    document: list[int] = []
    sampled: list[bool] = []
    stop: list[bool] = []
    labels: list[int] = []
    loss_mask: list[bool] = []
    advantages: list[float] = []
    engine: list[float] = []
    old: list[float] = []
    ref: list[float] = []
    lengths: list[int] = []
    has_old = bool(rollouts) and all(r.old_logprobs is not None for r in rollouts)
    has_ref = bool(rollouts) and all(r.ref_logprobs is not None for r in rollouts)
    for number, rollout in enumerate(rollouts):
        prompt, completion = rollout.prompt.tokens, rollout.completion.tokens
        row = [*prompt, *completion]
        n, c = len(row), len(completion)
        tokens += row
        positions += range(n)
        document += [number] * n
        sampled += [False] * len(prompt) + [True] * c
        ends = [False] * n
        if c and rollout.completion.finish == "stop":
            ends[-1] = True
        stop += ends
        labels += [*row[1:], -1] if n else []
        # Row t predicts token t + 1: the first supervised row is the prompt's last one.
        first = len(prompt) - 1

        def row_aligned(values: Sequence[float], first: int = first, n: int = n) -> list[float]:
            out = [0.0] * n
            for i, value in enumerate(values):
                if first + i >= 0:
                    out[first + i] = value
            return out

        mask = [first <= t < n - 1 and rollout.trained for t in range(n)]
        loss_mask += mask
        advantages += [rollout.advantage if m else 0.0 for m in mask]
        engine += row_aligned(completion and rollout.completion.logprobs)
        if has_old:
            old += row_aligned(rollout.old_logprobs or ())
        if has_ref:
            ref += row_aligned(rollout.ref_logprobs or ())
        lengths.append(n)
    return PackedBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        lengths=lengths,
        document=torch.tensor(document, dtype=torch.int64),
        sampled=torch.tensor(sampled, dtype=torch.bool),
        stop=torch.tensor(stop, dtype=torch.bool),
        labels=torch.tensor(labels, dtype=torch.int64),
        loss_mask=torch.tensor(loss_mask, dtype=torch.bool),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        engine_logprobs=torch.tensor(engine, dtype=torch.float32),
        old_logprobs=torch.tensor(old, dtype=torch.float32) if has_old else None,
        ref_logprobs=torch.tensor(ref, dtype=torch.float32) if has_ref else None,
        rollout_index=list(index),
    )


def pack(rollouts: Sequence[Rollout], token_budget: int) -> list[PackedBatch]:
    """Cut a step into micro-batches of at most `token_budget` tokens: longest first, each into the first that has room.

    A rollout longer than the budget gets a micro-batch of its own. Empty rollouts (no tokens at all) are dropped.
    The result depends on the rollouts alone, so a resumed run cuts the same micro-batches.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    order = sorted((i for i, r in enumerate(rollouts) if r.length), key=lambda i: (-rollouts[i].length, i))
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        length = rollouts[i].length
        for b, free in enumerate(room):
            if length <= free:
                bins[b].append(i)
                room[b] -= length
                break
        else:
            bins.append([i])
            room.append(token_budget - length)
    return [pack_documents([rollouts[i] for i in members], members) for members in bins]


def with_scores(batch: StepBatch, name: str, scored: Sequence[tuple[PackedBatch, Tensor]]) -> StepBatch:
    """The batch with row-aligned log-probs put into a field of its rollouts (`old_logprobs`, `ref_logprobs`).

    Args:
        scored: each micro-batch of `batch`, whole, with the log-probs [T] of its labels.
    """
    scores: list[tuple[float, ...]] = [()] * len(batch.rollouts)
    for micro, logprobs in scored:
        start = 0
        for length, index in zip(micro.lengths, micro.rollout_index, strict=True):
            rollout = batch.rollouts[index]
            first = start + len(rollout.prompt.tokens) - 1
            count = len(rollout.completion.tokens)
            row = logprobs[max(first, start) : first + count].tolist()
            # Without a prompt the first token has no row that predicts it.
            scores[index] = tuple([0.0] * (count - len(row)) + row)
            start += length
    rollouts: list[Rollout] = [
        replace(rollout, **{name: values})  # type: ignore[arg-type]
        for rollout, values in zip(batch.rollouts, scores, strict=True)
    ]
    return StepBatch(rollouts, batch.metrics, batch.version)
