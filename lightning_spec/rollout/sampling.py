"""Drawing tokens, and exact rejection sampling of drafted ones. Float64, one sequence at a time: right before fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_spec.rollout.engine import Sampling

Uniform = Callable[[], float]
"""The next uniform number in [0, 1)."""


def target_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that tokens are drawn from: temperature, then top-k, then top-p (vLLM's order).

    Args:
        logits: [..., V].

    Returns:
        float64 [..., V]; at temperature 0 all mass is on the first largest logit.
    """
    logits = logits.to(torch.float64)
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(torch.float64)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        # A token stays while the mass before it is under top_p, so the largest always stays.
        dropped = probs.cumsum(-1) - probs >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(-1, index, dropped), float("-inf"))
    return logits.softmax(-1)


def token_logprob(logits: Tensor, probs: Tensor, token: int, sampling: Sampling) -> float:
    """Log-prob to report for a drawn token: of the processed distribution, and at temperature 0 of softmax(logits).

    Args:
        logits: [V], raw. probs: [V], `target_probs` of them.
    """
    if sampling.temperature == 0:
        return float(logits.to(torch.float64).log_softmax(-1)[token])
    return float(probs[token].log())


def draw(probs: Tensor, uniform: float) -> int:
    """A token from unnormalised `probs` [V] by inversion of the cumulative distribution."""
    total = probs.cumsum(0)
    index = int(torch.searchsorted(total, torch.tensor([uniform], dtype=probs.dtype) * total[-1], right=True))
    # Rounding can push the point past the last token that has mass.
    return min(index, int(probs.nonzero()[-1]))


def verify(target: Tensor, drafted: Sequence[int], draft: Tensor, uniform: Uniform) -> tuple[int, int]:
    """Exact rejection sampling (Leviathan et al., arXiv 2211.17192, algorithm 1): the tokens emitted are distributed as
    if drawn from `target` one by one, whatever `draft` is.

    Args:
        target: [k+1, V], the policy's distributions before each drafted token and after the last.
        drafted: k tokens; token i must have been drawn from draft[i].
        draft: [k, V], the distributions the proposals came from.

    Returns:
        (number accepted, the token that follows them: drawn from the residual after a rejection, else the bonus).
    """
    for i, token in enumerate(drafted):
        p, q = float(target[i, token]), float(draft[i, token])
        if uniform() * q < p:
            continue
        residual = (target[i] - draft[i]).clamp_min(0)
        # A rejection implies p < q somewhere, hence residual mass; only rounding can leave none.
        return i, draw(residual if float(residual.sum()) > 0 else target[i], uniform())
    return len(drafted), draw(target[len(drafted)], uniform())
