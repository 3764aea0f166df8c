"""Log-probabilities of labels, and entropies, of a linear head without ever holding [T, V] logits.

Forward sweeps the rows in chunks and keeps one log-sum-exp a row; backward forms the logits of a chunk again. The idea
is that of Cut Cross-Entropy (arXiv 2411.09009) in plain matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_spec.errors import ConfigError
from lightning_spec.loss.chunks import RowChunks, exact_math, math_dtype, rows_per_chunk


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden @ weight.T / temperature) at the labels; optionally the entropy of each row.

    Both outputs are differentiable in `hidden` and `weight`, exactly. Rows whose label is negative, and in backward
    rows that receive no gradient, are not computed at all.

    Args:
        hidden: [T, C], any floating dtype. float64 input is computed in float64, all else in float32.
        weight: [V, C], the head (may be the tied embedding).
        labels: [T] int64, row-aligned; -1 (any negative value) gives 0 and no gradient.
        temperature: divides the logits; the sampling temperature of whatever these are compared with.
        chunk: rows at a time; default: as many as make 8 MiB of logits on a CPU.
        entropy: also return the entropies, in nats.

    Returns:
        (logprobs [T], entropy [T] or None), float32 or float64.

    Raises:
        ConfigError: the temperature is not a positive number.
        ValueError: shapes that do not fit.
    """
    if not 0.0 < temperature < float("inf"):
        raise ConfigError(
            "log-probs need a positive temperature", found=temperature, needed="a number above 0", key="temperature"
        )
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or labels.shape != hidden.shape[:1]:
        raise ValueError(
            "need hidden [T, C], weight [V, C], labels [T]; got "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)}, {tuple(labels.shape)}"
        )
    if chunk is None:
        chunk = rows_per_chunk(weight.shape[0], math_dtype(hidden, weight), hidden.device)
    logprobs, entropies = _LinearLogprobs.apply(hidden, weight, labels, temperature, chunk, entropy)
    return logprobs, entropies if entropy else None


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, chunk: int, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        dtype = math_dtype(hidden, weight)
        logprobs = hidden.new_zeros(hidden.shape[0], dtype=dtype)
        lse = torch.zeros_like(logprobs)
        entropies = torch.zeros_like(logprobs) if entropy else None
        head = weight.to(dtype)
        with exact_math(hidden.device):
            for rows in RowChunks(labels >= 0, chunk):
                z = hidden[rows].to(dtype) @ head.T
                if temperature != 1.0:
                    z /= temperature
                top = z.amax(1, keepdim=True)
                z -= top
                at_label = z.gather(1, labels[rows, None]).squeeze(1)
                if entropies is None:
                    log_sum = z.exp_().sum(1).log_()
                else:
                    e = z.exp()
                    sums = e.sum(1)
                    log_sum = sums.log()
                    entropies[rows] = log_sum - e.mul_(z).sum(1) / sums
                logprobs[rows] = at_label - log_sum
                lse[rows] = log_sum + top.squeeze(1)
        ctx.save_for_backward(hidden, weight, labels, lse, entropies)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropies: Tensor | None = None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, lse, entropies = ctx.saved_tensors
        dtype = lse.dtype
        d_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        # A row without gradient (advantage 0, clipped) is not worth its matrix products.
        keep = torch.zeros_like(labels, dtype=torch.bool)
        for grad in (d_logprobs, d_entropies):
            if grad is not None:
                keep |= grad != 0
        keep &= labels >= 0
        head = weight.to(dtype)
        with exact_math(hidden.device):
            for rows in RowChunks(keep, ctx.chunk):
                h = hidden[rows].to(dtype)
                z = h @ head.T
                if ctx.temperature != 1.0:
                    z /= ctx.temperature
                z -= lse[rows, None]
                if d_entropies is None:
                    assert d_logprobs is not None
                    dz = z.exp_().mul_(d_logprobs[rows, None].neg())
                else:
                    # dH/dz = -p (log p + H);  dlogp_y/dz = 1[y] - p
                    p = z.exp()
                    dz = z.add_(entropies[rows, None]).mul_(d_entropies[rows, None].neg())
                    if d_logprobs is not None:
                        dz -= d_logprobs[rows, None]
                    dz *= p
                    del p
                if d_logprobs is not None:
                    dz.scatter_add_(1, labels[rows, None], d_logprobs[rows, None].to(dtype))
                if ctx.temperature != 1.0:
                    dz /= ctx.temperature
                if d_hidden is not None:
                    d_hidden[rows] = (dz @ head).to(hidden.dtype)
                if d_weight is not None:
                    d_weight.addmm_(dz.T, h)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None, None
