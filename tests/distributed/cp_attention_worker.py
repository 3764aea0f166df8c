"""One rank of test_context_parallel_attention.py: `python cp_attention_worker.py OUT`, world as in launch.py.

Runs every claim one after another on the same group and writes OUT/rank.json: for each claim the number of checks and
what failed. Every rank makes the same global inputs and the one-device result, and compares its own rows with it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_spec.attention import (
    Context,
    RowExchange,
    Shard,
    Zigzag,
    branch_attention,
    gather_rows,
    gather_rows_with_grad,
    kernels,
    packed_attention,
    reduce_scatter_rows,
    ring_attention,
    ring_branch_attention,
    ulysses_attention,
    ulysses_branch_attention,
)
from lightning_spec.attention.context import TRAFFIC
from tests.distributed.claims import Claims

MODES = {"ring": (ring_attention, ring_branch_attention), "ulysses": (ulysses_attention, ulysses_branch_attention)}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 8e-2}


@dataclass
class Case:
    """One attention call; `rows` are global, None for all."""

    lengths: list[int]
    heads: int = 4
    kv_heads: int = 2
    passes: int = 0
    window: int | None = None
    rows: list[int] | None = None
    seed: int = 0
    dim: int = 8


def inputs_of(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Global q, k, v, branch k 1..i, branch v 1..i, and the gradient of the output."""
    generator = torch.Generator().manual_seed(case.seed)
    total = sum(case.lengths)
    count = total if case.rows is None else len(case.rows)
    shapes = [(count, case.heads, case.dim)] + 2 * [(total, case.kv_heads, case.dim)]
    shapes += 2 * case.passes * [(count, case.kv_heads, case.dim)] + [(count, case.heads, case.dim)]
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for s in shapes]


def run_case(claims: Claims, claim: str, mode: str, case: Case, dtype: torch.dtype, context: Context) -> None:
    """Output and every gradient of this rank's rows against one device in float64."""
    zigzag = Zigzag(case.lengths, context.size)
    shard = Shard(zigzag, context)
    everything = inputs_of(case, dtype)
    exact = [x.double().requires_grad_() for x in everything[:-1]]
    half = case.passes
    chosen = None if case.rows is None else torch.tensor(case.rows, dtype=torch.int64)
    out = branch_attention(
        *exact[:3], exact[3 : 3 + half], exact[3 + half :], case.lengths, window=case.window, rows=chosen
    )
    wanted = [out, *torch.autograd.grad(out, exact, everything[-1].double(), allow_unused=True, materialize_grads=True)]

    if chosen is None:
        places, rows = shard.rows, None
    else:
        places = (zigzag.owner[chosen] == context.rank).nonzero().flatten()
        rows = zigzag.local_index[chosen[places]]
    at = [places, shard.rows, shard.rows, *[places] * (2 * half)]
    mine = [x[index].clone().requires_grad_() for x, index in zip(everything, at, strict=False)]
    plain, branched = MODES[mode]
    if half == 0 and rows is None:
        out = plain(*mine, shard, window=case.window)
    else:
        out = branched(*mine[:3], mine[3 : 3 + half], mine[3 + half :], shard, window=case.window, rows=rows)
    grads = torch.autograd.grad(
        out, mine, everything[-1][places], allow_unused=True, materialize_grads=True
    )  # on every rank, with and without rows
    names = ["out", "dq", "dk", "dv", *(f"branch {n}" for n in range(2 * half))]
    for name, found, want, index in zip(names, [out, *grads], wanted, [places, *at], strict=True):
        claims.close(claim, found.detach(), want.detach()[index], TOLERANCE[dtype], f"{name} of {case}")
        claims.check(claim, found.dtype == dtype, f"{name} is {found.dtype}")


def random_case(draw: random.Random, grouping: list[tuple[int, int]]) -> Case:
    lengths = [draw.choice([0, 1, 1, 2, 3, draw.randint(0, 40)]) for _ in range(draw.randint(1, 6))]
    heads, kv_heads = draw.choice(grouping)
    total = sum(lengths)
    rows = None
    if total and draw.random() < 0.5:
        pool = range(total) if draw.random() < 0.5 else range(int(0.8 * total), total)  # prompts carry no loss
        rows = sorted(draw.sample(pool, draw.randint(0, len(pool))))
    window = draw.choice([None, None, draw.randint(1, 8), draw.randint(1, 45)])
    return Case(lengths, heads, kv_heads, draw.randint(0, 6), window, rows, draw.randint(0, 10**6))


def _random_cases(seed: str, count: int, grouping: list[tuple[int, int]]) -> list[Case]:
    draw = random.Random(seed)
    return [random_case(draw, grouping) for _ in range(count)]


