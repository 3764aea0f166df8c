"""The reference kernel: one explicit dense softmax in float64. For tests and small checks only; nothing trains on it.

It holds the whole [H, R, T] score matrix and expands the kv heads, so it refuses sizes at which that would hurt.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_SCORES = 4096 * 4096
"""Largest R * T that is computed."""


def attend(q: Tensor, k: Tensor, v: Tensor, low: Tensor, high: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Query row r sees the keys [low[r], high[r]).

    Args:
        q: [R, H, D];  k, v: [T, K, D], K divides H;  low, high: [R] int64.

    Returns:
        out [R, H, D] and lse [R, H]: float64 inside, returned in the accumulation type (float32, or float64 for
        float64 inputs). Rows that see nothing have out = 0 and lse = -inf.

    Raises:
        ValueError: more than `MAX_SCORES` scores a head.
    """
    scores = _scores(q, k, low, high, scale)
    lse = torch.logsumexp(scores, dim=-1)  # [H, R]
    out = _weights(scores, lse) @ _wide(v, q.shape[1])
    return _narrow(out.transpose(0, 1), q), _narrow(lse.transpose(0, 1), q)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, low: Tensor, high: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [R, H, D], dk, dv [T, K, D]) from the joint `out` [R, H, D] and `lse` [R, H] (SEMANTICS.md section 3)."""
    heads = q.shape[1]
    weights = _weights(_scores(q, k, low, high, scale), lse.double().transpose(0, 1))
    do, query = grad.double().transpose(0, 1), q.double().transpose(0, 1)
    delta = (do * out.double().transpose(0, 1)).sum(-1, keepdim=True)
    ds = weights * (do @ _wide(v, heads).transpose(1, 2) - delta) * scale
    dq = (ds @ _wide(k, heads)).transpose(0, 1)
    dk, dv = _summed(ds.transpose(1, 2) @ query, k), _summed(weights.transpose(1, 2) @ do, v)
    return _narrow(dq, q), _narrow(dk, q), _narrow(dv, q)


def _scores(q: Tensor, k: Tensor, low: Tensor, high: Tensor, scale: float) -> Tensor:
    """[H, R, T] float64; -inf where the row does not see the key."""
    if q.shape[0] * k.shape[0] > MAX_SCORES:
        raise ValueError(f"the reference kernel is for tests: {q.shape[0]} x {k.shape[0]} scores exceed {MAX_SCORES}")
    scores = q.double().transpose(0, 1) @ _wide(k, q.shape[1]).transpose(1, 2) * scale
    keys, low, high = torch.arange(k.shape[0], device=q.device), low.to(q.device), high.to(q.device)
    return scores.masked_fill((keys < low[:, None]) | (keys >= high[:, None]), -torch.inf)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)[..., None]).exp()


def _wide(x: Tensor, heads: int) -> Tensor:
    """[T, K, D] -> [H, T, D] float64."""
    return x.double().repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1)


def _summed(x: Tensor, like: Tensor) -> Tensor:
    """[H, T, D] -> [T, K, D], summed over the query heads of a kv head."""
    return x.unflatten(0, (like.shape[1], -1)).sum(1).transpose(0, 1)


def _narrow(x: Tensor, q: Tensor) -> Tensor:
    return x if q.dtype == torch.float64 else x.float()
