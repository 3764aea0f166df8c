"""What drafts that recycle their own states share: test-time-training passes in the anchor frame (SEMANTICS.md 1)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lightning_spec.attention.cost import DraftWork
from lightning_spec.attention.rope import RotaryEmbedding
from lightning_spec.batch import PackedBatch
from lightning_spec.draft.ahead import Ahead
from lightning_spec.draft.attention import PassAttention
from lightning_spec.draft.base import Draft, DraftInputs, DraftOutput
from lightning_spec.draft.chain import PassChain
from lightning_spec.draft.config import KEY
from lightning_spec.draft.full import run_full
from lightning_spec.draft.layers import Linear, PassLayer
from lightning_spec.draft.mode import pass_attention, resolve_mode
from lightning_spec.draft.plan import make_plan
from lightning_spec.draft.propose import propose
from lightning_spec.draft.resolve import resolve_pass_weights
from lightning_spec.draft.stream import run_stream
from lightning_spec.draft.tally import Tally, nothing
from lightning_spec.draft.validity import pass_counts, pass_depth
from lightning_spec.errors import ConfigError

Recycle = Literal["full", "detach"]
Weighting = Literal["uniform", "decay", "acceptance"]

_CHUNK = 7168
"""Rows times passes of a chunk of the streamed engine: large enough for full speed on a CPU core at hidden size 256."""


class ChainedConfig(Protocol):
    """What the engines of the passes need to know of a draft."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...


