"""What a draft is: it learns from the policy's activations of one micro-batch, and serves under the engine's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar, get_args

import torch
from torch import Tensor, nn

from lightning_spec.attention.cost import DraftWork
from lightning_spec.attention.zigzag import Shard
from lightning_spec.batch import PackedBatch
from lightning_spec.draft.config import KEY
from lightning_spec.errors import ConfigError
from lightning_spec.loss.vocab import VocabShard
from lightning_spec.metrics import Reduction
from lightning_spec.parallel.placement import Placement
from lightning_spec.shapes import PolicyShape

_Config = TypeVar("_Config")

AttentionMode = Literal["auto", "stream", "ring", "ulysses"]
"""How a draft attends over context-parallel ranks (and, with one rank, whether it streams)."""

DraftMetrics = dict[str, tuple[Tensor, Tensor, Reduction]]
"""name -> (numerator, denominator, reduction), sums of this micro-batch."""


@dataclass(slots=True)
class DraftInputs:
    """The policy's side of one micro-batch: T rows of packed documents. Everything is detached by the draft itself."""

    features: Tensor
    """[T, n*C], the taps of `aux_layer_ids` in ascending order, concatenated."""
    embeddings: Tensor
    """[T, C], the policy's input embedding of x_t."""
    hidden: Tensor
    """[T, C], the policy's final-normed hidden states; times `policy_head` they are the teacher's logits."""
    tokens: Tensor
    """int64 [T], token-aligned."""
    positions: Tensor
    """int64 [T], position inside the document."""
    lengths: list[int]
    """Rows of each document; they sum to T."""
    sampled: Tensor
    """bool [T], token-aligned: x_t was sampled by the policy."""
    stop: Tensor
    """bool [T], token-aligned: x_t ended generation."""
    policy_head: Tensor
    """[V, C], or this rank's rows of it, [stop - start, C], where `vocab` is given."""
    policy_embedding: Tensor | None
    """[V, C]; None where no rank that runs the draft holds it whole (a pipeline stage after the first, or tensor
    parallelism). EAGLE-3 does not read it in training: `embeddings` are all that it needs of it."""
    shard: Shard | None = None
    """None: this rank holds all T rows. Else `features`, `embeddings` and `hidden` are its rows [T_r, .] alone; tokens,
    positions, sampled, stop and lengths are those of the whole micro-batch on every rank."""
    seed: int = 0
    """Of a draft's random choices (which rows are sampled): equal on the ranks that share the micro-batch, and another
    one for every other micro-batch."""
    document_seeds: list[int] | None = None
    """Of choices that belong to a document (its anchors), one for each of `lengths`; see `PackedBatch`."""
    special: Tensor | None = None
    """[n, C], the policy's input embeddings of `Draft.embedding_ids`, in that order; None where it asks for none."""
    vocab: VocabShard | None = None
    """None: this rank holds the whole vocabulary. Else the ranks of its group (tensor parallelism) hold parts of it,
    and are given the same of everything but `policy_head`. They share the work: loss and metrics are complete on each,
    the gradient of a parameter is a share, and the sum over the group is the whole."""

    @property
    def split(self) -> Shard | None:
        """The shard where other ranks hold rows, too; None where this one has them all."""
        return self.shard if self.shard is not None and self.shard.size > 1 else None

    def detached(self) -> DraftInputs:
        names = ("features", "embeddings", "hidden", "policy_head", "policy_embedding", "special")
        found = {name: getattr(self, name) for name in names}
        cut: dict[str, Any] = {name: None if tensor is None else tensor.detach() for name, tensor in found.items()}
        return replace(self, **cut)


@dataclass(slots=True)
class DraftOutput:
    """`loss`: scalar, this micro-batch's share of the step's draft objective (global normalisers inside). Sums over
    data- and context-parallel ranks are the step's; tensor-parallel ranks all hold the same numbers."""

    loss: Tensor
    metrics: DraftMetrics


@dataclass(slots=True)
class Proposal:
    """What a draft proposes for each of B sequences: `tokens` int64 [B, k] (target ids), and `probs` [B, k, V], the
    distributions they were drawn from over the policy's vocabulary (one-hot where the proposal was greedy)."""

    tokens: Tensor
    probs: Tensor


class HasPositions(Protocol):
    @property
    def max_positions(self) -> int: ...


