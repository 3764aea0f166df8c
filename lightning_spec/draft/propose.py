"""Serving-style forward of a draft that recycles its states: what vLLM's proposer computes, without its cache.

For the reference engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_spec.draft.attention import LocalAttention
from lightning_spec.draft.base import Proposal

if TYPE_CHECKING:
    from lightning_spec.draft.chained import ChainedDraft


@torch.no_grad()
def propose(
    draft: ChainedDraft,
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
    """`Draft.propose` of a draft with passes: pass 0 over the verified tokens, then one row a sequence and pass."""
    draft.need_parameters()
    check_sequences(tokens, lengths, bonus)
    vocab_size = draft.built().vocab_size
    table = policy_embedding if draft.embed_tokens is None else draft.embed_tokens.weight
    head = policy_head if draft.lm_head is None else draft.lm_head.weight
    dtype = draft.dtype
    wide = torch.promote_types(dtype, torch.float32)
    target = draft.target_ids()
    last = torch.tensor(lengths, device=tokens.device).cumsum(0) - 1
    following = tokens.roll(-1)
    following[last] = bonus
    positions = torch.cat([torch.arange(n, device=tokens.device) for n in lengths])
    chain = draft.chain(positions, [LocalAttention(lengths)] * draft.built().num_layers)
    chosen = tokens.new_zeros(len(lengths), k)
    probs = torch.zeros(len(lengths), k, vocab_size, dtype=wide, device=tokens.device)
    hidden = None
    for i in range(k):
        if hidden is None:
            output = chain.trunk(draft.fuse(features), table[following].to(dtype), last)
        else:
            output = chain.step(hidden, table[chosen[:, i - 1]].to(dtype))
        normed = draft.normed(output)
        hidden = draft.recycled(output, normed)
        logits = normed.to(wide) @ head.to(wide).T
        if target is not None:
            reduced, logits = logits, logits.new_full((len(lengths), vocab_size), -torch.inf)
            logits[:, target] = reduced
        chosen[:, i], probs[:, i] = choose(logits, temperature, generator)
    return Proposal(chosen, probs)


def check_sequences(tokens: Tensor, lengths: list[int], bonus: Tensor) -> None:
    """Raise ValueError where the arguments of `Draft.propose` do not fit together."""
    if not lengths or min(lengths) < 1 or len(lengths) != bonus.numel() or sum(lengths) != tokens.numel():
        raise ValueError(f"lengths {lengths} do not fit {tokens.numel()} tokens and {bonus.numel()} bonus tokens")


def choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """(tokens [B], distributions they come from [B, V]) of logits [B, V]."""
    if temperature <= 0:
        token = logits.argmax(-1)
        return token, F.one_hot(token, logits.shape[-1]).to(logits.dtype)
    if generator is None:
        raise ValueError("sampled proposals need a generator: a draft never draws from the global random state")
    q = (logits / temperature).softmax(-1)
    return torch.multinomial(q, 1, generator=generator).squeeze(1), q