def parity(claims: Claims, context: Context) -> None:
    hand_made = [
        Case([1]),
        Case([1, 1, 1], passes=2, window=2),
        Case([]),
        Case([0], passes=1),
        Case([17], passes=2, rows=[16]),  # one rank has the only query row
        Case([33, 5], passes=1, rows=[]),  # nobody has
        Case([50, 3], window=4, passes=3),
        Case([50, 3], window=4, passes=6),  # the window has left the trunk
        Case([64], window=40, passes=2),
    ]
    for mode, grouping in (("ring", [(4, 4), (4, 2), (6, 2), (3, 1)]), ("ulysses", [(4, 4), (8, 4), (12, 4)])):
        for dtype, name, cases in (
            (torch.float64, "float64", [*hand_made, *_random_cases(f"{mode} 64", 24, grouping)]),
            (torch.float32, "float32", [*hand_made, *_random_cases(f"{mode} 32", 8, grouping)]),
            (torch.bfloat16, "bfloat16", _random_cases(f"{mode} 16", 6, grouping)),
        ):
            for case in cases:
                if mode == "ulysses":
                    case = replace(case, heads=max(case.heads, 8), kv_heads=max(case.kv_heads, 4))
                run_case(claims, f"{mode} {name}", mode, case, dtype, context)
        # Longer documents, where float32 sums over all hops are far from what one hop gives.
        for seed in range(3):
            case = Case([230, 41, 7], 8, 4, seed, None, None, seed, 16)
            run_case(claims, f"{mode} float32 over long documents", mode, case, torch.float32, context)


def traffic(claims: Claims, context: Context) -> None:
    lengths, kv_heads, dim = [400], 2, 8

    def sent(window: int | None, dtype: torch.dtype) -> tuple[int, int]:
        shard = Shard(Zigzag(lengths, context.size), context)
        q, k, v = (torch.randn(shard.rows.numel(), h, dim, dtype=dtype, requires_grad=True) for h in (4, 2, 2))
        before = TRAFFIC.sent
        out = ring_attention(q, k, v, shard, window=window)
        middle = TRAFFIC.sent
        out.sum().backward()
        return middle - before, TRAFFIC.sent - middle

    def bytes_of(rows: int, size: int) -> int:
        return rows * 2 * kv_heads * dim * size

    held = sum(Zigzag(lengths, context.size).counts(context.rank))
    for dtype, size in ((torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2)):
        hops = context.size - 1
        forward, backward = sent(None, dtype)
        claims.check("traffic", forward == bytes_of(held * hops, size), f"ring forward sends {forward}")
        gradients = bytes_of(held * context.size, max(size, 4))  # 4 on the wire for bfloat16
        claims.check("traffic", backward == forward + gradients, f"ring backward sends {backward}")
        halo, halo_backward = sent(9, dtype)
        # Each chunk that another rank follows sends its last 8 rows; gradients of as many fetched rows return.
        ends = 1 if context.rank in (0, context.size - 1) else 2
        claims.check("traffic", halo == bytes_of(8 * ends, size), f"windowed forward sends {halo}")
        starts = 1 if context.rank in (0, context.size - 1) else 2
        wanted = halo + bytes_of(8 * starts, max(size, 4))
        claims.check("traffic", halo_backward == wanted, f"windowed backward sends {halo_backward}, not {wanted}")


