"""The streamed engine: trunk keys once for all passes, then chunk after chunk of anchors through all passes and back.

Given the trunk keys, every anchor's chain of passes is independent of every other anchor (SEMANTICS.md section 3). So
keys are made by the rows' owners and gathered once; anchors that carry loss are dealt to the context-parallel ranks by
equal work, wherever they live; each chunk of them runs forward, loss and backward, and is freed. Memory is flat in the
number of passes. Gradients of the keys add up in one float32 buffer, return to the owners in one reduce-scatter, and
only there go on into the projections (and, below the last layer, into pass 0 of all rows).

Tensor-parallel ranks cut each chunk once more among them, gather the states that the head reads, score all of them
against their part of the vocabulary each, and take the gradients of their own anchors back (see `tensor_ranks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_spec.attention.exchange import gather_rows, reduce_scatter_rows
from lightning_spec.draft.ahead import Ahead, fetch, wanted
from lightning_spec.draft.base import DraftInputs, DraftOutput
from lightning_spec.draft.head import head_part
from lightning_spec.draft.passes import run_passes
from lightning_spec.draft.plan import PassPlan, cut, deal, scored_rows, work_of
from lightning_spec.draft.stream_attention import ChunkView, StreamAttention
from lightning_spec.draft.stream_gradients import Gradients, HeadGradient, Lookup, formed
from lightning_spec.draft.stream_trunk import Trunk, pieces
from lightning_spec.draft.tally import Tally
from lightning_spec.draft.tensor_ranks import TensorRanks
from lightning_spec.draft.validity import pass_counts, pass_labels
from lightning_spec.loss.draft import DraftLoss
from lightning_spec.loss.heads import prepare_heads

if TYPE_CHECKING:
    from lightning_spec.draft.chained import ChainedDraft


def run_stream(draft: ChainedDraft, x: DraftInputs, loss: DraftLoss, plan: PassPlan, chunk_rows: int) -> DraftOutput:
    """Loss of a micro-batch; its gradients are formed on the way, and backward only scales them. Some row is valid, on
    some rank; every rank of the shard's and of the vocabulary's group calls.

    Args:
        x: detached inputs.
        chunk_rows: anchors at a time.
    """
    stream = _Stream(draft, x, loss, plan, chunk_rows)
    objective = formed(stream.run, stream.gradients)
    return DraftOutput(objective, stream.tally.metrics())


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Anchors that are scored together."""

    rows: Tensor
    """int64 [R], ascending, global."""
    parts: list[slice]
    """Those of each tensor-parallel rank; some may be empty."""


@dataclass(frozen=True, slots=True)
class _Passed:
    """This rank's anchors of a chunk after all their passes."""

    normed: Tensor
    """[S, H], of what they are scored on, pass by pass."""
    switches: list[Tensor]
    lookup: Lookup


