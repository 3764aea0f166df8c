"""One rank of test_block_attention_cp.py: `python block_worker.py OUT`. Writes OUT/RANK.json.

Every rank makes the same whole batch from a seed, computes the explicit dense result of all of it in float64, and
compares what it got for its own anchors and its own trunk rows.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_spec.attention import kernels
from lightning_spec.attention.block import moved_block_attention, ring_block_attention
from lightning_spec.attention.context import TRAFFIC, Context
from lightning_spec.attention.zigzag import Shard, Zigzag
from tests.attention.block_reference import block_inputs, dense_block_attention

FUNCTIONS: dict[str, Callable[..., Tensor]] = {"ring": ring_block_attention, "moved": moved_block_attention}


@dataclass
class Case:
    lengths: Sequence[int]
    anchors: list[list[int]]
    """Global anchor rows of each rank."""
    slots: int = 4
    causal: bool = False
    window: int | None = None
    heads: int = 4
    kv_heads: int = 2
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-10


def cases(size: int) -> dict[str, Case]:
    def spread(anchors: list[int]) -> list[list[int]]:
        return [anchors[rank::size] for rank in range(size)]

    lengths = [13, 1, 0, 30, 6]
    some = [0, 5, 12, 13, 14, 20, 31, 43, 44, 47, 49]
    found = {
        f"{'causal' if causal else 'bidirectional'}, window {window}": Case(lengths, spread(some), 4, causal, window)
        for causal in (False, True)
        for window in (None, 2, 9)
    }
    found["one head for all"] = Case(lengths, spread(some), kv_heads=1)
    found["float32"] = Case(lengths, spread(some), dtype=torch.float32, tolerance=1e-5)
    found["bfloat16"] = Case(lengths, spread(some), dtype=torch.bfloat16, tolerance=6e-2)
    found["all anchors on one rank"] = Case(lengths, [[]] * (size - 1) + [some])
    found["anchors in no order"] = Case(lengths, spread(random.Random(0).sample(some, len(some))), causal=True)
    found["no anchors at all"] = Case(lengths, [[]] * size)
    found["fewer rows than ranks"] = Case([1, 1], spread([0, 1]))
    found["only blocks without trunk"] = Case(lengths, spread([0, 13, 14]))
    draw = random.Random(size)
    for n in range(12):
        lengths = [draw.choice([0, 1, 2, 7, 15, 33]) for _ in range(draw.randint(1, 5))] + [draw.randint(1, 40)]
        anchors = [[draw.randrange(sum(lengths)) for _ in range(draw.randint(0, 4))] for _ in range(size)]
        window = draw.choice([None, None, 1, 3, 10])
        found[f"random {n}"] = Case(lengths, anchors, draw.randint(1, 6), draw.random() < 0.5, window)
    return found


def run(case: Case, shard: Shard, function: Callable[..., Tensor], **options: Any) -> dict[str, float]:
    """Largest absolute errors of this rank's out and gradients."""
    everyone = [torch.tensor(anchors, dtype=torch.int64) for anchors in case.anchors]
    anchors, rows = torch.cat(everyone), shard.rows
    first = sum(len(anchors) for anchors in everyone[: shard.rank])
    own = slice(first, first + len(everyone[shard.rank]))
    given = block_inputs(
        *(len(anchors), case.slots, sum(case.lengths), case.heads, case.kv_heads, 8, case.dtype), seed=len(anchors)
    )
    exact = [x.double().requires_grad_() for x in given]
    wanted = dense_block_attention(*exact, anchors, case.lengths, case.causal, case.window)
    upstream = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    upstream = upstream.to(case.dtype)
    grads = torch.autograd.grad(wanted, exact, upstream.double())

    def mine(q: Tensor, trunk_k: Tensor, trunk_v: Tensor, block_k: Tensor, block_v: Tensor) -> list[Tensor]:
        return [q[own], trunk_k[rows], trunk_v[rows], block_k[own], block_v[own]]

    local = [x.clone().requires_grad_() for x in mine(*given)]
    out = function(*local, everyone[shard.rank], shard, causal=case.causal, window=case.window, **options)
    found = [out.detach(), *torch.autograd.grad(out, local, upstream[own])]
    right = [wanted[own].detach(), *mine(*grads)]
    names = ("out", "dq", "trunk dk", "trunk dv", "block dk", "block dv")
    assert all(a.dtype == case.dtype and a.shape == b.shape for a, b in zip(found, right, strict=True))
    return {
        name: float((a.double() - b).abs().amax()) if a.numel() else 0.0
        for name, a, b in zip(names, found, right, strict=True)
    }


def sent_bytes(context: Context, tokens: int, blocks: int) -> dict[str, int]:
    """Bytes that this rank sends in one forward and backward of `blocks` blocks of 8, 8/2 heads of 64, float32."""
    shard = Shard(Zigzag([tokens], context.size), context)
    each = blocks // context.size
    anchors = torch.arange(blocks).add(1).mul(tokens // blocks).sub(1)[context.rank :: context.size]
    given = block_inputs(each, 8, shard.rows.numel(), 8, 2, 64, torch.float32, context.rank)
    sent = {}
    for name, function in FUNCTIONS.items():
        local = [x.clone().requires_grad_() for x in given]
        before = TRAFFIC.sent
        function(*local, anchors, shard, causal=False).sum().backward()
        sent[name] = TRAFFIC.sent - before
    return sent


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    context = Context.of(dist.group.WORLD)
    report: dict[str, Any] = {"errors": {}, "tolerance": {}}
    for name, case in cases(context.size).items():
        shard = Shard(Zigzag(case.lengths, context.size), context)
        for mode, function in FUNCTIONS.items():
            report["errors"][f"{mode}: {name}"] = run(case, shard, function)
            report["tolerance"][f"{mode}: {name}"] = case.tolerance
            with kernels.use_kernel("reference"):
                report["errors"][f"{mode}, reference kernel: {name}"] = run(case, shard, function)
                report["tolerance"][f"{mode}, reference kernel: {name}"] = case.tolerance
        everyone = [torch.tensor(anchors, dtype=torch.int64) for anchors in case.anchors]
        report["errors"][f"anchors known: {name}"] = run(case, shard, moved_block_attention, everyone=everyone)
        report["tolerance"][f"anchors known: {name}"] = case.tolerance
    report["sent"] = sent_bytes(context, 16384, 64)
    (folder / f"{context.rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
