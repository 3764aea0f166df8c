"""Checks the attention kernels on a CUDA device: `make gpu-check`, or python -m benchmarks.gpu_check [--json FILE].

The tests run on CPUs, where Triton's kernels are interpreted and flash-attn is a stand-in. This compiles and runs them:
    parity    the Triton and the flash kernels, forward and every gradient, against the plain kernel in float32
    timing    pass i = 6 of a draft: branch attention against keys concatenated under one dense mask
    nccl      ring attention in an NCCL group of one rank: the group forms and the path runs, but no byte travels
Takes less than 5 minutes (an estimate), most of it Triton's compiler.
Exit code 0: all well; 1: a check failed; 2: nothing was checked.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import write_json
from lightning_spec.attention import branch_attention, cuda, kernels
from lightning_spec.attention.block import block_attention
from lightning_spec.attention.context import Context
from lightning_spec.attention.ring import ring_branch_attention
from lightning_spec.attention.zigzag import Shard, Zigzag

NO_DEVICE = "gpu-check: no CUDA device; nothing was checked"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Largest error allowed, in units of the tensor's largest value: exact float32 products, and bfloat16's rounding."""


@dataclass(frozen=True, slots=True)
class Shape:
    lengths: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 2
    dim: int = 128
    passes: int = 0
    window: int | None = None
    slots: int = 0
    """Slots of a block of a block drafter, at every 8th row; 0: branch attention on all rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report: an error against its bound, or a time and a peak of device memory."""

    check: str
    ok: bool
    error: float | None = None
    bound: float | None = None
    ms: float | None = None
    mib: float | None = None
    note: str = ""


Check = Callable[[], Row]

PARITY = {
    "causal": Shape((700, 1, 0, 900, 447)),
    "branch of 6": Shape((700, 1, 0, 900, 447), passes=6),
    "window, branch of 2": Shape((700, 1, 0, 900, 447), passes=2, window=100),
    "blocks of 8": Shape((700, 1, 0, 900, 447), slots=8),
    "blocks of 8, window": Shape((700, 1, 0, 900, 447), slots=8, window=5),
}
WIDTHS = {"head size 64": Shape((300, 200), dim=64), "head size 256": Shape((300, 200), dim=256, passes=1)}


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, trunk k, trunk v, then the branch's keys and values, or the block's."""
    rows = sum(shape.lengths)
    blocks = len(range(0, rows, 8))
    queries = (blocks, shape.slots) if shape.slots else (rows,)
    own = 2 * [(*queries, shape.kv_heads, shape.dim)] * (1 if shape.slots else shape.passes)
    sizes = [(*queries, shape.heads, shape.dim), *2 * [(rows, shape.kv_heads, shape.dim)], *own]
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for size in sizes]


def attention(shape: Shape, given: Sequence[Tensor]) -> Tensor:
    if shape.slots:
        anchors = torch.arange(0, sum(shape.lengths), 8)
        q, trunk_k, trunk_v, k, v = given
        return block_attention(q, trunk_k, trunk_v, k, v, anchors, shape.lengths, causal=False, window=shape.window)
    q, trunk_k, trunk_v, *branch = given
    half = shape.passes
    return branch_attention(q, trunk_k, trunk_v, branch[:half], branch[half:], shape.lengths, window=shape.window)


def out_and_grads(shape: Shape, given: Sequence[Tensor], kernel: kernels.Kernel) -> list[Tensor]:
    with kernels.use_kernel(kernel):
        out = attention(shape, given)
        generator = torch.Generator().manual_seed(1)
        upstream = torch.randn(out.shape, generator=generator).to(out.device, torch.bfloat16).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, given, upstream)]


def parity(name: str, shape: Shape, kernel: kernels.Kernel, dtype: torch.dtype, device: torch.device) -> Row:
    """`kernel` in `dtype` against the plain kernel in float32 on the same values."""
    given = inputs(shape, dtype, device)
    exact = [x.detach().float().requires_grad_() for x in given]
    wanted = out_and_grads(shape, exact, "plain")
    found = out_and_grads(shape, given, kernel)
    error = max(float((a.float() - b).abs().amax() / b.abs().amax()) for a, b in zip(found, wanted, strict=True))
    ok = error <= TOLERANCE[dtype] and all(bool(x.isfinite().all()) for x in found)
    return Row(f"parity {kernel} {str(dtype)[6:]}: {name}", ok, error, TOLERANCE[dtype])


def dense_mask(given: Sequence[Tensor]) -> Tensor:
    """One document, all rows: keys of trunk and passes concatenated, causal and diagonal parts in one boolean mask."""
    q, trunk_k, trunk_v, *branch = given
    rows, half = q.shape[0], len(branch) // 2
    parts = [torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()]
    parts += [torch.eye(rows, dtype=torch.bool, device=q.device)] * half
    k, v = torch.cat((trunk_k, *branch[:half])), torch.cat((trunk_v, *branch[half:]))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = torch.cat(parts, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def timing(
    name: str,
    kernel: kernels.Kernel | Literal["auto"],
    forward: Callable[[Sequence[Tensor]], Tensor],
    shape: Shape,
    device: torch.device,
) -> Row:
    """Median of 5 forwards and backwards in bfloat16 after 2 to warm up; peak of device memory beside the inputs."""
    given = inputs(shape, torch.bfloat16, device)
    cuda = device.type == "cuda"

    def once() -> float:
        start = time.perf_counter()
        with kernels.use_kernel(kernel):
            out = forward(given)
            torch.autograd.grad(out, given, torch.ones_like(out))
        if cuda:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) * 1e3

    once(), once()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    median = sorted(once() for _ in range(5))[2]
    peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20 if cuda else None
    return Row(f"timing: {name}", True, ms=median, mib=peak)


def ring(backend: str, device: torch.device) -> Row:
    """Ring attention with branch in a group of one rank equals branch attention; the group itself sums a number."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    try:
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        shape = Shape((300, 212), passes=2)
        given = inputs(shape, torch.float32, device)
        shard = Shard(Zigzag(shape.lengths, 1), Context(dist.group.WORLD, 0, 1))
        q, trunk_k, trunk_v, *branch = given
        out = ring_branch_attention(q, trunk_k, trunk_v, branch[:2], branch[2:], shard)
        found = [out.detach(), *torch.autograd.grad(out, given, torch.ones_like(out))]
        wanted_out = attention(shape, given)
        wanted = [wanted_out.detach(), *torch.autograd.grad(wanted_out, given, torch.ones_like(out))]
        error = max(float((a - b).abs().amax() / b.abs().amax()) for a, b in zip(found, wanted, strict=True))
        return Row(f"{backend}: ring in a group of one", error <= 2e-5 and float(total) == 1.0, error, 2e-5)
    finally:
        dist.destroy_process_group()


