"""What `benchmarks.cp` times: one draft step or one attention on this rank of a context-parallel group.

A case of several ranks is started with RANK and WORLD_SIZE in the environment (`benchmarks.common`) and forms a gloo
world of its own. Inputs are drawn whole on every rank from one seed, and cut by the zigzag layout.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_spec.attention.context import TRAFFIC, Context
from lightning_spec.attention.ring import ring_attention
from lightning_spec.attention.zigzag import Shard, Zigzag
from lightning_spec.draft.base import DraftInputs
from lightning_spec.draft.eagle3 import Eagle3
from lightning_spec.loss.draft import SoftCrossEntropy
from lightning_spec.shapes import PolicyShape

Step = Callable[[], dict[str, Any]]


def context() -> Context:
    """This process's group: of one, or of all WORLD_SIZE processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Context.single()
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    return Context.of(dist.group.WORLD)


def draft(
    mode: str,
    tokens: int,
    passes: int,
    prompt: int = 0,
    hidden: int = 256,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 64,
    inner: int = 1024,
    vocabulary: int = 4096,
    layers: int = 1,
    chunk_rows: int | None = None,
    small: bool = False,
) -> Step:
    """One forward and backward of `Eagle3` with `SoftCrossEntropy` on one document.

    Args:
        mode: stream, ring or ulysses; or dense: keys of all passes concatenated under one dense mask, on one rank.
        prompt: rows at the start that carry no loss.
        small: this is the small step that runs first, so that libraries are loaded before anything is measured.
    """
    here = context()
    sizes: dict[str, Any] = {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "inner": inner,
        "vocabulary": vocabulary,
        "layers": layers,
        "chunk_rows": chunk_rows,
    }
    if not small:
        draft(mode, 64, passes, small=True, **sizes)()
    if mode == "dense":
        from benchmarks.branch import dense
        from lightning_spec.draft import attention

        vars(attention)["branch_attention"] = dense
    shape = make_shape(tokens, hidden, heads, kv_heads, head_dim, inner, vocabulary)
    model = Eagle3(
        num_passes=passes,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        own_head=True,
        chunk_rows=chunk_rows,
    )
    model.build(shape, seed=0)
    model.set_attention("ring" if mode == "dense" else mode)  # type: ignore[arg-type]
    inputs = make_inputs(tokens, prompt, hidden, vocabulary, here)
    loss = SoftCrossEntropy()
    totals = {f"draft_pass_{i}": float(tokens - prompt) for i in range(passes)}

    def run() -> dict[str, Any]:
        model.zero_grad(set_to_none=True)
        before = TRAFFIC.sent
        out = model(inputs, loss, totals)
        out.loss.backward()
        sent, value, square = TRAFFIC.sent - before, out.loss.detach().double(), 0.0
        for grad in (p.grad for p in model.parameters() if p.grad is not None):
            if here.group is not None:  # as Megatron's buffers do
                dist.all_reduce(grad, group=here.group)
            square += float(torch.linalg.vector_norm(grad)) ** 2
        if here.group is not None:
            dist.all_reduce(value, group=here.group)
        return {"loss": float(value), "gradient_norm": square**0.5, "sent": sent}

    return run


def make_shape(
    tokens: int, hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocabulary: int
) -> PolicyShape:
    """A Llama of eight layers with twice as many positions as `tokens`."""
    return PolicyShape.from_hf(
        {
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": 8,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 2 * tokens,
        }
    )


def make_inputs(tokens: int, prompt: int, hidden: int, vocabulary: int, here: Context) -> DraftInputs:
    generator = torch.Generator().manual_seed(0)
    shard = Shard(Zigzag((tokens,), here.size), here)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    head = normal(vocabulary, hidden) / hidden**0.5
    ids = torch.randint(vocabulary, (tokens,), generator=generator)
    positions = torch.arange(tokens)
    rows = shard.rows
    return DraftInputs(
        features=normal(tokens, 3 * hidden)[rows],
        embeddings=head[ids[rows]],
        hidden=normal(tokens, hidden)[rows],
        tokens=ids,
        positions=positions,
        lengths=[tokens],
        sampled=positions > prompt,
        stop=torch.zeros(tokens, dtype=torch.bool),
        policy_head=head,
        policy_embedding=head,
        shard=shard if here.size > 1 else None,
    )


def attention(tokens: int, heads: int, kv_heads: int, head_dim: int) -> Step:
    """Forward and backward of causal attention over one document, split over the ranks (`ring_attention`)."""
    here = context()
    if tokens > 64:
        attention(64, heads, kv_heads, head_dim)()
    shard = Shard(Zigzag((tokens,), here.size), here)
    generator = torch.Generator().manual_seed(here.rank)
    q, k, v, grad = (
        torch.randn(shard.rows.numel(), n, head_dim, generator=generator) for n in (heads, kv_heads, kv_heads, heads)
    )

    def run() -> dict[str, Any]:
        before = TRAFFIC.sent
        given = [x.requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(ring_attention(given[0], given[1], given[2], shard), given, grad)
        return {"sent": TRAFFIC.sent - before}

    return run
