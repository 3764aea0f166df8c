"""One training run of a block drafter over a micro-batch: trunk keys once, then chunk after chunk of anchors and back.

Trunk keys are made of the policy's states alone, so given them every block is independent of every other one. A chunk
of blocks runs forward, loss and backward and is freed; gradients of the keys add up and go into the projections last.
So memory does not grow with the number of anchors, and nothing is computed twice but the trunk of long micro-batches.

Context-parallel ranks hold the trunk in parts and are dealt the anchors by equal work, wherever those live; queries
move to the keys, or keys around the ring (`attention/block.py`), in as many chunks on every rank. Tensor-parallel ranks
make the same trunk, divide each chunk's anchors, gather the states that the head reads, score all of them against their
part of the vocabulary each, and take the gradients of their own anchors back (see `tensor_ranks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lightning_spec.attention.block import block_attention, moved_block_attention, ring_block_attention
from lightning_spec.attention.kernels import accumulation_dtype
from lightning_spec.draft.ahead import Ahead, wanted
from lightning_spec.draft.anchors import Anchors
from lightning_spec.draft.base import DraftInputs, DraftMetrics, DraftOutput
from lightning_spec.draft.block_trunk import Trunk
from lightning_spec.draft.plan import cut, scored_rows
from lightning_spec.draft.stream_gradients import Gradients, formed
from lightning_spec.draft.tally import Tally
from lightning_spec.draft.tensor_ranks import TensorRanks
from lightning_spec.draft.validity import pass_counts
from lightning_spec.loss.draft import DraftLoss

if TYPE_CHECKING:
    from lightning_spec.draft.block import BlockDraft


class MoreLoss(Protocol):
    """A part of the objective beside the draft loss, over one micro-batch."""

    def __call__(self, normed: Tensor, markov: Tensor | None, alpha: Tensor, weight: Tensor) -> Tensor:
        """Scalar; of the states [R, H] that the head reads, the Markov embeddings [R, r] before the slots, sum min(p,
        q) [R] and the row weights [R]."""

    def metrics(self) -> DraftMetrics:
        """Of all calls."""


def run_blocks(
    draft: BlockDraft, x: DraftInputs, loss: DraftLoss, anchors: Anchors, totals: Mapping[str, Tensor | float]
) -> DraftOutput:
    """Loss of a micro-batch; its gradients are formed on the way, and backward only scales them. Some anchor is there,
    on some rank; every rank of the shard's and of the vocabulary's group calls.

    Args:
        x: detached inputs.
        totals: anchors that slot s is scored at in the whole step under "draft_slot_<s>".
    """
    run = _Run(draft, x, loss, anchors, totals)
    objective = formed(run.run, run.gradients)
    more = {} if run.more is None else run.more.metrics()
    return DraftOutput(objective, run.tally.metrics() | more)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Anchors that are scored together, on the CPU."""

    rows: Tensor
    """int64 [A], ascending, global."""
    depth: Tensor
    """int64 [A]."""
    part: slice
    """Those of this tensor-parallel rank."""
    everyone: list[Tensor]
    """The anchors of the ranks of this rank's context-parallel group, which attend in this chunk together."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """What a chunk is scored on, slot by slot."""

    index: Tensor
    """int64 [R], places in the chunk's anchors."""
    slots: Tensor
    """int64 [R]."""
    rows: Tensor
    """int64 [R], global: those of the teachers; the labels stand one row further."""
    mine: Tensor
    """int64 [R_own], which of them are of this tensor-parallel rank's anchors."""


