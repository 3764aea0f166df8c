"""The forward of a language model draft: in training over packed documents, in serving token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_spec.attention.exchange import gather_rows
from lightning_spec.attention.rope import apply_rotary
from lightning_spec.draft.attention import LocalAttention, PassAttention
from lightning_spec.draft.base import DraftInputs, DraftMetrics, DraftOutput, Proposal
from lightning_spec.draft.chain import PassChain
from lightning_spec.draft.layers import DecoderLayer
from lightning_spec.draft.mode import pass_attention
from lightning_spec.draft.plan import scored_rows
from lightning_spec.draft.propose import check_sequences, choose
from lightning_spec.draft.tally import Tally, nothing
from lightning_spec.draft.tensor_ranks import TensorRanks
from lightning_spec.draft.validity import next_tokens
from lightning_spec.loss.draft import DraftLoss, DraftLossOutput

if TYPE_CHECKING:
    from lightning_spec.draft.lm import DraftModel


def predicted(depth: Tensor) -> Tensor:
    """bool [T], the rows that serving predicts from: those that follow an anchor with a valid proposal.

    Args:
        depth: int64 [T], valid proposals of each anchor (`pass_depth`). Proposal i of anchor t comes from row
            t + 1 + i, which is row t' + 1 of anchor t' = t + i: every proposal's row is the first one of some anchor.
    """
    rows = torch.zeros_like(depth, dtype=torch.bool)
    rows[1:] = depth[:-1] > 0
    return rows


def run(
    draft: DraftModel, x: DraftInputs, loss: DraftLoss, depth: Tensor, totals: Mapping[str, Tensor | float]
) -> DraftOutput:
    """Loss of a micro-batch in which some row is scored, on some rank; every rank of the shard calls.

    Tensor-parallel ranks all run all rows and divide the vocabulary of the loss. Each lets the gradients of its part of
    the scored rows flow back, and they add up to the whole.

    Args:
        x: detached inputs.  depth: int64 [T], global.
    """
    device, shard = x.tokens.device, x.split
    mine = torch.arange(x.tokens.numel(), device=device) if shard is None else shard.rows.to(device)
    rows = predicted(depth)[mine].nonzero().flatten()
    normed = states(draft, x, mine, rows)
    head = draft.head()
    needed = head.shape[0] if x.vocab is None else x.vocab.rows
    if x.policy_head.shape[0] != needed:
        raise ValueError(f"policy_head has {x.policy_head.shape[0]} rows, this rank's vocabulary {needed}")
    weight = normed.new_full(
        (rows.numel(),),
        1.0 / max(float(totals["draft_rows"]), 1.0),
        dtype=torch.promote_types(normed.dtype, torch.float32),
    )
    labels = next_tokens(x.tokens, x.positions, x.sampled)[mine[rows]] if loss.needs_labels else None
    out = loss(
        TensorRanks(x.vocab).share(normed),
        head if x.vocab is None else head[x.vocab.start : x.vocab.stop],
        x.hidden,
        x.policy_head,
        weight,
        None,
        rows,
        torch.ones_like(rows, dtype=torch.bool),
        x.vocab,
        labels=labels,
    )
    objective = out.loss
    if not rows.numel():  # this rank has no part of it: its parameters still get (zero) gradients
        objective = objective + nothing(draft.parameters(), x.hidden).to(objective.dtype)
    return DraftOutput(objective, _metrics(draft, x, depth, mine, rows, out))


def states(draft: DraftModel, x: DraftInputs, mine: Tensor, rows: Tensor) -> Tensor:
    """[R, H], what the head reads, of this rank's `rows` (indices into `mine`, its global rows). With `recompute` a
    layer keeps its input alone, and runs once more in the backward."""
    hidden = F.embedding(x.tokens[mine], draft.model.embed_tokens.weight)
    cos, sin = draft.rope.cos_sin(x.positions[mine], hidden.dtype)
    layers = draft.decoder_layers()
    attend = pass_attention(draft.built(), x, "ulysses" if draft.attention == "ulysses" else "ring")
    again = draft.recompute and torch.is_grad_enabled() and any(p.requires_grad for p in draft.parameters())
    for layer in layers:
        chosen = rows if layer is layers[-1] else None  # the last layer's other rows are keys only
        arguments = (layer, hidden, cos, sin, attend, chosen)
        if again:
            hidden = checkpoint(_layer, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden = _layer(*arguments)
    return draft.model.norm(hidden)


def _layer(
    layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attend: PassAttention, rows: Tensor | None
) -> Tensor:
    attention = layer.self_attn
    c, residual = layer.enter(hidden, hidden)
    k, v = apply_rotary(attention.key(c), cos, sin), attention.value(c)
    if rows is not None:
        c, residual, cos, sin = c[rows], residual[rows], cos[rows], sin[rows]
    return layer.leave(attend(apply_rotary(attention.query(c), cos, sin), k, v, (), (), rows), residual)


def _metrics(
    draft: DraftModel, x: DraftInputs, depth: Tensor, mine: Tensor, rows: Tensor, out: DraftLossOutput
) -> DraftMetrics:
    """Means by proposal, of the anchors whose first row is here. Their later rows may be another rank's: four numbers
    of every row travel."""
    found = torch.stack([out.each, out.valid, out.agree, out.alpha], 1).double()
    numbers = found.new_zeros(mine.numel(), 4).index_copy_(0, rows, found)
    if x.split is not None:
        numbers = gather_rows(numbers, x.split)
    anchors = mine[rows] - 1
    which, proposal = scored_rows(depth[anchors], draft.num_proposals)
    each, valid, agree, alpha = numbers[anchors[which] + 1 + proposal].unbind(1)
    counts = proposal.bincount(minlength=draft.num_proposals).tolist()
    tally = Tally(draft.num_proposals, 1.0, depth.device)
    tally.add(counts, which, anchors.numel(), each, valid > 0, agree > 0, alpha)
    return tally.metrics()


@torch.no_grad()
def propose(
    draft: DraftModel,
    tokens: Tensor,
    lengths: list[int],
    bonus: Tensor,
    k: int,
    *,
    temperature: float,
    generator: torch.Generator | None,
) -> Proposal:
    """`Draft.propose` of a language model: one forward over verified and bonus tokens, then k - 1 of a token each."""
    check_sequences(tokens, lengths, bonus)
    table, head = draft.model.embed_tokens.weight, draft.head()
    wide = torch.promote_types(head.dtype, torch.float32)
    known = torch.cat([part for pair in zip(tokens.split(lengths), bonus.split(1), strict=True) for part in pair])
    counts = [length + 1 for length in lengths]
    positions = torch.cat([torch.arange(n, device=tokens.device) for n in counts])
    last = torch.tensor(counts, device=tokens.device).cumsum(0) - 1
    # As of an EAGLE-3 chain: the known rows are the trunk, each proposal lengthens the branch of a sequence's last row.
    layers = draft.decoder_layers()
    chain = PassChain(layers, draft.rope, positions, [LocalAttention(counts)] * len(layers))
    chosen = tokens.new_zeros(len(lengths), k)
    probs = torch.zeros(len(lengths), k, head.shape[0], dtype=wide, device=tokens.device)
    for i in range(k):
        embedded = F.embedding(chosen[:, i - 1] if i else known, table)
        output = chain.step(embedded, embedded) if i else chain.trunk(embedded, embedded, last)
        logits = draft.model.norm(output).to(wide) @ head.to(wide).T
        chosen[:, i], probs[:, i] = choose(logits, temperature, generator)
    return Proposal(chosen, probs)