class ChainedDraft(Draft):
    """A draft of few decoder layers, run N times on states that it made itself in the pass before.

    Args:
        num_passes: N, training passes (proposals deep that the draft is trained for).
        recycle: whether gradients flow through the recycled state from pass to pass.
        pass_weights: uniform (1), decay (0.8^i), acceptance (measured by the engine, see `set_acceptance`), or a list.
        rows_per_step: about how many rows of a step carry draft loss; None: all.
        chunk_rows: anchors that the streamed engine takes through all passes at a time; 7168 / num_passes by default.
    """

    rope: RotaryEmbedding
    """Made by `build`, as are the modules."""
    lm_head: Linear | None
    """A head of its own; None: it borrows the policy's, detached."""
    embed_tokens: Linear | None
    blank_first = False
    """Whether the input embedding of position 0 is zero."""

    def __init__(
        self,
        num_passes: int,
        recycle: Recycle,
        pass_weights: Weighting | list[float],
        rows_per_step: int | None,
        chunk_rows: int | None,
    ) -> None:
        super().__init__()
        if num_passes < 1:
            raise ConfigError("no passes", found=num_passes, needed="at least 1", key=f"{KEY}.num_passes")
        if recycle not in ("full", "detach"):
            raise ConfigError("bad recycle", found=recycle, needed="full or detach", key=f"{KEY}.recycle")
        for name, rows in (("rows_per_step", rows_per_step), ("chunk_rows", chunk_rows)):
            if rows is not None and rows < 1:
                raise ConfigError(f"bad {name}", found=rows, needed="at least 1 row", key=f"{KEY}.{name}")
        self.rows_per_step, self.chunk_rows = rows_per_step, chunk_rows or max(1, _CHUNK // num_passes)
        self.num_passes, self.recycle = num_passes, recycle
        self.pass_weights = resolve_pass_weights(pass_weights, num_passes)
        self.follows_acceptance = pass_weights == "acceptance"

    # ---- what a draft of this kind is -------------------------------------------------------------------------------

    @abstractmethod
    def built(self) -> ChainedConfig:
        """The settings. Raises RuntimeError before `build`."""

    @abstractmethod
    def decoder_layers(self) -> Sequence[PassLayer]:
        """In order; the first one reads the input embedding too."""

    @abstractmethod
    def normed(self, output: Tensor) -> Tensor:
        """[R, H], what the head reads, from the last layer's output."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """[T, X] of the policy's states to [T, H], the hidden that pass 0 reads."""

    @abstractmethod
    def fuse_products(self) -> int:
        """Multiply-adds of `fuse` in one row."""

    @abstractmethod
    def states_read(self) -> int:
        """Policy states of a row that `fuse` reads, each of the policy's width."""

    @abstractmethod
    def recycled(self, output: Tensor, normed: Tensor) -> Tensor:
        """The next pass's hidden, from the last layer's output before and after the final norm."""

    def read(self, inputs: DraftInputs) -> DraftInputs:
        """The inputs with what `fuse` reads as `features`."""
        return inputs

    def target_ids(self) -> Tensor | None:
        """int64 [Vd], or None when the draft has the policy's vocabulary."""
        return None

    # ---- training ---------------------------------------------------------------------------------------------------

    def set_acceptance(self, by_position: Sequence[float]) -> None:
        """With `pass_weights: acceptance`: weigh pass i by the measured chance that serving gets there.

        Args:
            by_position: share of drafts whose proposal at each position was accepted (a running product, as
                `SpecStats.acceptance_by_position`); equal on every rank. Beyond its end the last rate continues.
        """
        if not self.follows_acceptance or not by_position:
            return
        weights = [1.0]
        for reached in by_position:
            weights.append(min(max(float(reached), 0.0), weights[-1]))
        rate = weights[-1] / weights[-2] if weights[-2] > 0 else 0.0
        while len(weights) < self.num_passes:
            weights.append(weights[-1] * rate)
        self.pass_weights = tuple(weights[: self.num_passes])

    def row_products(self) -> float:
        config = self.built()
        layers = sum(p.numel() for layer in self.decoder_layers() for p in layer.parameters())
        # Forward and the gradient of the states; the head's own gradient only where it is the draft's.
        head = (2 if self.lm_head is None else 3) * config.draft_vocab_size * config.hidden_size
        return 3 * self.fuse_products() + self.num_passes * (3 * layers + head)

    def work(self, tokens: int, rows: int, context: int, bytes_per_element: int) -> DraftWork:
        """A micro-batch of `tokens` rows over `context` ranks, of which `rows` carry loss, as the memory model sees it.
        After `build`, with or without parameters."""
        config = self.built()
        return DraftWork(
            tokens=tokens,
            context=context,
            passes=self.num_passes,
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocabulary=config.draft_vocab_size,
            taps=self.states_read(),
            bytes_per_element=bytes_per_element,
            rows=rows,
            chunk_rows=self.chunk_rows,
        )

    def counts(self, batch: PackedBatch) -> dict[str, Tensor]:
        depth = self._depth(batch)
        counts = pass_counts(depth, self.num_passes).to(torch.float64)
        return {f"draft_pass_{i}": counts[i] for i in range(self.num_passes)}

    def forward(self, inputs: DraftInputs, loss: Any, totals: Mapping[str, Tensor | float]) -> DraftOutput:
        self.need_parameters()
        x = self.read(inputs.detached())
        plan = make_plan(self._depth(x), self.pass_weights, totals, self.rows_per_step, x.seed)
        if not plan.sizes[0]:  # on every rank alike
            tally = Tally(self.num_passes, 1.0, x.hidden.device)
            return DraftOutput(nothing(self.parameters(), x.hidden), tally.metrics())
        mode = resolve_mode(self, x, plan)
        if mode == "stream":
            return run_stream(self, x, loss, plan, self.chunk_rows)
        return run_full(self, x, loss, plan, pass_attention(self.built(), x, mode))

    def _depth(self, batch: DraftInputs | PackedBatch) -> Tensor:
        longest = self.built().max_positions
        return pass_depth(batch.positions, batch.sampled, batch.stop, self.num_passes, longest)

    def chain(
        self,
        positions: Tensor,
        attention: Sequence[PassAttention],
        trunk: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> PassChain:
        return PassChain(self.decoder_layers(), self.rope, positions, attention, trunk, self.blank_first)

    def embed(self, ahead: Ahead, index: Tensor) -> Tensor:
        """[R, H], input embeddings of the tokens at `index` of `ahead`."""
        if self.embed_tokens is None:
            return ahead.embeddings[index].to(self.dtype)
        return nn.functional.embedding(ahead.tokens[index], self.embed_tokens.weight)

    # ---- serving ----------------------------------------------------------------------------------------------------

    propose = propose
