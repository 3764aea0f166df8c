"""The engine that runs every pass on all rows that are still valid, before the loss: memory grows with N and T.

With one rank it is the plain way; over context-parallel ranks rows stay where the policy has them (zigzag), and trunk
keys travel in every pass, by ring or Ulysses.

Tensor-parallel ranks all run all rows and divide the vocabulary of the loss; each lets the gradients of its part of the
scored rows flow back, and they add up to the whole, as everything before the loss is linear in them. Nothing is saved
so, but no message is needed either: this is the oracle of the streamed engine, which divides the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_spec.draft.ahead import Ahead, wanted
from lightning_spec.draft.attention import PassAttention
from lightning_spec.draft.base import DraftInputs, DraftOutput
from lightning_spec.draft.head import head_part
from lightning_spec.draft.passes import run_passes
from lightning_spec.draft.plan import PassPlan
from lightning_spec.draft.tally import Tally, nothing
from lightning_spec.draft.tensor_ranks import TensorRanks
from lightning_spec.draft.validity import pass_labels
from lightning_spec.loss.draft import DraftLoss

if TYPE_CHECKING:
    from lightning_spec.draft.chained import ChainedDraft


def run_full(
    draft: ChainedDraft, x: DraftInputs, loss: DraftLoss, plan: PassPlan, attention: PassAttention
) -> DraftOutput:
    """Loss of a micro-batch, with a graph. Some row is valid, on some rank; every rank of the shard calls.

    Args:
        x: detached inputs.
    """
    shard, head = x.split, head_part(draft, x)
    positions, depth = x.positions, plan.depth
    mine = torch.arange(positions.numel(), device=positions.device)
    ahead = Ahead(x, None)
    if shard is not None:
        mine = shard.rows.to(positions.device)
        anchors = [shard.layout.rows(rank).to(positions.device) for rank in range(shard.size)]
        ahead = Ahead(x, wanted(anchors, depth, draft.num_passes, always=1))
        positions, depth = positions[mine], depth[mine]

    def embed(rows: Tensor, i: int) -> Tensor:
        return draft.embed(ahead, ahead.index(mine[rows] + 1 + i))

    chain = draft.chain(positions, [attention] * draft.built().num_layers)
    rows = (depth > 0).nonzero().flatten()
    everything = torch.arange(positions.numel(), device=positions.device)
    output = chain.trunk(draft.fuse(x.features), embed(everything, 0), rows)
    scored = run_passes(draft, chain, output, depth, plan.sizes, embed)
    weight = scored.normed.new_tensor(plan.weights, dtype=torch.promote_types(scored.normed.dtype, torch.float32))
    out = loss(
        TensorRanks(x.vocab).share(scored.normed),
        head.weight,
        ahead.hidden,
        x.policy_head,
        weight[scored.passes],
        head.target_ids,
        ahead.index(mine[scored.rows] + 1 + scored.passes),
        torch.ones_like(scored.rows, dtype=torch.bool),
        x.vocab,
        labels=pass_labels(x, mine[scored.rows], scored.passes) if loss.needs_labels else None,
    )
    tally = Tally(draft.num_passes, plan.factor, positions.device)
    tally.add(scored.counts, scored.rows, positions.numel(), out.each, out.valid, out.agree, out.alpha)
    objective = out.loss
    if not scored.rows.numel():  # this rank has no part of it: its parameters still get (zero) gradients
        objective = objective + nothing(draft.parameters(), x.hidden).to(objective.dtype)
    return DraftOutput(objective, tally.metrics())
