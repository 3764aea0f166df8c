"""Runs the Triton kernels in Triton's interpreter against an explicit float64 softmax; prints one JSON line of errors.

Started by test_triton_kernels.py with TRITON_INTERPRET=1, which has to be set before triton is first imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_spec.attention import branch_attention, kernels, layout, reference, triton_launch
from lightning_spec.attention.attend import Work, attend, attend_backward, merge_
from lightning_spec.attention.triton_launch import Tile

SMALL = Tile(16, 16)
"""Several blocks of rows and of keys even at the sizes that the interpreter can do."""


def dense(
    q: Tensor, k: Tensor, v: Tensor, low: Tensor, high: Tensor, branch: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse) of [R, T + i] scores with kv heads expanded; differentiable by autograd."""
    group, half = q.shape[1] // k.shape[1], len(branch) // 2

    def wide(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, dim=1)

    keys = torch.arange(k.shape[0])
    hidden = (keys < low[:, None]) | (keys >= high[:, None])
    scores = torch.einsum("rhd,shd->rhs", q, wide(k)).mul(scale).masked_fill(hidden[:, None], -torch.inf)
    own = [(q * wide(x)).sum(-1, keepdim=True) * scale for x in branch[:half]]
    scores = torch.cat((scores, *own), dim=-1)
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
    out = torch.einsum("rhs,shd->rhd", weights[..., : k.shape[0]], wide(v))
    for j, x in enumerate(branch[half:]):
        out = out + weights[..., k.shape[0] + j, None] * wide(x)
    return out, lse


def finite(lse: Tensor) -> Tensor:
    """-inf (the row sees nothing) as a number that only -inf gives here."""
    return lse.detach().nan_to_num(neginf=-1e3)