def checks(device: torch.device, intervals: kernels.Kernel, tokens: int, backend: str) -> list[tuple[str, Check]]:
    """What is checked, by name; nothing runs yet.

    Args:
        intervals: the interval kernel under test ("triton"; on a CPU "plain" shows that this file runs).
        tokens: T of the timings.
        backend: of the group of one rank.
    """
    found: list[tuple[str, Check]] = []
    for dtype in (torch.float32, torch.bfloat16):
        found += [(name, partial(parity, name, shape, intervals, dtype, device)) for name, shape in PARITY.items()]
    for name, shape in WIDTHS.items():
        found += [
            (name, partial(parity, name, shape, kernel, torch.bfloat16, device)) for kernel in (intervals, "flash")
        ]
    for name in ("causal", "branch of 6", "blocks of 8"):
        found.append((name, partial(parity, name, PARITY[name], "flash", torch.bfloat16, device)))
    shape = Shape((tokens,), heads=32, kv_heads=8, passes=6)
    branch = partial(attention, shape)
    found.append(("dense mask", partial(timing, "keys concatenated, dense mask", "auto", dense_mask, shape, device)))
    found += [(name, partial(timing, f"branch, {name}", name, branch, shape, device)) for name in ("flash", intervals)]
    return [*found, (backend, partial(ring, backend, device))]


def run(todo: Sequence[tuple[str, Check]]) -> list[Row]:
    """Every check, also after one that failed; prints each as it ends. A check that raises is a failed one."""
    print(f"{'check':52}{'':>7}{'error':>10}{'bound':>10}{'ms':>10}{'MiB':>9}")
    rows = []
    for name, check in todo:
        try:
            row = check()
        except Exception as fault:
            traceback.print_exc()
            row = Row(name, False, note=f"{type(fault).__name__}: {fault}")
        numbers = ((row.error, 10, ".1e"), (row.bound, 10, ".1e"), (row.ms, 10, ".2f"), (row.mib, 9, ".0f"))
        cells = "".join(" " * width if x is None else f"{x:{width}{form}}" for x, width, form in numbers)
        print(f"{row.check:52}{'ok' if row.ok else 'FAILED':>7}{cells}  {row.note.splitlines()[0] if row.note else ''}")
        rows.append(row)
    return rows


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--json", type=Path, default=Path("runs/bench/gpu.json"), help="where the figures go")
    options.add_argument("--tokens", type=int, default=8192, help="T of the timings (default 8192)")
    chosen = options.parse_args()
    chosen.threads = torch.get_num_threads()
    if not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    torch.backends.cuda.matmul.allow_tf32 = False  # the plain kernel is the measure
    facts = {
        "gpu": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "flash": "PyTorch" if cuda.flash_attn() is None else "flash-attn",
    }
    print(facts)
    start = time.perf_counter()
    rows = run(checks(device, "triton", chosen.tokens, "nccl"))
    failed = [row.check for row in rows if not row.ok]
    write_json(chosen.json, "gpu_check", chosen, device=facts, seconds=time.perf_counter() - start, checks=rows)
    print(
        f"{len(rows) - len(failed)} of {len(rows)} checks passed in {time.perf_counter() - start:.0f} s; {chosen.json}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