class _Stream:
    """One micro-batch's run."""

    def __init__(self, draft: ChainedDraft, x: DraftInputs, loss: DraftLoss, plan: PassPlan, chunk_rows: int) -> None:
        self.draft, self.x, self.loss, self.plan, self.chunk_rows = draft, x, loss, plan, chunk_rows
        self.shard, self.ranks = x.split, TensorRanks(x.vocab)
        # Autograd would make gradients as large as these tables in every chunk.
        tables = [m.weight for m in (draft.lm_head, draft.embed_tokens) if m is not None]
        self.gradients = Gradients(draft, tables)
        self.dtype = draft.dtype
        self.device = x.tokens.device
        self.tally = Tally(draft.num_passes, plan.factor, self.device)
        self.layers = draft.built().num_layers
        self.head = head_part(draft, x)
        self.heads = prepare_heads(self.head.weight, x.policy_head, self.head.target_ids, x.vocab, dtype=self.dtype)
        self.d_head = HeadGradient(self.gradients, draft, self.head)

    def run(self) -> Tensor:
        """The loss (no graph); afterwards `gradients` and `tally` are complete."""
        trunk = Trunk(self.draft, self.x, self.gradients, self.ranks, self.chunk_rows)
        keys = trunk.keys() if self.shard is None else gather_rows(trunk.keys(), self.shard)
        d_keys = None
        if self.gradients:
            d_keys = torch.zeros_like(keys, dtype=torch.promote_types(keys.dtype, torch.float32))
        chunks, features, ahead = self._deal()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        first = 0
        for chunk in chunks:
            rows = chunk.rows[chunk.parts[self.ranks.rank]]
            # Fetched taps are those of the anchors, one after the other.
            where = rows if self.shard is None else slice(first, first + rows.numel())
            total += self._chunk(chunk, rows, features[where], ahead, keys, d_keys)
            first += rows.numel()
        self.d_head.done()
        if d_keys is not None:
            trunk.backward(d_keys if self.shard is None else reduce_scatter_rows(d_keys, self.shard))
        return total.to(torch.promote_types(self.dtype, torch.float32))

    def _deal(self) -> tuple[list[_Chunk], Tensor, Ahead]:
        """This rank's chunks, the taps (of its own anchors in them where they are fetched from context-parallel ranks,
        else of all rows), and the rows that they look ahead to."""
        if self.shard is None:
            return self._chunks((self.plan.depth > 0).nonzero().flatten()), self.x.features, Ahead(self.x, None)
        dealt = deal(self.plan.depth, self.x.positions, self.shard.size, self._fixed_work(head=True))
        every = [self._chunks(anchors) for anchors in dealt]
        ahead = Ahead(self.x, wanted(dealt, self.plan.depth, self.draft.num_passes))
        (features,) = fetch([self.x.features], [self._anchors(chunks) for chunks in every], self.shard)
        return every[self.shard.rank], features, ahead

    def _chunks(self, anchors: Tensor) -> list[_Chunk]:
        chunks = []
        for part in pieces(anchors.numel(), self.chunk_rows):
            rows = anchors[part]
            parts = [slice(0, rows.numel())]
            if self.ranks.size > 1:
                work = work_of(self.plan.depth[rows], self.x.positions[rows], self._fixed_work(head=False))
                parts = cut(work, self.ranks.size)
            chunks.append(_Chunk(rows, parts))
        return chunks

    def _anchors(self, chunks: Sequence[_Chunk]) -> Tensor:
        """int64 [A], this tensor-parallel rank's anchors in `chunks`."""
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        return torch.cat([none, *(chunk.rows[chunk.parts[self.ranks.rank]] for chunk in chunks)])

    def _chunk(
        self, chunk: _Chunk, mine: Tensor, features: Tensor, ahead: Ahead, keys: Tensor, d_keys: Tensor | None
    ) -> Tensor:
        """All passes of a chunk's anchors, forward and backward; returns their part of the loss.

        Args:
            mine: int64 [A], this rank's anchors.  features: [A, n*C], their taps.
        """
        rows, depth = chunk.rows, self.plan.depth[chunk.rows]
        scored, passes = scored_rows(depth, self.draft.num_passes)
        passed = self._passes(mine, features, ahead, keys, d_keys)
        normed, places = self._gather(chunk, scored, passed)
        weight = normed.new_tensor(self.plan.weights, dtype=torch.promote_types(normed.dtype, torch.float32))
        swept = self.loss.sweep(
            normed,
            self.head.weight.detach(),
            ahead.hidden,
            self.x.policy_head,
            weight[passes],
            self.head.target_ids,
            ahead.index(rows[scored] + 1 + passes),
            need_hidden=bool(self.gradients),
            d_head=self.d_head.rows,
            vocab=self.x.vocab,
            heads=self.heads,
            labels=pass_labels(self.x, rows[scored], passes) if self.loss.needs_labels else None,
        )
        counts = pass_counts(depth, self.draft.num_passes).tolist()
        self.tally.add(counts, scored, rows.numel(), swept.each, swept.valid, swept.agree, swept.alpha)
        if swept.d_hidden is not None and passed is not None:
            leaves = [*passed.switches, *passed.lookup.leaves]
            d_normed = swept.d_hidden if places is None else swept.d_hidden[places]
            grads = self.gradients.backward([passed.normed], [d_normed.to(normed.dtype)], leaves)
            passed.lookup.backward(grads[len(passed.switches) :])
        return swept.total

    def _passes(
        self, rows: Tensor, features: Tensor, ahead: Ahead, keys: Tensor, d_keys: Tensor | None
    ) -> _Passed | None:
        """All passes of the anchors `rows` (global); None where there are none."""
        if not rows.numel():
            return None
        draft, depth = self.draft, self.plan.depth[rows]
        view = ChunkView(rows, int(rows[0] - self.x.positions[rows[0]]), self.x.lengths)
        attention = [
            StreamAttention(view, None if d_keys is None else (d_keys[:, 2 * n], d_keys[:, 2 * n + 1]))
            for n in range(self.layers)
        ]
        lookup = Lookup(draft, self.x, self.gradients, ahead)
        with torch.set_grad_enabled(bool(self.gradients)):
            chain = draft.chain(
                self.x.positions[rows], attention, [(keys[:, 2 * n], keys[:, 2 * n + 1]) for n in range(self.layers)]
            )
            output = chain.step(draft.fuse(features), lookup(rows + 1))
            scored = run_passes(
                draft,
                chain,
                output,
                depth,
                pass_counts(depth, draft.num_passes).tolist(),
                lambda index, i: lookup(rows[index] + 1 + i),
            )
        return _Passed(scored.normed, [a.switch for a in attention], lookup)

    def _gather(self, chunk: _Chunk, scored: Tensor, passed: _Passed | None) -> tuple[Tensor, Tensor | None]:
        """The normed states [S, H] of the chunk's rows `scored` (indices into its anchors) from all tensor-parallel
        ranks, and which of them are this rank's (None: all). How many each rank sends follows from the depths."""
        if self.ranks.size == 1:
            assert passed is not None
            return passed.normed.detach(), None
        width = self.draft.built().hidden_size
        normed = self.x.hidden.new_zeros(0, width, dtype=self.dtype) if passed is None else passed.normed.detach()
        places = [((scored >= part.start) & (scored < part.stop)).nonzero().flatten() for part in chunk.parts]
        most = max(place.numel() for place in places)
        every = self.ranks.stack(normed, most)
        whole = torch.empty(scored.numel(), width, dtype=self.dtype, device=self.device)
        for rank, place in enumerate(places):
            whole[place] = every[rank * most : rank * most + place.numel()]
        return whole, places[self.ranks.rank]

    def _fixed_work(self, head: bool) -> float:
        """Work of a row in one pass apart from attention, in keys attended to (multiply-adds, forward and backward).

        Args:
            head: with that of the head, which tensor-parallel ranks have in equal parts, however they cut the rows.
        """
        config = self.draft.built()
        work = sum(p.numel() for layer in self.draft.decoder_layers() for p in layer.parameters())
        if head:
            work += config.draft_vocab_size * config.hidden_size
        return 3 * work / (7 * config.num_layers * config.num_heads * config.head_dim)
