"""The streamed engine: trunk keys once for all passes, then chunk after chunk of anchors through all passes and back.

Given the trunk keys, every anchor's chain of passes is independent of every other anchor (SEMANTICS.md section 3). So
keys are made by the rows' owners and gathered once; anchors that carry loss are dealt to the ranks by equal work,
wherever they live; each chunk of them runs forward, loss and backward, and is freed. Memory is flat in the number of
passes. Gradients of the keys add up in one float32 buffer, return to the owners in one reduce-scatter, and only there
go on into the projections (and, below the last layer, into pass 0 of all rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_spec.attention.exchange import gather_rows, reduce_scatter_rows
from lightning_spec.draft.ahead import Ahead, fetch, wanted
from lightning_spec.draft.attention import LocalAttention, PassAttention, RingAttention
from lightning_spec.draft.base import DraftInputs, DraftOutput
from lightning_spec.draft.passes import run_passes
from lightning_spec.draft.plan import PassPlan, deal
from lightning_spec.draft.stream_attention import ChunkView, StreamAttention
from lightning_spec.draft.tally import Tally
from lightning_spec.draft.validity import pass_counts
from lightning_spec.loss.draft import DraftLoss

if TYPE_CHECKING:
    from lightning_spec.draft.eagle3 import Eagle3


def run_stream(draft: Eagle3, x: DraftInputs, loss: DraftLoss, plan: PassPlan, chunk_rows: int) -> DraftOutput:
    """Loss of a micro-batch; its gradients are formed on the way, and backward only scales them. Some row is valid, on
    some rank; every rank of the shard calls.

    Args:
        x: detached inputs.
        chunk_rows: anchors at a time.
    """
    stream = _Stream(draft, x, loss, plan, chunk_rows)
    objective: Tensor = _Streamed.apply(stream, *stream.gradients.parameters)
    return DraftOutput(objective, stream.tally.metrics())


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: _Stream, *parameters: Tensor) -> Tensor:
        objective = stream.run()
        ctx.gradients = stream.gradients.take()
        return objective

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, *((gradient * upstream).to(dtype) for gradient, dtype in ctx.gradients)


class _Gradients:
    """Sums of gradients in float32 (float64 for float64) of the parameters that are trained, if any are."""

    def __init__(self, draft: Eagle3) -> None:
        on = torch.is_grad_enabled()
        self.parameters = [p for p in draft.parameters() if p.requires_grad and on]
        self._sums: list[Tensor | None] = [None] * len(self.parameters)
        looked_up = [m.weight for m in (draft.lm_head, draft.embed_tokens) if m is not None]
        self._graph = [n for n, p in enumerate(self.parameters) if not any(p is weight for weight in looked_up)]
        """Those that autograd differentiates; head and embedding rows are added by hand."""

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def sum_of(self, parameter: Tensor) -> Tensor | None:
        """The sum of one parameter's gradients, to be added to; None where it is not trained."""
        for n, p in enumerate(self.parameters):
            if p is parameter:
                total = self._sums[n]
                if total is None:
                    total = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
                    self._sums[n] = total
                return total
        return None

    def backward(self, outputs: Sequence[Tensor], grads: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
        """Add what `grads` of `outputs` give the parameters; returns the gradients of `leaves`."""
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        if not pairs:
            return [torch.zeros_like(leaf) for leaf in leaves]
        inputs = [*leaves, *(self.parameters[n] for n in self._graph)]
        made, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(made, inputs, given, allow_unused=True)
        for n, grad in zip(self._graph, found[len(leaves) :], strict=True):
            total = self._sums[n]
            if grad is None:
                continue
            if total is not None:
                total += grad
            else:
                self._sums[n] = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return [
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(leaves, found[: len(leaves)], strict=True)
        ]

    def take(self) -> list[tuple[Tensor, torch.dtype]]:
        """(gradient, the parameter's dtype) of every parameter, zeros where it got none."""
        return [
            (torch.zeros_like(p) if total is None else total, p.dtype)
            for p, total in zip(self.parameters, self._sums, strict=True)
        ]


class _Stream:
    """One micro-batch's run."""

    def __init__(self, draft: Eagle3, x: DraftInputs, loss: DraftLoss, plan: PassPlan, chunk_rows: int) -> None:
        self.draft, self.x, self.loss, self.plan, self.chunk_rows = draft, x, loss, plan, chunk_rows
        self.shard = x.split
        self.gradients = _Gradients(draft)
        self.device = x.tokens.device
        self.tally = Tally(draft.num_passes, plan.factor, self.device)
        self.layers = draft.built().num_layers

    def run(self) -> Tensor:
        """The loss (no graph); afterwards `gradients` and `tally` are complete."""
        trunk = _Trunk(self)
        keys = trunk.keys() if self.shard is None else gather_rows(trunk.keys(), self.shard)
        d_keys = None
        if self.gradients:
            d_keys = torch.zeros_like(keys, dtype=torch.promote_types(keys.dtype, torch.float32))
        anchors = (self.plan.depth > 0).nonzero().flatten()
        features, ahead = self.x.features, Ahead(self.x, None)
        if self.shard is not None:
            dealt = deal(self.plan.depth, self.x.positions, self.shard.size, self._fixed_work())
            anchors = dealt[self.shard.rank]
            ahead = Ahead(self.x, wanted(dealt, self.plan.depth, self.draft.num_passes))
            (features,) = fetch([self.x.features], dealt, self.shard)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in pieces(anchors.numel(), self.chunk_rows):
            rows = anchors[part]
            total += self._chunk(rows, features[rows if self.shard is None else part], ahead, keys, d_keys)
        if d_keys is not None:
            trunk.backward(d_keys if self.shard is None else reduce_scatter_rows(d_keys, self.shard))
        return total.to(torch.promote_types(self.draft.fc.weight.dtype, torch.float32))

    def _chunk(self, rows: Tensor, features: Tensor, ahead: Ahead, keys: Tensor, d_keys: Tensor | None) -> Tensor:
        """All passes of the anchors `rows` (global), forward and backward; returns their part of the loss."""
        draft, plan = self.draft, self.plan
        depth = plan.depth[rows]
        view = ChunkView(rows, int(rows[0] - self.x.positions[rows[0]]), self.x.lengths)
        attention = [
            StreamAttention(view, None if d_keys is None else (d_keys[:, 2 * n], d_keys[:, 2 * n + 1]))
            for n in range(self.layers)
        ]
        lookup = Lookup(self, ahead)
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
        head = draft.head(self.x)
        normed = scored.normed.detach()
        weight = normed.new_tensor(plan.weights, dtype=torch.promote_types(normed.dtype, torch.float32))
        swept = self.loss.sweep(
            normed,
            head.detach(),
            ahead.hidden,
            self.x.policy_head,
            weight[scored.passes],
            draft.target_ids(),
            ahead.index(rows[scored.rows] + 1 + scored.passes),
            need_hidden=scored.normed.requires_grad,
            d_head=self.gradients.sum_of(head),
        )
        self.tally.add(
            scored.counts, scored.rows, rows.numel(), swept.each, swept.valid, swept.agree, swept.alpha
        )  # fmt: skip
        if swept.d_hidden is not None:
            leaves = [*(a.switch for a in attention), *lookup.leaves]
            grads = self.gradients.backward([scored.normed], [swept.d_hidden.to(normed.dtype)], leaves)
            lookup.backward(grads[len(attention) :])
        return swept.total

    def _fixed_work(self) -> float:
        """Work of a row in one pass apart from attention, in keys attended to (multiply-adds, forward and backward)."""
        config = self.draft.built()
        layers = sum(p.numel() for layer in self.draft.decoder_layers() for p in layer.parameters())
        head = config.draft_vocab_size * config.hidden_size
        return (3 * layers + 3 * head) / (7 * config.num_layers * config.num_heads * config.head_dim)


class Lookup:
    """Input embeddings of tokens by their global row. The draft's own ones are leaves, whose gradients are added to the
    table's rows: through autograd each pass would make a gradient as large as the table."""

    def __init__(self, stream: _Stream, ahead: Ahead) -> None:
        self.x, self.ahead = stream.x, ahead
        self.dtype = stream.draft.fc.weight.dtype
        table = stream.draft.embed_tokens
        self.table = None if table is None else table.weight
        self.gradient = None if self.table is None else stream.gradients.sum_of(self.table)
        self.leaves: list[Tensor] = []
        self._tokens: list[Tensor] = []

    def __call__(self, rows: Tensor) -> Tensor:
        """[R, H]."""
        if self.table is None:
            return self.ahead.embeddings[self.ahead.index(rows)].to(self.dtype)
        tokens = self.x.tokens[rows.clamp(max=self.x.tokens.numel() - 1)]
        leaf = self.table.detach()[tokens]
        if self.gradient is not None:
            self._tokens.append(tokens)
            self.leaves.append(leaf.requires_grad_())
        return leaf

    def backward(self, grads: Sequence[Tensor]) -> None:
        """Gradients of `leaves`."""
        for tokens, grad in zip(self._tokens, grads, strict=True):
            assert self.gradient is not None
            self.gradient.index_add_(0, tokens, grad.to(self.gradient.dtype))


class _Trunk:
    """Trunk keys and values of the rows held here.

    A draft of one layer makes them from the policy's states alone: row by row, so they are made in pieces and once more
    for the backward, which is cheaper than to keep what it needs. Later layers read pass 0 of the layer before at all
    rows: its graph is kept.
    """

    def __init__(self, stream: _Stream) -> None:
        self.stream, self.x, self.draft = stream, stream.x, stream.draft
        shard, total = stream.shard, self.x.tokens.numel()
        self.rows = torch.arange(total, device=stream.device)
        self.attention: PassAttention = LocalAttention(self.x.lengths)
        self.ahead = Ahead(self.x, None)
        if shard is not None:
            self.rows = shard.rows.to(stream.device)
            self.attention = RingAttention(shard)
            if self.draft.embed_tokens is None:
                held = [shard.layout.rows(rank).to(stream.device) for rank in range(shard.size)]
                following = [(rows + 1).clamp(max=total - 1).unique() for rows in held]
                self.ahead = Ahead(self.x, following, teachers=False)
        self.keep = stream.layers > 1
        self._kept: list[tuple[list[Tensor], Lookup]] = []

    def keys(self) -> Tensor:
        """[T_r, 2 * layers, K, D]: k and v of layer 0, then of layer 1, ..."""
        config, rows = self.draft.built(), self.rows.numel()
        shape = (rows, 2 * config.num_layers, config.num_kv_heads, config.head_dim)
        keys = torch.empty(shape, dtype=self.draft.fc.weight.dtype, device=self.stream.device)
        for part in self._parts():
            with torch.set_grad_enabled(self.keep and bool(self.stream.gradients)):
                made, lookup = self._make(part)
            for n, tensor in enumerate(made):
                keys[part, n] = tensor.detach()
            if self.keep:
                self._kept.append((made, lookup))
        return keys

    def backward(self, d_keys: Tensor) -> None:
        """Gradients of `keys`, summed over ranks."""
        for part in self._parts():
            if self.keep:
                made, lookup = self._kept.pop()
            else:
                with torch.enable_grad():
                    made, lookup = self._make(part)
            grads = [d_keys[part, n].to(tensor.dtype) for n, tensor in enumerate(made)]
            lookup.backward(self.stream.gradients.backward(made, grads, lookup.leaves))

    def _parts(self) -> list[slice]:
        return [slice(0, self.rows.numel())] if self.keep else pieces(self.rows.numel(), self.stream.chunk_rows)

    def _make(self, part: slice) -> tuple[list[Tensor], Lookup]:
        lookup, rows = Lookup(self.stream, self.ahead), self.rows[part]
        chain = self.draft.chain(self.x.positions[rows], [self.attention] * self.stream.layers)
        chain.keys(self.draft.fuse(self.x.features[part]), lookup(rows + 1))
        return [tensor for pair in chain.trunk_keys for tensor in pair], lookup


def pieces(count: int, size: int) -> list[slice]:
    """range(count) cut into the fewest even pieces of at most `size`."""
    number = -(-count // size)
    return [slice(count * n // number, count * (n + 1) // number) for n in range(number)]
