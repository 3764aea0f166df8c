"""The passes of a draft over one packed batch: the trunk is made in pass 0, each later pass adds to the branch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_spec.attention.rope import RotaryEmbedding, apply_rotary
from lightning_spec.draft.attention import PassAttention
from lightning_spec.draft.layers import PassLayer


class PassChain:
    """Passes 0, 1, ... in the anchor frame: row t stays row t, and pass i stands at position t + i.

    Every layer's trunk holds its keys of pass 0 for all rows; layers after the first make them from pass-0 states of
    the layer before, as the engine's cache does. The branch of a row holds the keys that the row itself made later.

    Args:
        layers: the draft's layers.
        positions: int64 [T], positions inside the documents of the rows that take part.
        attention: of each layer; it knows where the rows stand and which keys they see.
        trunk: (k, v) of each layer where they were made before, by `keys` of another chain.
        blank_first: the input embedding that stands at position 0, of pass 0, is zero.
    """

    def __init__(
        self,
        layers: Sequence[PassLayer],
        rope: RotaryEmbedding,
        positions: Tensor,
        attention: Sequence[PassAttention],
        trunk: Sequence[tuple[Tensor, Tensor]] = (),
        blank_first: bool = False,
    ) -> None:
        self.blank_first = blank_first
        self.layers, self.rope, self.positions, self.attention = layers, rope, positions, attention
        self.rows = torch.arange(positions.numel(), device=positions.device)
        self.passes = 0
        self.trunk_keys = list(trunk)
        self.branch_k: list[list[Tensor]] = [[] for _ in layers]
        self.branch_v: list[list[Tensor]] = [[] for _ in layers]

    def trunk(self, hidden: Tensor, embedding: Tensor, rows: Tensor) -> Tensor:
        """Pass 0, and the trunk of every layer.

        Args:
            hidden, embedding: [T, H], fc's output and the embedding of the next token, of every row.
            rows: int64 [R], ascending: the rows that go on.

        Returns:
            [R, H], the last layer's output at `rows`. The layers before it run on all rows, since their outputs are
            the trunk of the next layer; the last one needs all rows' keys only.
        """
        c, residual = self.keys(hidden, embedding)
        self.rows = rows
        if rows.numel() != self.positions.numel():
            c, residual = c[rows], residual[rows]
        cos, sin = self.rope.cos_sin(self.positions[rows], hidden.dtype)
        layer, (k, v) = self.layers[-1], self.trunk_keys[-1]
        q = apply_rotary(layer.self_attn.query(c), cos, sin)
        self.passes = 1
        return layer.leave(self.attention[-1](q, k, v, (), (), rows), residual)

    def keys(self, hidden: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """The trunk of every layer, into `trunk_keys`; returns what the last layer's attention reads
        (`PassLayer.enter`) at every row. Arguments as in `trunk`."""
        cos, sin = self.rope.cos_sin(self.positions, hidden.dtype)
        embedding = self._blanked(embedding, self.positions)
        for layer, attend in zip(self.layers, self.attention, strict=True):
            attention = layer.self_attn
            c, residual = layer.enter(hidden, embedding)
            k, v = apply_rotary(attention.key(c), cos, sin), attention.value(c)
            self.trunk_keys.append((k, v))
            if layer is not self.layers[-1]:
                q = apply_rotary(attention.query(c), cos, sin)
                hidden = layer.leave(attend(q, k, v, (), (), None), residual)
        return c, residual

    def step(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """The next pass on the current rows, given the trunk: [R, H] recycled hidden (of pass 0: fc's output) and
        [R, H] input embedding to [R, H]."""
        cos, sin = self.rope.cos_sin(self.positions[self.rows] + self.passes, hidden.dtype)
        embedding = self._blanked(embedding, self.positions[self.rows] + self.passes)
        for number, layer in enumerate(self.layers):
            attention = layer.self_attn
            c, residual = layer.enter(hidden, embedding)
            keys, values = self.branch_k[number], self.branch_v[number]
            if self.passes:
                keys.append(apply_rotary(attention.key(c), cos, sin))
                values.append(attention.value(c))
            q = apply_rotary(attention.query(c), cos, sin)
            attended = self.attention[number](q, *self.trunk_keys[number], keys, values, self.rows)
            hidden = layer.leave(attended, residual)
        self.passes += 1
        return hidden

    def _blanked(self, embedding: Tensor, positions: Tensor) -> Tensor:
        return embedding.masked_fill((positions == 0)[:, None], 0.0) if self.blank_first else embedding

    def keep(self, index: Tensor) -> None:
        """Go on with `rows[index]` only (copies the branch: worth it when many rows have ended)."""
        self.rows = self.rows[index]
        self.branch_k = [[k[index] for k in keys] for keys in self.branch_k]
        self.branch_v = [[v[index] for v in values] for values in self.branch_v]