def need_built(config: _Config | None) -> _Config:
    """The settings that `build` has made. Raises RuntimeError before it."""
    if config is None:
        raise RuntimeError("the draft has no parameters yet: call build(shape) first")
    return config


class Draft(nn.Module, ABC):
    """A speculator that is trained beside the policy and served by the engine.

    Constructed from YAML without parameters; `build` makes them once the policy's sizes are known. A draft never draws
    from the global random state, so that a policy trains bit-identically with and without it.
    """

    aux_layer_ids: tuple[int, ...]
    """Layers of the policy whose input (residual stream) the draft reads, ascending; known after `build`. Id L, the
    number of layers, is what the last one gives, before the final norm. () for a draft that reads none."""
    embedding_ids: tuple[int, ...] = ()
    """Tokens whose input embeddings of the policy the draft reads in training (a mask token); known after `build`."""
    reads_hidden: bool = False
    """Whether `propose` is given the policy's final-normed states as `features`, instead of taps."""
    attention: AttentionMode = "auto"
    memory_limit: int | None = None
    _resident: bool = True

    @property
    def resident(self) -> bool:
        """Whether the parameters are here; see `drop_parameters`."""
        return self._resident

    def drop_parameters(self) -> None:
        """Free the parameters, after `build`: for the pipeline stages that another one's draft learns for.

        Every stage needs to know what the draft reads, counts and refuses, one holds it. Shapes and buffers stay, so
        `counts`, `check_length`, `fingerprint` and `speculative_config` work; what reads parameters raises
        RuntimeError. `parameters()` lists tensors without data: leave them out of data parallelism and optimisers.
        """
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    empty = torch.empty_like(parameter, device="meta")
                    module._parameters[name] = nn.Parameter(empty, requires_grad=False)
        self._resident = False

    def need_parameters(self) -> None:
        """Raise RuntimeError where `drop_parameters` was called."""
        if not self._resident:
            raise RuntimeError(
                f"{type(self).__name__} is known by its configuration alone on this rank: its parameters were dropped, "
                "another pipeline stage holds them"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if self._resident:
            return super()._apply(fn, recurse)
        # Tensors without data cannot be moved.
        for module in self.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else fn(buffer)
        return self

    def placements(self) -> dict[str, list[Placement]]:
        """Where this rank's parameters stand in the draft, by name: whole, as the draft is not split over ranks; none
        where they were dropped."""
        if not self._resident:
            return {}
        return {name: [Placement.whole(name, tuple(p.shape))] for name, p in self.named_parameters()}

    def local_tensors(self) -> Iterator[tuple[Placement, Tensor]]:
        """What this rank holds of `engine_tensors`, detached: all of it, or nothing. Parameters have the same names
        here as in `placements`; the engine wants buffers (a vocabulary map), too."""
        if self._resident:
            for name, tensor in self.engine_tensors():
                yield Placement.whole(name, tuple(tensor.shape)), tensor.detach()

    def set_attention(self, mode: AttentionMode, memory_limit: int | None = None) -> None:
        """Choose how the draft attends over context-parallel ranks, before training.

        Args:
            mode: auto takes stream where it fits into `memory_limit`, else the ring.
            memory_limit: bytes that the draft may use on a rank, for auto; None: as many as stream needs.

        Raises:
            ConfigError: an unknown mode, or a limit below 1.
        """
        if mode not in get_args(AttentionMode):
            raise ConfigError(
                "unknown draft attention", found=mode, needed=f"one of {get_args(AttentionMode)}", key="draft_attention"
            )
        if memory_limit is not None and memory_limit < 1:
            raise ConfigError(
                "bad memory limit of the draft", found=memory_limit, needed="at least 1 byte", key="memory_limit"
            )
        self.attention, self.memory_limit = mode, memory_limit

    @abstractmethod
    def build(self, shape: PolicyShape, *, dtype: torch.dtype = torch.float32, seed: int | None = None) -> None:
        """Create the parameters (and load them where a path was given). A second call changes nothing.

        Raises:
            ConfigError: the draft does not fit the policy. CheckpointError: its checkpoint is incomplete.
        """

    def init_from_policy(self, policy_head: Tensor, policy_embedding: Tensor) -> None:
        """Start what a new draft owns from the policy's own ([V, C] each), once, after `build`. Nothing by default."""
        del policy_head, policy_embedding

    def built(self) -> HasPositions:
        """The draft's settings. Raises RuntimeError before `build`."""
        raise NotImplementedError

    def check_length(self, length: int) -> None:
        """Refuse a rollout length (prompt and completion, in tokens) that the draft's positions do not cover.

        Raises:
            ConfigError: the engine would clamp positions, and the draft would be served as it was not trained.
        """
        longest = self.built().max_positions
        if length > longest:
            raise ConfigError(
                "the draft has fewer positions than a rollout is long",
                found=f"max_position_embeddings {longest}",
                needed=f"at least {length}",
                key=f"{KEY}.max_positions",
            )

    @abstractmethod
    def row_products(self) -> float:
        """Multiply-adds of one anchor's row in training, forward and backward, attention and teacher left out: what a
        pipeline's layout weighs against a layer of the policy. After `build`, with or without parameters."""

    def work(self, tokens: int, rows: int, context: int, bytes_per_element: int) -> DraftWork | None:
        """What the memory model of drafts with test-time-training passes needs to know of a micro-batch's step, after
        `build`, with parameters; None for other drafts (see `step_memory`).

        Args:
            tokens: rows of the packed micro-batch.
            rows: those of them that carry loss.
            context: ranks that split them.
            bytes_per_element: of weights and activations.
        """
        del tokens, rows, context, bytes_per_element
        return None

    def step_memory(self, tokens: int, context: int, bytes_per_element: int) -> int | None:
        """Bytes that one rank takes for a micro-batch's forward and backward, beside weights, gradients and optimiser,
        estimated from above, where `work` gives None; None where nothing is known, and the step is left out of
        estimates. Arguments as of `work`, every row carrying loss.
        """
        del tokens, context, bytes_per_element
        return None

    @abstractmethod
    def counts(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Sums of a micro-batch that become the normalisers of `forward`: float64 scalars, the same keys always."""

    @abstractmethod
    def forward(self, inputs: DraftInputs, loss: Any, totals: Mapping[str, Tensor | float]) -> DraftOutput:
        """Loss of one micro-batch.

        Args:
            loss: the draft objective (`lightning_spec.loss.draft.DraftLoss`).
            totals: `counts` summed over the optimiser step and over every rank that splits tokens.
        """

    def engine_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that the engine needs, under its checkpoint's names: the draft's state, whose modules carry them.

        Borrowed tensors are none of the state. They are never sent, as a refit would then overwrite the policy's.
        """
        self.need_parameters()
        return iter(self.state_dict().items())

    @abstractmethod
    def load_tensors(self, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
        """Take the tensors of `engine_tensors`. Raises CheckpointError on missing or surplus ones, naming them."""

    @abstractmethod
    def export(self, folder: str | Path, tensors: Iterable[tuple[str, Tensor]] | None = None) -> Path:
        """Write a checkpoint that the engine loads, and return its folder.

        Args:
            tensors: those of `engine_tensors`, for a rank that does not hold the draft itself.
        """

    @abstractmethod
    def load(self, folder: str | Path) -> None:
        """Read a checkpoint as `export` writes it into the built draft. Raises ConfigError, CheckpointError."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What must not change between a run and its resumption; plain data."""

    @abstractmethod
    def speculative_config(self, num_speculative_tokens: int) -> dict[str, Any]:
        """vLLM's `speculative_config`, without the model's folder."""

    @abstractmethod
    def propose(
        self,
        features: Tensor,
        tokens: Tensor,
        lengths: list[int],
        bonus: Tensor,
        k: int,
        *,
        policy_head: Tensor,
        policy_embedding: Tensor,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """Propose k tokens after each sequence's bonus token, exactly as the engine computes them.

        Args:
            features: [T, n*C], taps of the verified tokens of all sequences, packed; [T, C] final-normed states for a
                draft that `reads_hidden`; [T, 0] for one that reads neither.
            tokens: int64 [T], those tokens.
            lengths: verified tokens of each sequence (at least 1).
            bonus: int64 [B], the token sampled last; no taps exist for it yet.
            temperature: 0 for greedy proposals, else proposals are sampled from `softmax(logits / temperature)`.
            generator: source of randomness; needed when temperature > 0.
        """
