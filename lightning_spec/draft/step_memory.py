"""Memory of one training step of the drafts that are no chain of passes: arithmetic, as `attention/cost.py` does for
those that are. What a forward and backward of one micro-batch takes beside weights, optimiser state and the policy's
own activations, on one rank; tests compare it with measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_spec.attention.cost import LOSS_CHUNK, WIDE
from lightning_spec.draft.block_config import BlockConfig
from lightning_spec.shapes import PolicyShape

_SCORES = 4 << 20
"""Bytes of one tile of attention's scores on a CPU."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What decoder layers keep of a row follows from these, in elements."""

    hidden: int
    queries: int
    """heads * head_dim."""
    keys: int
    """2 * kv_heads * head_dim: K and V."""
    intermediate: int
    heads: int
    qk_norm: bool = False

    @classmethod
    def of(cls, config: BlockConfig | PolicyShape, qk_norm: bool) -> LayerSizes:
        return cls(
            hidden=config.hidden_size,
            queries=config.num_heads * config.head_dim,
            keys=2 * config.num_kv_heads * config.head_dim,
            intermediate=config.intermediate_size,
            heads=config.num_heads,
            qk_norm=qk_norm,
        )

    @property
    def mlp_backward(self) -> int:
        """Elements that the MLP's backward takes of a row before it frees what the forward had kept."""
        return 2 * self.intermediate

    @property
    def kept(self) -> int:
        """Elements that a layer keeps of a row for its backward: norms, q, K/V (before and after their norm and
        rotation), attention's output, residuals, the gated MLP."""
        q = self.queries * (4 if self.qk_norm else 3)
        kv = self.keys * 2 if self.qk_norm else self.keys + self.keys // 2
        return 4 * self.hidden + q + kv + 4 * self.intermediate


def block_step(
    sizes: LayerSizes,
    *,
    layers: int,
    rows: int,
    slots: int,
    scored: float,
    trunk_piece: int,
    vocabulary: int,
    parameters: int,
    bytes_per_element: int,
) -> int:
    """Bytes of a block drafter's step (`block_run.py`).

    Args:
        rows: of the trunk, on this rank.
        slots: of the blocks that one chunk runs: at most `token_budget`.
        scored: share of a block's slots that carry loss.
        trunk_piece: rows of the trunk that are made at a time; what they keep stays where that is all of them.
        vocabulary: of this rank's part of the head.
        parameters: elements of the draft.
    """
    b, wide = bytes_per_element, max(bytes_per_element, WIDE)
    trunk = rows * layers * sizes.keys
    fused = 2 * sizes.hidden + layers * sizes.keys * 2
    made = rows * fused * b if rows <= trunk_piece else 0
    always = trunk * (b + wide) + made + parameters * wide
    chunk = slots * layers * (sizes.kept * b + sizes.heads * WIDE)
    chunk += int(slots * scored) * sizes.hidden * (2 * b + wide)
    mlp = 3 * sizes.intermediate * sizes.hidden * b
    return always + max(
        chunk + _loss(vocabulary, sizes.hidden, int(slots * scored), b),
        chunk + sizes.mlp_backward * slots * b + mlp,
        # By then what the MLP had kept is gone.
        chunk
        + mlp
        + rows * sizes.keys * wide
        + _scores(slots * sizes.heads, rows)
        - 4 * sizes.intermediate * slots * b,
        parameters * b + trunk * wide,
    )


def model_step(
    sizes: LayerSizes,
    *,
    layers: int,
    rows: int,
    vocabulary: int,
    parameters: int,
    recompute: bool,
    bytes_per_element: int,
) -> int:
    """Bytes of a small language model's step (`lm_run.py`): all layers of all rows, or with `recompute` their inputs
    and one layer at a time.

    Args:
        rows: of the micro-batch, on this rank; all are taken to be scored.
        vocabulary: of this rank's part of the head.
        parameters: elements of the draft.
    """
    b, wide = bytes_per_element, max(bytes_per_element, WIDE)
    layer = rows * (sizes.kept * b + sizes.heads * WIDE)
    held = layers * rows * sizes.hidden * b if recompute else layers * layer
    again = layer if recompute else 0
    ends = rows * sizes.hidden * (2 * b + wide)
    head = vocabulary * sizes.hidden * wide
    mlp = 3 * sizes.intermediate * sizes.hidden * b
    return max(
        held + ends + head + _loss(vocabulary, sizes.hidden, rows, b),
        held + again + head + sizes.mlp_backward * rows * b + mlp,
        held + again + head + mlp + _scores(rows * sizes.heads, rows) - 4 * sizes.intermediate * rows * b,
        parameters * b + again,
    )


def _loss(vocabulary: int, hidden: int, rows: int, b: int) -> int:
    """Three chunks of logits, and both heads in float32 where they are not."""
    chunk = min(max(LOSS_CHUNK, 16 * vocabulary * WIDE), rows * vocabulary * WIDE)
    return 3 * chunk + (2 * vocabulary * hidden * WIDE if b < WIDE else 0)


def _scores(rows: int, keys: int) -> int:
    """Attention's scores in its backward, on a CPU: tiles of so many elements."""
    return 3 * min(_SCORES, rows * keys * WIDE)