class _Run:
    """One micro-batch's run."""

    def __init__(
        self, draft: BlockDraft, x: DraftInputs, loss: DraftLoss, anchors: Anchors, totals: Mapping[str, Tensor | float]
    ) -> None:
        self.draft, self.x, self.loss, self.anchors = draft, x, loss, anchors
        self.config, self.shard, self.ranks = draft.built(), x.split, TensorRanks(x.vocab)
        self.gradients = Gradients(draft)
        self.device = x.tokens.device
        self.tally = Tally(anchors.slots, 1.0, self.device)
        self.more = draft.more_loss()
        counts = [float(totals[f"draft_slot_{s}"]) for s in range(anchors.slots)]
        self.scale = torch.tensor([1 / n if n else 0.0 for n in counts], dtype=torch.float64, device=self.device)
        self.mask = _mask_embedding(draft, x)
        needed = self.config.vocab_size if x.vocab is None else x.vocab.rows
        if x.policy_head.shape[0] != needed:
            raise ValueError(f"policy_head has {x.policy_head.shape[0]} rows, this rank's vocabulary {needed}")

    def run(self) -> Tensor:
        """The loss (no graph); afterwards `gradients`, `tally` and `more` are complete."""
        held = torch.arange(self.x.tokens.numel()) if self.shard is None else self.shard.rows
        positions = self.x.positions[held.to(self.device)]
        trunk = Trunk(self.draft, self.x.features, positions, self.gradients, self.draft.token_budget)
        keys = trunk.keys()
        grads = [torch.zeros_like(key, dtype=accumulation_dtype(key.dtype)) for key in keys] if self.gradients else []
        chunks, ahead = self._deal()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for chunk in chunks:
            total += self._chunk(chunk, ahead, keys, grads)
        if self.gradients:
            trunk.backward(grads)
        return total.to(accumulation_dtype(self.draft.dtype))

    # ---- who computes what ------------------------------------------------------------------------------------------

    def _deal(self) -> tuple[list[_Chunk], Ahead]:
        """This rank's chunks, as many on every rank (some may be empty), and the policy's rows that they read."""
        rows, depth = self.anchors.rows, self.anchors.depth
        size = 1 if self.shard is None else self.shard.size
        per = max(1, self.draft.token_budget // self.config.block_size)
        dealt = cut(self._work(), size)
        longest = max(part.stop - part.start for part in dealt)
        mine, chunks = 0 if self.shard is None else self.shard.rank, []
        for first in range(0, longest, per):
            together = [rows[part][first : first + per] for part in dealt]
            own = together[mine]
            everyone = [some[self.ranks.cut(some.numel())] for some in together]
            chunks.append(_Chunk(own, depth[dealt[mine]][first : first + per], self.ranks.cut(own.numel()), everyone))
        if self.shard is None:
            return chunks, Ahead(self.x, None)
        # In the frame of `wanted` the row before the anchor reads depth rows ahead: the anchor's own and the teachers.
        reads = torch.zeros(self.x.tokens.numel(), dtype=torch.int64, device=self.device)
        reads[(rows - 1).to(self.device)] = depth.to(self.device)
        before = [(rows[part] - 1).to(self.device) for part in dealt]
        return chunks, Ahead(self.x, wanted(before, reads, self.anchors.slots))

    def _work(self) -> Tensor:
        """float64 [A], about the multiply-adds of each anchor's block, forward and backward. Whole numbers, so that all
        ranks cut alike."""
        config = self.config
        layers = sum(p.numel() for p in self.draft.layers.parameters())
        work = 3.0 * config.block_size * layers + 2.0 * config.vocab_size * config.hidden_size * self.anchors.depth
        if self.draft.attention == "ring":  # else keys are attended to where they lie
            seen = self.x.positions.cpu()[self.anchors.rows]
            for window in config.windows:
                keys = seen if window is None else seen.clamp(max=window)
                work = work + 7.0 * config.block_size * config.num_heads * config.head_dim * keys
        return work.double()

    # ---- one chunk --------------------------------------------------------------------------------------------------

    def _chunk(self, chunk: _Chunk, ahead: Ahead, keys: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
        """Forward, loss and backward of a chunk's blocks; returns their part of the loss."""
        scored = self._scored(chunk)
        leaves = [key.requires_grad_() if self.gradients else key for key in map(Tensor.detach, keys)]
        with torch.set_grad_enabled(bool(self.gradients)):
            own = self._states(chunk, scored, ahead, leaves)
        normed = self._gather(chunk, scored, own)
        total, d_normed = self._score(chunk, scored, ahead, normed)
        if self.gradients:
            # Even without rows of its own a rank takes part in the messages of attention's backward.
            back = own.new_zeros(own.shape) if d_normed is None else d_normed[scored.mine].to(own.dtype)
            for sum_, grad in zip(grads, self.gradients.backward([own], [back], leaves), strict=True):
                sum_ += grad
        return total

    def _scored(self, chunk: _Chunk) -> _Scored:
        index, slots = scored_rows(chunk.depth, self.anchors.slots)
        mine = ((index >= chunk.part.start) & (index < chunk.part.stop)).nonzero().flatten()
        found = (index, slots, chunk.rows[index] + slots, mine)
        return _Scored(*(tensor.to(self.device) for tensor in found))

    def _states(self, chunk: _Chunk, scored: _Scored, ahead: Ahead, keys: Sequence[Tensor]) -> Tensor:
        """[R_own, H], what the head reads in the scored slots of this rank's anchors."""
        config, lengths, shard = self.config, self.x.lengths, self.shard
        anchors = chunk.rows[chunk.part]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            given = (q, keys[2 * layer], keys[2 * layer + 1], k, v, anchors)
            causal, window = config.causal[layer], config.windows[layer]
            if shard is None:
                return block_attention(*given, lengths, causal=causal, window=window)
            if self.draft.attention == "ring":
                return ring_block_attention(*given, shard, causal=causal, window=window)
            return moved_block_attention(*given, shard, causal=causal, window=window, everyone=chunk.everyone)

        rows = anchors.to(self.device)
        embedded = self.draft.slots(ahead.embeddings[ahead.index(rows)], self.mask, config.block_size)
        output = self.draft.blocks(embedded, self.x.positions[rows], attend)
        first = config.block_size - self.anchors.slots
        return self.draft.norm(output[scored.index[scored.mine] - chunk.part.start, scored.slots[scored.mine] + first])

    def _gather(self, chunk: _Chunk, scored: _Scored, own: Tensor) -> Tensor:
        """[R, H], the states of all tensor-parallel ranks, without a graph. How many each sends follows from depths."""
        if self.ranks.size == 1:
            return own.detach()
        parts = [self.ranks.cut(chunk.rows.numel(), rank) for rank in range(self.ranks.size)]
        places = [((scored.index >= p.start) & (scored.index < p.stop)).nonzero().flatten() for p in parts]
        most = max(place.numel() for place in places)
        every = self.ranks.stack(own, most)
        whole = own.new_empty(scored.index.numel(), own.shape[1])
        for rank, place in enumerate(places):
            whole[place] = every[rank * most : rank * most + place.numel()]
        return whole.detach()

    def _score(self, chunk: _Chunk, scored: _Scored, ahead: Ahead, normed: Tensor) -> tuple[Tensor, Tensor | None]:
        """The chunk's loss, and its gradient to `normed` [R, H]; parameters behind it are done."""
        none = torch.zeros((), dtype=torch.float64, device=self.device)
        if not normed.shape[0]:
            return none, None
        draft, x = self.draft, self.x
        normed.requires_grad_(bool(self.gradients))
        # Two steps, as each rank adds the rows of its own anchors alone to the table of embeddings.
        markov, tokens = None, x.tokens[scored.rows]
        if draft.markov_head is not None:
            markov = draft.markov_head.embed(tokens).detach().requires_grad_(bool(self.gradients))
        labels = None
        if self.loss.needs_labels or draft.slot_weights.dynamic:
            labels = x.tokens[scored.rows + 1]
        with torch.set_grad_enabled(bool(self.gradients)):
            bias = None
            if draft.markov_head is not None and markov is not None:
                table = draft.markov_head.markov_w2.weight
                bias = (markov, table if x.vocab is None else table[x.vocab.start : x.vocab.stop])
            every = torch.ones_like(scored.rows, dtype=torch.bool)

            def objective(weight: Tensor) -> Any:
                return self.loss(
                    normed,
                    x.policy_head,
                    ahead.hidden,
                    x.policy_head,
                    weight,
                    teacher_rows=ahead.index(scored.rows),
                    scored=every,
                    vocab=x.vocab,
                    labels=labels,
                    bias=bias,
                )

            weight = self._weight(chunk, scored, objective, normed)
            out = objective(weight)
            total = out.loss
            extra = None if self.more is None else self.more(normed, markov, out.alpha, weight)
        counts = pass_counts(chunk.depth, self.anchors.slots).tolist()
        self.tally.add(counts, scored.index, chunk.rows.numel(), out.each, out.valid, out.agree, out.alpha)
        leaves = [normed] if markov is None else [normed, markov]
        found = self.gradients.backward([total], [torch.ones_like(total)], leaves) if self.gradients else []
        if extra is not None:
            # Every tensor-parallel rank computes all of it: one adds the gradients of its parameters.
            if self.gradients:
                more = self.gradients.backward([extra], [torch.ones_like(extra)], leaves, add=not self.ranks.rank)
                found = [a + b for a, b in zip(found, more, strict=True)]
            total = total + extra
        if draft.markov_head is not None and found:
            rows = self.gradients.sum_of(draft.markov_head.markov_w1.weight)
            if rows is not None:
                rows.index_add_(0, tokens[scored.mine], found[1][scored.mine].to(rows.dtype))
        return total.detach().double(), found[0] if found else None

    def _weight(self, chunk: _Chunk, scored: _Scored, objective: Any, normed: Tensor) -> Tensor:
        """[R], weights of the scored rows: of the slot, over the step's count of it."""
        shape = (chunk.rows.numel(), self.anchors.slots)
        alpha, label_prob = (
            torch.zeros(shape, dtype=accumulation_dtype(normed.dtype), device=self.device) for _ in range(2)
        )
        valid = chunk.depth.to(self.device)[:, None] > torch.arange(self.anchors.slots, device=self.device)
        at = (scored.index, scored.slots)
        if self.draft.slot_weights.dynamic:
            with torch.no_grad():
                out = objective(normed.new_ones(scored.rows.numel(), dtype=alpha.dtype))
            alpha[at], label_prob[at] = out.alpha.to(alpha.dtype), out.label_prob.to(alpha.dtype)
        weights = self.draft.slot_weights(alpha, label_prob, valid).double() * self.scale
        return weights[at].to(alpha.dtype)


def _mask_embedding(draft: BlockDraft, x: DraftInputs) -> Tensor:
    """[C], the policy's embedding of the mask token."""
    if x.special is not None:
        return x.special[0]
    if x.policy_embedding is None:
        raise ValueError("a block drafter needs the mask token's embedding: `special`, or the whole `policy_embedding`")
    return x.policy_embedding[draft.built().mask_token_id]
