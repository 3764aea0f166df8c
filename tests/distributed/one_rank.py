"""A draft over ranks against one rank's plain run: loss, metrics and gradients of the same packed micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_spec.attention.context import Context
from lightning_spec.attention.zigzag import Shard, Zigzag
from lightning_spec.draft import Draft, DraftInputs
from lightning_spec.loss.vocab import VocabShard


def split(x: DraftInputs, context: Context) -> DraftInputs:
    """What a rank of `context` is given."""
    shard = Shard(Zigzag(tuple(x.lengths), context.size), context)
    names = ("features", "embeddings", "hidden")
    return replace(x, shard=shard, **{name: getattr(x, name)[shard.rows] for name in names})


def rows_of(x: DraftInputs) -> DraftInputs:
    """What a context-parallel rank of the world is given."""
    return split(x, Context.of(dist.group.WORLD))


def columns_of(x: DraftInputs) -> DraftInputs:
    """What a tensor-parallel rank of the world is given."""
    assert dist.group.WORLD is not None
    vocab = VocabShard.split(x.policy_head.shape[0], dist.group.WORLD)
    return replace(x, policy_head=x.policy_head[vocab.start : vocab.stop], policy_embedding=None, vocab=vocab)


def learn(draft: Draft, x: DraftInputs, totals: Any, loss: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(loss and metric sums, gradients of what is trained), by name."""
    draft.zero_grad(set_to_none=True)
    out = draft(x, loss, totals)
    (out.loss * 2.0).backward()
    sums = {"loss": out.loss.detach().double()}
    for name, (num, den, _) in out.metrics.items():
        sums[name] = torch.stack([num.double(), den.double()])
    grads = {}
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} got no gradient"
            grads[name] = parameter.grad.double() / 2.0
    return sums, grads


def measure(draft: Draft, x: DraftInputs, totals: Any, loss: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `learn`, and the loss once more without a graph."""
    sums, grads = learn(draft, x, totals, loss)
    with torch.no_grad():
        sums["loss without grad"] = draft(x, loss, totals).loss.double()
    return sums, grads


def compare(
    name: str,
    wide: Draft,
    draft: Draft,
    x64: DraftInputs,
    x: DraftInputs,
    loss: Any,
    modes: Sequence[str],
    error: float,
) -> None:
    """Context parallelism in each of `modes`, then tensor parallelism. Sums over ranks are the whole, but for loss and
    metrics of tensor parallelism, which are whole on each.

    Args:
        wide, x64: the draft and its inputs in float64, for one rank.  draft, x: the same in the dtype of the example.
        error: that is allowed, relative to the largest value and at least to 1.
    """
    totals = {key: value + 2.0 for key, value in wide.counts(x64).items()}  # type: ignore[arg-type]
    with torch.no_grad():
        for a, b in zip(wide.parameters(), draft.parameters(), strict=True):
            a.copy_(b)
    want_sums, want_grads = measure(wide, x64, totals, loss)
    for layout in (*modes, "tensor"):
        draft.set_attention("auto" if layout == "tensor" else layout)  # type: ignore[arg-type]
        part = columns_of(x) if layout == "tensor" else rows_of(x)
        sums, grads = measure(draft, part, totals, loss)
        for found, want in ((sums, want_sums), (grads, want_grads)):
            assert found.keys() == want.keys()
            for key, value in found.items():
                if layout != "tensor" or found is grads:
                    dist.all_reduce(value)
                scale = max(1.0, float(want[key].abs().max()))
                off = float((value - want[key]).abs().max()) / scale
                assert off < error, f"{name}, {layout}: {key} is off by {off}"
