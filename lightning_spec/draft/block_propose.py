"""Serving-style forward of a block drafter: what vLLM computes, without a cache. For the reference engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_spec.attention.block import block_attention
from lightning_spec.draft.base import Proposal
from lightning_spec.draft.propose import check_sequences, choose

if TYPE_CHECKING:
    from lightning_spec.draft.block import BlockDraft


@torch.no_grad()
def propose(
    draft: BlockDraft,
    features: Tensor,
    tokens: Tensor,
    lengths: list[int],
    bonus: Tensor,
    k: int,
    *,
    policy_head: Tensor,
    policy_embedding: Tensor,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Proposal:
    """`Draft.propose` of a block drafter: one block behind each sequence's verified tokens.

    DFlash: 1 + k slots, the bonus token's and k of the mask token, all seen at once; slot 0 is not read. DSpark: k
    slots, read from left to right with the bias from the token before. Where the draft has a `confidence_threshold`,
    the proposals end before the first one of less confidence (with several sequences: where the last of them ends).
    """
    config = draft.built()
    draft.need_parameters()
    check_sequences(tokens, lengths, bonus)
    if not 1 <= k <= config.proposals:
        raise ValueError(f"{k} proposals of a block that gives 1 to {config.proposals}")
    states = blocks(draft, features, lengths, bonus, k, policy_embedding)
    wide = torch.promote_types(draft.dtype, torch.float32)
    head = policy_head.to(wide)
    chosen = tokens.new_zeros(len(lengths), k)
    probs = torch.zeros(len(lengths), k, config.vocab_size, dtype=wide, device=tokens.device)
    before, sure, kept = bonus, torch.ones_like(bonus, dtype=torch.bool), k
    threshold = getattr(draft, "confidence_threshold", None) if draft.confidence_head is not None else None
    for i in range(k):
        logits = states[:, i].to(wide) @ head.T
        markov = None
        if draft.markov_head is not None:
            markov = draft.markov_head.embed(before)
            logits = logits + draft.markov_head.bias(markov).to(wide)
        if threshold is not None and draft.confidence_head is not None:
            sure = sure & (draft.confidence_head(states[:, i], markov).sigmoid() >= threshold)
            if not bool(sure.any()):
                kept = i
                break
        chosen[:, i], probs[:, i] = choose(logits, temperature, generator)
        before = chosen[:, i]
    return Proposal(chosen[:, :kept], probs[:, :kept])


def blocks(
    draft: BlockDraft, features: Tensor, lengths: list[int], bonus: Tensor, k: int, policy_embedding: Tensor
) -> Tensor:
    """[B, k, H], the normed states of the k slots that predict, one block for each sequence."""
    config = draft.built()
    count = k + config.block_size - config.proposals
    ends = torch.tensor(lengths).cumsum(0)
    # The bonus token has no states yet: its row of the trunk is never seen, but there is one for it to stand at.
    padded = features.new_zeros(features.shape[0] + len(lengths), features.shape[1])
    anchors = ends + torch.arange(len(lengths))
    verified = torch.ones(padded.shape[0], dtype=torch.bool)
    verified[anchors] = False
    padded[verified.to(padded.device)] = features
    positions = torch.cat([torch.arange(length + 1) for length in lengths]).to(features.device)
    trunk = draft.trunk(draft.fuse(padded), positions)

    def attend(layer: int, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return block_attention(
            q,
            *trunk[layer],
            key,
            value,
            anchors,
            [length + 1 for length in lengths],
            causal=config.causal[layer],
            window=config.windows[layer],
        )

    embedded = draft.slots(policy_embedding[bonus], policy_embedding[config.mask_token_id], count)
    output = draft.blocks(embedded, positions[anchors.to(positions.device)], attend)
    return draft.norm(output[:, count - k :])
