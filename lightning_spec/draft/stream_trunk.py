"""Trunk keys and values of the streamed engine: made once by the ranks that hold the rows, before any chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_spec.draft.ahead import Ahead
from lightning_spec.draft.attention import LocalAttention, PassAttention, RingAttention
from lightning_spec.draft.base import DraftInputs
from lightning_spec.draft.stream_gradients import Gradients, Lookup
from lightning_spec.draft.tensor_ranks import TensorRanks

if TYPE_CHECKING:
    from lightning_spec.draft.chained import ChainedDraft


class Trunk:
    """Trunk keys and values of the rows held here.

    A draft of one layer makes them from the policy's states alone: row by row, so the tensor-parallel ranks make a part
    of the rows each, in pieces, and once more for the backward, which is cheaper than to keep what it needs.

    Later layers read pass 0 of the layer before at all rows: its graph is kept. Each tensor-parallel rank runs that
    pass on all rows and sends the gradients of its part of the keys alone into the backward. Gradients are linear in
    them, so the shares add up to the whole, and no message is needed inside the layers.
    """

    def __init__(
        self, draft: ChainedDraft, x: DraftInputs, gradients: Gradients, ranks: TensorRanks, chunk_rows: int
    ) -> None:
        self.draft, self.x, self.gradients, self.ranks, self.chunk_rows = draft, x, gradients, ranks, chunk_rows
        self.layers = draft.built().num_layers
        self.keep = self.layers > 1
        shard, total, device = x.split, x.tokens.numel(), x.tokens.device
        self.rows = torch.arange(total, device=device)
        self.attention: PassAttention = LocalAttention(x.lengths)
        self.ahead = Ahead(x, None)
        if shard is not None:
            self.rows = shard.rows.to(device)
            self.attention = RingAttention(shard)
            if draft.embed_tokens is None:
                held = [shard.layout.rows(rank).to(device) for rank in range(shard.size)]
                if not self.keep:
                    held = [rows[ranks.cut(rows.numel())] for rows in held]
                following = [(rows + 1).clamp(max=total - 1).unique() for rows in held]
                self.ahead = Ahead(x, following, teachers=False)
        self.mine = ranks.cut(self.rows.numel())
        self._kept: list[tuple[list[Tensor], Lookup]] = []

    def keys(self) -> Tensor:
        """[T_r, 2 * layers, K, D]: k and v of layer 0, then of layer 1, ..."""
        config = self.draft.built()
        parts = self._parts()
        first, count = parts[0].start if parts else 0, sum(part.stop - part.start for part in parts)
        shape = (count, 2 * config.num_layers, config.num_kv_heads, config.head_dim)
        keys = torch.empty(shape, dtype=self.draft.dtype, device=self.rows.device)
        for part in parts:
            with torch.set_grad_enabled(self.keep and bool(self.gradients)):
                made, lookup = self._make(part)
            for n, tensor in enumerate(made):
                keys[part.start - first : part.stop - first, n] = tensor.detach()
            if self.keep:
                self._kept.append((made, lookup))
        return keys if self.keep else self.ranks.gather(keys, self.rows.numel())

    def backward(self, d_keys: Tensor) -> None:
        """Gradients of `keys`, [T_r, 2 * layers, K, D], summed over context-parallel ranks; made here they are summed
        over the tensor-parallel ones."""
        mine = self.ranks.reduce_scatter(d_keys)
        first = self.mine.start
        if self.keep:
            # Of all rows, zero where another rank sends the gradient back.
            whole = d_keys if self.ranks.size == 1 else torch.zeros_like(d_keys)
            whole[self.mine] = mine
            mine, first = whole, 0
        for part in self._parts():
            if self.keep:
                made, lookup = self._kept.pop()
            else:
                with torch.enable_grad():
                    made, lookup = self._make(part)
            rows = slice(part.start - first, part.stop - first)
            grads = [mine[rows, n].to(tensor.dtype) for n, tensor in enumerate(made)]
            lookup.backward(self.gradients.backward(made, grads, lookup.leaves))

    def _parts(self) -> list[slice]:
        """Pieces of the rows that are made here, all at once where their graph is kept."""
        if self.keep:
            return [slice(0, self.rows.numel())]
        first, last = self.mine.start, self.mine.stop
        return [slice(first + p.start, first + p.stop) for p in pieces(last - first, self.chunk_rows)]

    def _make(self, part: slice) -> tuple[list[Tensor], Lookup]:
        lookup, rows = Lookup(self.draft, self.x, self.gradients, self.ahead), self.rows[part]
        chain = self.draft.chain(self.x.positions[rows], [self.attention] * self.layers)
        chain.keys(self.draft.fuse(self.x.features[part]), lookup(rows + 1))
        return [tensor for pair in chain.trunk_keys for tensor in pair], lookup


def pieces(count: int, size: int) -> list[slice]:
    """range(count) cut into the fewest even pieces of at most `size`."""
    number = -(-count // size)
    return [slice(count * n // number, count * (n + 1) // number) for n in range(number)]
