"""The passes of a draft over one packed batch: the trunk is made in pass 0, each later pass adds to the branch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_spec.attention.branch import branch_attention
from lightning_spec.attention.rope import RotaryEmbedding, apply_rotary
from lightning_spec.draft.layers import DecoderLayer


class PassChain:
    """Passes 0, 1, ... in the anchor frame: row t stays row t, and pass i stands at position t + i.

    Every layer's trunk holds its keys of pass 0 for all rows; layers after the first make them from pass-0 states of
    the layer before, as the engine's cache does. The branch of a row holds the keys that the row itself made later.

    Args:
        layers: the draft's layers.
        positions: int64 [T]. lengths: rows of each document.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], rope: RotaryEmbedding, positions: Tensor, lengths: Sequence[int]
    ) -> None:
        self.layers, self.rope, self.positions, self.lengths = layers, rope, positions, list(lengths)
        self.rows = torch.arange(positions.numel(), device=positions.device)
        self.passes = 0
        self.trunk_k: list[Tensor] = []
        self.trunk_v: list[Tensor] = []
        self.branch_k: list[list[Tensor]] = [[] for _ in layers]
        self.branch_v: list[list[Tensor]] = [[] for _ in layers]

    def trunk(self, hidden: Tensor, embedding: Tensor, rows: Tensor) -> Tensor:
        """Pass 0.

        Args:
            hidden, embedding: [T, H], fc's output and the embedding of the next token, of every row.
            rows: int64 [R], ascending: the rows that go on.

        Returns:
            [R, H], the last layer's output at `rows`. The layers before it run on all rows, since their outputs are
            the trunk of the next layer; the last one needs all rows' keys only.
        """
        everything = rows.numel() == self.positions.numel()
        cos, sin = self.rope.cos_sin(self.positions, hidden.dtype)
        x = hidden
        for number, layer in enumerate(self.layers):
            attention = layer.self_attn
            c, residual = layer.enter(x, embedding)
            k, v = apply_rotary(attention.key(c), cos, sin), attention.value(c)
            self.trunk_k.append(k)
            self.trunk_v.append(v)
            select = None
            if number == len(self.layers) - 1 and not everything:
                select, c, residual, cos, sin = rows, c[rows], residual[rows], cos[rows], sin[rows]
            q = apply_rotary(attention.query(c), cos, sin)
            x = layer.leave(branch_attention(q, k, v, [], [], self.lengths, rows=select), residual)
        self.rows = rows
        self.passes = 1
        return x

    def branch(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """The next pass on the current rows: [R, H] recycled hidden and [R, H] input embedding to [R, H]."""
        cos, sin = self.rope.cos_sin(self.positions[self.rows] + self.passes, hidden.dtype)
        select = None if self.rows.numel() == self.positions.numel() else self.rows
        x = hidden
        for number, layer in enumerate(self.layers):
            attention = layer.self_attn
            c, residual = layer.enter(x, embedding)
            keys, values = self.branch_k[number], self.branch_v[number]
            keys.append(apply_rotary(attention.key(c), cos, sin))
            values.append(attention.value(c))
            q = apply_rotary(attention.query(c), cos, sin)
            attended = branch_attention(
                q, self.trunk_k[number], self.trunk_v[number], keys, values, self.lengths, rows=select
            )
            x = layer.leave(attended, residual)
        self.passes += 1
        return x

    def keep(self, index: Tensor) -> None:
        """Go on with `rows[index]` only (copies the branch: worth it when many rows have ended)."""
        self.rows = self.rows[index]
        self.branch_k = [[k[index] for k in keys] for keys in self.branch_k]
        self.branch_v = [[v[index] for v in values] for values in self.branch_v]
