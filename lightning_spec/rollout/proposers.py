"""Proposers of the reference engine: what may be drafted before the policy verifies it."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_spec.errors import CheckpointError, ConfigError, EngineError
from lightning_spec.shapes import PolicyShape


@dataclass(slots=True)
class Context:
    """One sequence at the moment of drafting."""

    tokens: list[int]
    """All n tokens; the last one, the bonus token, has not been through the policy yet."""
    features: Tensor | None
    """[n-1, taps*C], the policy's hidden states at `aux_layer_ids`, ascending, concatenated; [n-1, C], its final-normed
    states, for a proposer that `reads_hidden`; None for one that reads neither."""
    head: Tensor
    """[V, C], the policy's."""
    embedding: Tensor
    """[V, C], the policy's."""
    temperature: float
    generator: torch.Generator


class Proposer(ABC):
    """Drafts tokens after a context. It may propose fewer than asked for, none included."""

    aux_layer_ids: tuple[int, ...] = ()
    """Layers whose input it wants to see; () for none. Id L is what the last layer gives, before the final norm."""
    reads_hidden: bool = False
    """Whether it wants the policy's final-normed states instead."""
    longest_proposal: int | None = None
    """Most tokens that it can propose at once; None: any number."""

    @abstractmethod
    def propose(self, context: Context, k: int) -> tuple[list[int], Tensor]:
        """(at most k tokens, the distributions [len, V] they were drawn from; one-hot where nothing was drawn)."""

    def refit(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take a draft's new weights.

        Raises:
            EngineError: this proposer has none, or tensors are missing or surplus.
        """
        raise EngineError(f"draft refit: {type(self).__name__} has no weights")

    def tensors(self) -> dict[str, Tensor]:
        """The draft's tensors by checkpoint name."""
        return {}


class NgramProposer(Proposer):
    """Prompt lookup (arXiv 2304.04487 and vLLM's ngram): continue as after the most recent earlier occurrence of the
    last n tokens, longest n first.

    Args:
        longest, shortest: sizes of n tried.
    """

    def __init__(self, longest: int = 4, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise ConfigError(
                "bad n-gram sizes", found=(shortest, longest), needed="1 <= shortest <= longest", key="rollout.ngram"
            )
        self.longest, self.shortest = longest, shortest

    def propose(self, context: Context, k: int) -> tuple[list[int], Tensor]:
        tokens, vocab = context.tokens, context.head.shape[0]
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            tail = tokens[-n:]
            for start in range(len(tokens) - n - 1, -1, -1):
                if tokens[start : start + n] == tail:
                    found = tokens[start + n : start + n + k]
                    return found, torch.nn.functional.one_hot(torch.tensor(found), vocab).to(torch.float64)
        return [], torch.zeros(0, vocab, dtype=torch.float64)


class DraftProposer(Proposer):
    """One of the project's drafts, through its serving forward.

    Args:
        folder: its checkpoint. class_path: dotted path of the Draft class. shape: the policy's sizes.
        confidence_threshold: a proposal ends before the first token that the draft is less sure of; None: never.

    Raises:
        ConfigError: no such class, or a draft that does not fit the policy.
    """

    def __init__(
        self, folder: Path, class_path: str, shape: PolicyShape, confidence_threshold: float | None = None
    ) -> None:
        module, _, name = class_path.rpartition(".")
        try:
            kind: Any = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"no such draft class ({error})",
                found=class_path,
                needed="the dotted path of a Draft",
                key="model.draft.class_path",
            ) from error
        self.draft = kind(path=str(folder))
        self.draft.build(shape)
        if confidence_threshold is not None:
            if getattr(self.draft, "confidence_head", None) is None:
                raise ConfigError(
                    "the draft has no confidence head",
                    found=confidence_threshold,
                    needed="null, or a DSpark draft with confidence: true",
                    key="rollout.engine.confidence_threshold",
                )
            self.draft.confidence_threshold = confidence_threshold
        self.draft.eval()
        self.reads_hidden = bool(self.draft.reads_hidden)
        self.aux_layer_ids = () if self.reads_hidden else tuple(self.draft.aux_layer_ids)
        # A block drafter proposes at most its block; others go on for as long as they are asked.
        self.longest_proposal = getattr(self.draft.config, "proposals", None)

    @torch.no_grad()
    def propose(self, context: Context, k: int) -> tuple[list[int], Tensor]:
        verified = context.tokens[:-1]
        if k == 0 or not verified:
            # A one-token prompt has no taps before its first forward.
            return [], torch.zeros(0, context.head.shape[0], dtype=torch.float64)
        features = context.features
        proposal = self.draft.propose(
            torch.zeros(len(verified), 0) if features is None else features,
            torch.tensor(verified),
            [len(verified)],
            torch.tensor([context.tokens[-1]]),
            k,
            policy_head=context.head,
            policy_embedding=context.embedding,
            temperature=context.temperature,
            generator=context.generator,
        )
        probs = proposal.probs[0].to(torch.float64)
        return proposal.tokens[0].tolist(), probs / probs.sum(-1, keepdim=True)

    def refit(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        try:
            self.draft.load_tensors(tensors, "draft refit")
        except CheckpointError as error:
            raise EngineError(str(error)) from error

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.draft.engine_tensors())
