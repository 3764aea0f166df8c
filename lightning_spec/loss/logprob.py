"""Log-probabilities of labels, and entropies, of a linear head without ever holding [T, V] logits.

Forward sweeps the rows in chunks and keeps one log-sum-exp a row; backward forms the logits of a chunk again. The idea
is that of Cut Cross-Entropy (arXiv 2411.09009) in plain matrix products. With the vocabulary split over ranks each
sweeps its own rows of the head, and they talk once forward (a few scalars a row) and once backward (d_hidden).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_spec.errors import ConfigError
from lightning_spec.loss.chunks import RowChunks, exact_math, math_dtype, rows_per_chunk
from lightning_spec.loss.vocab import SplitSoftmax, VocabShard, from_ranks, maximum


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy: bool = False,
    vocab: VocabShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden @ weight.T / temperature) at the labels; optionally the entropy of each row.

    Both outputs are differentiable in `hidden` and `weight`, exactly. Rows whose label is negative, and in backward
    rows that receive no gradient, are not computed at all.

    With `vocab`, its ranks call together, forward and backward, with the same hidden, labels and gradients of the
    outputs. Outputs and the gradient of `hidden` are complete and the same on each; the gradient of `weight` is of the
    rank's rows.

    Args:
        hidden: [T, C], any floating dtype. float64 input is computed in float64, all else in float32.
        weight: [V, C], the head (may be the tied embedding); with `vocab`, the rank's rows of it.
        labels: [T] int64, row-aligned ids of the whole vocabulary; -1 (any negative value) gives 0 and no gradient.
        temperature: divides the logits; the sampling temperature of whatever these are compared with.
        chunk: rows at a time; default: as many as make 8 MiB of logits on a CPU.
        entropy: also return the entropies, in nats.
        vocab: the rank's part of a split vocabulary; None: all of it is here.

    Returns:
        (logprobs [T], entropy [T] or None), float32 or float64.

    Raises:
        ConfigError: the temperature is not a positive number.
        ValueError: shapes that do not fit, or a label outside a split vocabulary.
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
    if vocab is not None:
        _check_shard(weight, labels, vocab)
    if chunk is None:
        width = weight.shape[0] if vocab is None else vocab.width
        chunk = rows_per_chunk(width, math_dtype(hidden, weight), hidden.device)
    logprobs, entropies = _LinearLogprobs.apply(hidden, weight, labels, temperature, chunk, entropy, vocab)
    return logprobs, entropies if entropy else None


def _check_shard(weight: Tensor, labels: Tensor, vocab: VocabShard) -> None:
    if weight.shape[0] != vocab.rows:
        raise ValueError(f"need the {vocab.rows} rows [{vocab.start}, {vocab.stop}) of the head, got {weight.shape[0]}")
    # On one rank the look-up itself fails; here every rank would take the label for another's.
    if labels.numel() and int(labels.max()) >= vocab.size:
        raise ValueError(f"label {int(labels.max())} is outside the vocabulary of {vocab.size} tokens")


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        chunk: int,
        entropy: bool,
        vocab: VocabShard | None,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = math_dtype(hidden, weight)
        logprobs = hidden.new_zeros(hidden.shape[0], dtype=dtype)
        lse = torch.zeros_like(logprobs)
        entropies = torch.zeros_like(logprobs) if entropy else None
        rows = (labels >= 0).nonzero().squeeze(1)
        if rows.numel():  # the same on every rank
            parts = _sweep(hidden, weight.to(dtype), labels, temperature, chunk, entropy, vocab)
            maxima, sums, at_label, *rest = from_ranks(vocab, parts)
            softmax = SplitSoftmax.of(maxima, sums)
            log_sum = softmax.sum.log()
            # Ranks without the label say -inf.
            logprobs[rows] = (at_label + softmax.shift).amax(0) - log_sum
            lse[rows] = log_sum + softmax.top
            if entropies is not None:
                moment = (softmax.factor * (rest[0] + sums * softmax.shift)).sum(0)
                entropies[rows] = log_sum - moment / softmax.sum
        ctx.save_for_backward(hidden, weight, labels, lse, entropies)
        ctx.temperature, ctx.chunk, ctx.vocab = temperature, chunk, vocab
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropies: Tensor | None = None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, lse, entropies = ctx.saved_tensors
        vocab: VocabShard | None = ctx.vocab
        dtype = lse.dtype
        d_hidden = _HiddenGradient(hidden, labels, dtype, vocab) if ctx.needs_input_grad[0] else None
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
                if d_logprobs is not None and dz.shape[1]:
                    column, here = _columns(labels[rows], vocab)
                    up = d_logprobs[rows].to(dtype)
                    dz.scatter_add_(1, column[:, None], (up if here is None else up * here)[:, None])
                if ctx.temperature != 1.0:
                    dz /= ctx.temperature
                if d_hidden is not None:
                    d_hidden.put(rows, dz @ head)
                if d_weight is not None:
                    d_weight.addmm_(dz.T, h)
        return (
            None if d_hidden is None else d_hidden.complete(),
            None if d_weight is None else d_weight.to(weight.dtype),
            *(None,) * 5,
        )


def _sweep(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    temperature: float,
    chunk: int,
    entropy: bool,
    vocab: VocabShard | None,
) -> list[Tensor]:
    """This rank's sums for the K rows with a label: m, s = sum exp(z - m), z - m at the label (-inf where another rank
    has it) and, with `entropy`, sum exp(z - m) (z - m). Each [K]; nothing is sent."""
    parts: list[list[Tensor]] = []
    with exact_math(hidden.device):
        for rows in RowChunks(labels >= 0, chunk):
            z = hidden[rows].to(head.dtype) @ head.T
            if temperature != 1.0:
                z /= temperature
            top, _ = maximum(z)
            z -= top[:, None]
            found = [top, _at_label(z, labels[rows], vocab)]
            if entropy:
                e = z.exp()
                found += [e.sum(1), e.mul_(z).sum(1)]
            else:
                found.append(z.exp_().sum(1))
            parts.append(found)
    top, at_label, *sums = (torch.cat(column) for column in zip(*parts, strict=True))
    return [top, sums[0], at_label, *sums[1:]]


def _columns(labels: Tensor, vocab: VocabShard | None) -> tuple[Tensor, Tensor | None]:
    """(the labels' columns on this rank, any column where it has none; bool: it has one, None: it has all)."""
    if vocab is None:
        return labels, None
    column = labels - vocab.start
    here = (column >= 0) & (column < vocab.rows)
    return column.clamp(0, max(vocab.rows - 1, 0)), here


def _at_label(z: Tensor, labels: Tensor, vocab: VocabShard | None) -> Tensor:
    if z.shape[1] == 0:
        return z.new_full(labels.shape, -torch.inf)
    column, here = _columns(labels, vocab)
    value = z.gather(1, column[:, None]).squeeze(1)
    return value if here is None else value.masked_fill(~here, -torch.inf)


class _HiddenGradient:
    """The gradient of `hidden` [T, C]. Where ranks have a part of it each, only the rows with a label are kept, in the
    math dtype, and summed over the ranks before they are rounded. Which rows these are follows from the labels alone:
    the ranks could disagree on a gradient that is barely 0."""

    def __init__(self, hidden: Tensor, labels: Tensor, dtype: torch.dtype, vocab: VocabShard | None) -> None:
        self.vocab = vocab
        self.whole = torch.zeros_like(hidden)
        if vocab is not None:
            labelled = labels >= 0
            self.rows = labelled.nonzero().squeeze(1)
            self.place = labelled.cumsum(0) - 1
            self.part = hidden.new_zeros(self.rows.numel(), hidden.shape[1], dtype=dtype)

    def put(self, rows: Tensor | slice, values: Tensor) -> None:
        """Give rows their values; no row is given twice."""
        if self.vocab is None:
            self.whole[rows] = values.to(self.whole.dtype)
        else:
            self.part[self.place[rows]] = values

    def complete(self) -> Tensor:
        """[T, C] in the dtype of `hidden`; a collective where some row has a label."""
        if self.vocab is not None and self.rows.numel():
            self.whole[self.rows] = self.vocab.sum_(self.part).to(self.whole.dtype)
        return self.whole