class LargestTensor(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


def memory(claims: Claims, context: Context) -> None:
    heads, dim = 2, 16
    chunk = kernels._CHUNK_ELEMENTS
    kernels._CHUNK_ELEMENTS = 4096
    for window in (None, 20, 700):
        shard = Shard(Zigzag([1900, 148], context.size), context)
        held = shard.rows.numel()
        q, branch_k, branch_v = (torch.randn(held, h, dim, requires_grad=True) for h in (heads, 1, 1))
        k, v = (torch.randn(held, 1, dim, requires_grad=True) for _ in range(2))
        shard.layout.owner, shard.layout.local_index  # noqa: B018  (index lists of T numbers are no tensors of rows)
        ring_branch_attention(q, k, v, [branch_k], [branch_v], shard, window=window)  # makes the plan
        with LargestTensor() as mode:
            ring_branch_attention(q, k, v, [branch_k], [branch_v], shard, window=window).sum().backward()
        # Keys and values of a part, or its queries, are the largest; all keys would be context.size / 2 times that.
        limit = 2 * (held + 8) * dim * 4
        claims.check("memory", mode.largest <= limit, f"window {window}: a tensor of {mode.largest} bytes, {limit=}")
    kernels._CHUNK_ELEMENTS = chunk


def exchanges(claims: Claims, context: Context) -> None:
    size, rank = context.size, context.rank
    for seed in range(12):
        draw = random.Random(seed)
        total = draw.choice([0, 1, 5, 40])
        order = draw.sample(range(total), total)
        cuts = sorted(draw.randint(0, total) for _ in range(size - 1))
        have = [torch.tensor(order[a:b]).long() for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
        want = [
            torch.tensor(draw.choices(range(total), k=draw.choice([0, 3, 30])) if total else []).long() for _ in have
        ]
        for dtype in (torch.float64, torch.bfloat16):
            x = torch.randn(total, 3, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()
            upstream = [
                torch.randn(len(w), 3, generator=torch.Generator().manual_seed(n)).to(dtype) for n, w in enumerate(want)
            ]
            grad = sum(
                (
                    torch.zeros(total, 3).double().index_add(0, w, g.double())
                    for w, g in zip(want, upstream, strict=True)
                ),
                torch.zeros(total, 3).double(),
            )
            mine = x.detach()[have[rank]].requires_grad_()
            out = RowExchange(have, want, context).apply(mine)
            claims.check("exchange", torch.equal(out, x[want[rank]]), f"rows, {seed=}")
            (found,) = torch.autograd.grad(out, mine, upstream[rank])
            tolerance = 1e-12 if dtype == torch.float64 else 1e-2
            claims.close("exchange", found, grad[have[rank]], tolerance, f"gradient, {seed=}")
            claims.check("exchange", found.dtype == dtype, f"gradient is {found.dtype}")

    for lengths in ([], [1], [0, 3], [37, 1, 20], [64]):
        shard = Shard(Zigzag(lengths, size), context)
        total = sum(lengths)
        whole = torch.arange(total * 6, dtype=torch.float64).view(total, 2, 3)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8):
            x = whole.to(dtype)
            claims.check("gather", torch.equal(gather_rows(x[shard.rows], shard), x), f"{lengths} {dtype}")
        parts = [
            torch.randn(total, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(size)
        ]
        before = TRAFFIC.sent
        found = reduce_scatter_rows(parts[rank], shard)
        claims.close("gather", found, sum(parts, torch.zeros(total, 4).double())[shard.rows], 1e-12, f"sum {lengths}")
        rows = total - shard.layout.rows((rank) % size).numel()
        claims.check("gather", TRAFFIC.sent - before == rows * 32, f"a reduce-scatter of {lengths} sends {rows} rows")
        x = whole[shard.rows].clone().requires_grad_()
        gathered = gather_rows_with_grad(x, shard)
        (found,) = torch.autograd.grad(gathered, x, parts[rank][:, :3, None].transpose(1, 2).expand(total, 2, 3))
        wanted = sum((p[:, None, :3].expand(total, 2, 3) for p in parts), torch.zeros(total, 2, 3).double())
        claims.check("gather", torch.equal(gathered, whole), f"gather with gradient {lengths}")
        claims.close("gather", found, wanted[shard.rows], 1e-12, f"gradient of gather {lengths}")


def subgroup(claims: Claims, context: Context) -> None:
    """Ranks of messages count inside the group: here it holds the world's ranks in another order, or a part of them."""
    half = context.size // 2
    groups = [dist.new_group(list(range(first, first + half))) for first in (0, half)] if half > 1 else []
    if groups:
        part = Context.of(groups[context.rank // half])
        claims.check("subgroup", (part.size, part.rank) == (half, context.rank % half), f"{part}")
        for mode in MODES:
            run_case(
                claims, "subgroup", mode, Case([19, 4], 4, 4, 2, None, None, context.rank // half), torch.float64, part
            )
    alone = Context.of(dist.new_group([0])) if context.rank == 0 else (dist.new_group([0]), Context.of(None))[1]
    claims.check("subgroup", alone == Context.single(), f"{alone}")
    q, k, v = (torch.randn(23, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    out = ring_attention(q, k, v, Shard(Zigzag([19, 4], 1), alone), window=5)
    claims.close("subgroup", out, packed_attention(q, k, v, [19, 4], window=5), 1e-12, "one rank")


def main() -> None:
    folder = Path(sys.argv[1])
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=240))
    context, claims = Context.of(dist.group.WORLD), Claims()
    parts: list[Callable[[Claims, Context], None]] = [exchanges, parity, traffic, memory, subgroup]
    for part in parts:
        try:
            part(claims, context)
        except Exception:
            claims.check(part.__name__, False, traceback.format_exc())
            break
    (folder / f"{rank}.json").write_text(json.dumps({"failed": claims.failed, "checks": claims.checks}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