def inputs(rows: int, keys: int, heads: int, kv_heads: int, dim: int, passes: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows + keys)
    shapes = [(rows, heads, dim)] + 2 * [(keys, kv_heads, dim)] + 2 * passes * [(rows, kv_heads, dim)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def errors(
    work: Work,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    passes: int = 0,
    dtype: torch.dtype = torch.float32,
    tile: Tile = SMALL,
    spread: bool = False,
) -> dict[str, float]:
    """Largest absolute difference of out, lse and every gradient. `spread`: inputs whose rows do not lie together."""
    given = inputs(work.rows, work.keys, heads, kv_heads, dim, passes, dtype)
    if spread:
        given = [torch.stack((x, x + 1), dim=1)[:, 0] for x in given]
    exact = [x.double().requires_grad_() for x in given]
    scale = dim**-0.5
    low, high = work.intervals()
    wanted, wanted_lse = dense(*exact[:3], low, high, exact[3:], scale)
    upstream = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad(wanted, exact, upstream.double(), allow_unused=True)
    q, k, v, *branch = given
    branch_k, branch_v = branch[:passes], branch[passes:]
    out, lse = triton_launch.attend(q, k, v, work, scale=scale, branch_k=branch_k, branch_v=branch_v, tile=tile)
    dq, dk, dv, branch_grads = triton_launch.attend_backward(
        upstream, q, k, v, out, lse, work, scale=scale, branch_k=branch_k, branch_v=branch_v, tile=tile
    )
    found = {"out": (out, wanted), "lse": (finite(lse), finite(wanted_lse))}
    names = ["dq", "dk", "dv", *(f"branch {n}" for n in range(2 * passes))]
    for name, mine, right in zip(names, (dq, dk, dv, *branch_grads), grads, strict=True):
        found[name] = (mine, torch.zeros_like(mine) if right is None else right)
    assert all(mine.isfinite().all() for mine, _ in found.values())
    return {
        name: float((mine.double() - right.double()).detach().abs().amax()) for name, (mine, right) in found.items()
    }


def part_of_a_joint_softmax() -> dict[str, float]:
    """Two halves of the keys, each by `attend`, merged; the backward of each from the joint result."""
    q, k, v = inputs(21, 40, 4, 2, 16, 0, torch.float32)
    low, high = torch.zeros(21, dtype=torch.int64), torch.arange(20, 41)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wanted, _ = dense(*exact, low, high, [], 0.25)
    grads = torch.autograd.grad(wanted, exact, torch.ones_like(wanted))
    halves = [slice(0, 23), slice(23, 40)]
    works = [Work.of_intervals(low, high.clamp(max=23), 23), Work.of_intervals(low, high - 23, 17)]
    out, lse = attend(q, k[halves[0]], v[halves[0]], works[0], scale=0.25)
    merge_(out, lse, *attend(q, k[halves[1]], v[halves[1]], works[1], scale=0.25))
    dq, keys, values = torch.zeros_like(q), [], []
    for half, work in zip(halves, works, strict=True):
        part = attend_backward(torch.ones_like(q), q, k[half], v[half], out, lse, work, scale=0.25)
        dq += part[0]
        keys.append(part[1])
        values.append(part[2])
    found = {"out": (out, wanted), "dq": (dq, grads[0])}
    found |= {"dk": (torch.cat(keys), grads[1]), "dv": (torch.cat(values), grads[2])}
    return {name: float((a.double() - b.double()).detach().abs().amax()) for name, (a, b) in found.items()}


def whole_branch_attention() -> dict[str, float]:
    """`branch_attention` with the Triton kernel forced equals it with the reference kernel, gradients included."""
    results = []
    for kernel in ("triton", "reference"):
        given = [x.requires_grad_() for x in inputs(12, 30, 4, 2, 8, 2, torch.float32)]
        rows = torch.tensor([0, 3, 4, 5, 9, 10, 11, 12, 13, 20, 28, 29])
        with kernels.use_kernel(kernel):  # type: ignore[arg-type]
            out = branch_attention(*given[:3], given[3:5], given[5:], [9, 1, 20], window=7, rows=rows)
            results.append([out.detach(), *torch.autograd.grad(out, given, torch.ones_like(out))])
    return {str(n): float((a - b).abs().amax()) for n, (a, b) in enumerate(zip(*results, strict=True))}


def reference_equals_dense() -> dict[str, float]:
    q, k, v = (x.double().requires_grad_() for x in inputs(9, 14, 4, 2, 8, 0, torch.float32))
    low, high = torch.tensor([0, 0, 3, 5, 5, 0, 2, 13, 14]), torch.tensor([1, 14, 9, 5, 7, 14, 3, 14, 14])
    wanted, wanted_lse = dense(q, k, v, low, high, [], 0.3)
    grads = torch.autograd.grad(wanted, (q, k, v), torch.ones_like(wanted))
    out, lse = reference.attend(q, k, v, low, high, scale=0.3)
    mine = reference.attend_backward(torch.ones_like(q), q, k, v, out, lse, low, high, scale=0.3)
    pairs = zip((out, finite(lse), *mine), (wanted, finite(wanted_lse), *grads), strict=True)
    return {str(n): float((a - b).detach().abs().amax()) for n, (a, b) in enumerate(pairs)}


def cases() -> Iterator[tuple[str, dict[str, float]]]:
    packed = (20, 1, 0, 18, 5)
    runs = layout.whole_documents(packed)
    causal = Work.of_runs(runs, sum(packed))
    yield "float32 causal, packed", errors(causal)
    yield "float32 one head", errors(causal, heads=1, kv_heads=1, dim=8)
    yield "float32 six heads on two", errors(causal, heads=6, kv_heads=2)
    yield "float32 head size that is no power of two", errors(causal, dim=24)
    yield "float32 window", errors(Work.of_runs(runs, sum(packed), window=6))
    yield "float32 branch of one pass", errors(causal, passes=1)
    yield "float32 branch of six passes, grouped", errors(causal, passes=6, heads=4, kv_heads=1)
    yield "float32 branch and window", errors(Work.of_runs(runs, sum(packed), 3, 6), passes=3)
    yield (
        "float32 rows inside documents",
        errors(
            Work.of_runs(layout.selected_runs(packed, torch.tensor([3, 4, 5, 19, 20, 30, 43])), sum(packed)), passes=2
        ),
    )
    low = torch.tensor([0, 0, 5, 40, 40, 7, 90, 12, 0, 99])
    high = torch.tensor([0, 100, 6, 45, 40, 70, 91, 12, 1, 100])
    scattered = Work.of_intervals(low, high, 100)
    yield "float32 scattered intervals, some empty", errors(scattered)
    yield "float32 scattered intervals, some empty, branch", errors(scattered, passes=2)
    anchors = torch.tensor([3, 17, 17, 40, 64]).repeat_interleave(8)
    stairs = Work.of_intervals(torch.zeros_like(anchors), anchors, 70)
    yield "float32 staircase of block drafters", errors(stairs)
    yield "float32 uneven tile", errors(stairs, tile=Tile(16, 32))
    yield "float32 default tile", errors(causal, tile=triton_launch.tile_of(torch.zeros(1, 1, 16)), passes=2)
    yield "float32 strided inputs", errors(causal, passes=2, spread=True)
    with kernels.use_kernel("triton"):
        yield "float32 parts of a joint softmax", part_of_a_joint_softmax()
    yield "float32 branch_attention by use_kernel", whole_branch_attention()
    yield "float64 reference", reference_equals_dense()
    # The interpreter computes in numpy, which has no bfloat16.
    yield "float16 causal, packed", errors(causal, dtype=torch.float16)
    yield "float16 branch", errors(causal, passes=2, dtype=torch.float16)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(dict(cases())), file=sys.stdout)
