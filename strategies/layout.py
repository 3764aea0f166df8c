"""How many of the policy's layers each pipeline stage gets, so that stages take equal time.

A count of multiply-adds, as fine as a choice between whole layers needs: what a row costs in a layer, in the head with
the policy's loss, and in the draft's passes with theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_spec.errors import ConfigError
from lightning_spec.parallel.groups import ParallelSizes, strategy_key
from lightning_spec.shapes import PolicyShape

PipelineLayout = Sequence[int] | Literal["auto"] | None
"""Layers of each virtual stage in order; `auto` balances them; None: as many on each."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """Multiply-adds of one row, forward and backward, each product counted once."""

    layer: float
    """One layer of the policy (the mean, where they differ)."""
    head: float
    """The policy's log-probs: forward, formed again in backward, and two products for gradients."""
    draft: float
    """All passes of the draft and their loss."""

    @classmethod
    def of(cls, shape: PolicyShape, draft: Any | None, *, trains_policy: bool, recompute: bool) -> RowCost:
        """
        Args:
            draft: a built draft that is trained, or None.
            recompute: each layer's forward runs twice.
        """
        times = (4 if recompute else 3) if trains_policy else 1
        table = shape.vocab_size * shape.hidden_size
        return cls(
            layer=times * _layer_products(shape),
            head=4 * table if trains_policy else 0,
            draft=0 if draft is None else draft.row_products() + table,  # and the teacher's logits
        )

    @property
    def lead(self) -> float:
        """A layer's backward in draft steps."""
        return self.layer * 2 / 3 / self.draft if self.draft else 0.0


def _layer_products(shape: PolicyShape) -> float:
    """Multiply-adds of a row in one layer's projections, the mean over layers; attention itself is left out."""
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    inner = sum(shape.mlp_width(layer) for layer in range(shape.num_layers)) / shape.num_layers
    return shape.hidden_size * (attention + 3 * inner)


def resolve_layout(
    layout: PipelineLayout, layers: int, sizes: ParallelSizes, last_extra: float
) -> Sequence[int] | None:
    """The layout with `auto` decided; whether it fits the policy is checked where the policy is built.

    Args:
        last_extra: what the last virtual stage does besides its layers, in layers.
    """
    if layout == "auto":
        return balanced(layers, sizes.stages, last_extra)
    if isinstance(layout, str):
        raise ConfigError(
            "unknown pipeline layout",
            found=layout,
            needed="auto, a list of layers for each virtual stage, or null",
            key=strategy_key("pipeline_layout"),
        )
    return layout


def balanced(layers: int, stages: int, last_extra: float) -> list[int]:
    """Whole layers for each stage, at least one, so that the slowest is as fast as can be.

    Layers go one by one to the stage that has least to do; among equals to the earlier one, which waits least.

    Raises:
        ConfigError: fewer layers than stages.
    """
    if layers < stages:
        raise ConfigError(
            "more pipeline stages than layers",
            found=f"{stages} virtual stages, {layers} layers",
            needed=f"at most {layers}",
            key=strategy_key("pipeline_parallel"),
        )
    counts = [1] * stages
    for _ in range(layers - stages):
        cost = [count + (last_extra if stage == stages - 1 else 0.0) for stage, count in enumerate(counts)]
        counts[cost.index(min(cost))] += 1
    return counts
