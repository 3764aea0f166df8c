"""Launches the Triton kernels: tiles, the plan of a work (which blocks meet), and checks of what they serve.

Import this module only through `kernels.triton_launch()`: it needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from lightning_spec.attention import triton_kernels

if TYPE_CHECKING:
    from lightning_spec.attention.attend import Work

MAX_HEAD_DIM = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and keys of one block of scores (powers of two, 16 or more), warps and pipeline stages of a program."""

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """A work's intervals on the device, int32: by row, their unions by row block, and the row blocks of a key block."""

    low: Tensor
    high: Tensor
    block_low: Tensor
    block_high: Tensor
    first: Tensor
    """[key blocks]: first row block that sees a key of it; not below `last` where none does."""
    last: Tensor


def interpreted() -> bool:
    """Whether Triton runs in its interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def supports(q: Tensor) -> bool:
    """Whether these kernels can serve `q` [R, H, D]: 16 or 32 bit floats on CUDA (or interpreted), D <= 256."""
    return (q.is_cuda or interpreted()) and q.dtype in _DTYPES and q.shape[-1] <= MAX_HEAD_DIM


def tile_of(q: Tensor) -> Tile:
    """Tile for the type and head size of `q`.

    Not tuned on hardware: chosen by what the compiler reports for compute capability 9.0, so that shared memory stays
    under 99 KiB and registers do not spill in the loop over keys (the epilogue of six passes spills a little).
    """
    dim = q.shape[-1]
    warps = 4 if dim <= 64 else 8
    if q.dtype == torch.float32:  # exact float32 products do not use tensor cores
        return Tile(32 if dim <= 128 else 16, 32, warps)
    return Tile(64, 64, warps) if dim <= 128 else Tile(32, 32, warps)


def make_plan(low: Tensor, high: Tensor, keys: int, tile: Tile, device: torch.device) -> Plan:
    """`low` and `high` are [R] int64 on the CPU. Costs O(R + row blocks + key blocks); kept in `Work.plans`."""
    rows = low.numel()
    row_blocks, key_blocks = triton.cdiv(rows, tile.rows), triton.cdiv(keys, tile.keys)
    padding = row_blocks * tile.rows - rows
    lows = torch.cat((torch.where(high > low, low, keys), torch.full((padding,), keys))).view(row_blocks, tile.rows)
    highs = torch.cat((torch.where(high > low, high, 0), torch.zeros(padding, dtype=torch.int64)))
    block_low, block_high = lows.amin(1), highs.view(row_blocks, tile.rows).amax(1)
    first, last = torch.full((key_blocks,), row_blocks), torch.zeros(key_blocks, dtype=torch.int64)
    spans = list(zip((block_low // tile.keys).tolist(), (-(-block_high // tile.keys)).tolist(), strict=True))
    for block in range(row_blocks):
        last[spans[block][0] : spans[block][1]] = block + 1
    for block in reversed(range(row_blocks)):
        first[spans[block][0] : spans[block][1]] = block
    return Plan(*(x.to(device=device, dtype=torch.int32) for x in (low, high, block_low, block_high, first, last)))


def plan_of(work: Work, tile: Tile, device: torch.device) -> Plan:
    """The plan of `work`, made once."""
    key = ("triton", tile, device)
    if key not in work.plans:
        work.plans[key] = make_plan(*work.intervals(), work.keys, tile, device)
    plan: Plan = work.plans[key]
    return plan


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    work: Work,
    *,
    scale: float,
    branch_k: Sequence[Tensor] = (),
    branch_v: Sequence[Tensor] = (),
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """out [R, H, D] and lse [R, H] over the keys of `work` and the row's own branch keys, in one kernel.

    Args:
        branch_k, branch_v: i tensors [R, K, D]; row r sees row r of each. They are read where they lie.

    Returns:
        Without a branch, `out` is float32, to be merged with other parts; with one it has the type of q.
    """
    tile = tile or tile_of(q)
    q, k, v = _last_contiguous(q), _last_contiguous(k), _last_contiguous(v)
    branch_k, branch_v = _alike((*branch_k, *branch_v))
    rows, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype if branch_k else torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if not rows or not heads:
        return out, lse
    plan = plan_of(work, tile, q.device)
    with torch.cuda.device_of(q):
        triton_kernels.forward_kernel[(triton.cdiv(rows, tile.rows), heads)](
            *(q, k, v, branch_k or (q,), branch_v or (q,)),
            *(plan.low, plan.high, plan.block_low, plan.block_high, out, lse),
            *(rows, scale, *_strides(q), *_strides(k), *_strides(v), *_strides(*branch_k[:1]), *_strides(out), heads),
            GROUP=heads // k.shape[1],
            PASSES=len(branch_k),
            DIM=dim,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            BLOCK_D=_block_dim(dim),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out, lse


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    work: Work,
    *,
    scale: float,
    branch_k: Sequence[Tensor] = (),
    branch_v: Sequence[Tensor] = (),
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """(dq [R, H, D], dk, dv [T, K, D], all float32; gradients of branch_k then branch_v in the types of these).

    Args:
        grad, out: [R, H, D] and lse: [R, H], of the joint softmax that trunk and branch are a part of.
    """
    tile = tile or tile_of(q)
    grad, out, q, k, v = (_last_contiguous(x) for x in (grad, out, q, k, v))
    branch_k, branch_v = _alike((*branch_k, *branch_v))
    rows, heads, dim = q.shape
    dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (k, v))
    branch_grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (*branch_k, *branch_v)]
    if not rows or not heads:
        return dq, dk, dv, branch_grads
    lse = lse.float().contiguous()
    delta = torch.empty_like(lse)
    plan = plan_of(work, tile, q.device)
    group, row_blocks = heads // k.shape[1], triton.cdiv(rows, tile.rows)
    with torch.cuda.device_of(q):
        triton_kernels.query_grad_kernel[(row_blocks, heads)](
            *(grad, q, k, v, branch_k or (q,), branch_v or (q,), out, lse),
            *(plan.low, plan.high, plan.block_low, plan.block_high, dq, delta),
            *(rows, scale, *_strides(grad), *_strides(q), *_strides(k), *_strides(v)),
            *(*_strides(*branch_k[:1]), *_strides(out), heads),
            GROUP=group,
            PASSES=len(branch_k),
            DIM=dim,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            BLOCK_D=_block_dim(dim),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if k.shape[0]:
            triton_kernels.key_grad_kernel[(triton.cdiv(k.shape[0], tile.keys), k.shape[1])](
                *(grad, q, k, v, lse, delta, plan.low, plan.high),
                *(plan.block_low, plan.block_high, plan.first, plan.last),
                *(dk, dv, rows, k.shape[0], scale, *_strides(grad), *_strides(q), *_strides(k), *_strides(v), heads),
                GROUP=group,
                DIM=dim,
                BLOCK_M=tile.rows,
                BLOCK_N=tile.keys,
                BLOCK_D=_block_dim(dim),
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
        if branch_k:
            half = len(branch_k)
            triton_kernels.branch_grad_kernel[(row_blocks, k.shape[1])](
                *(grad, q, branch_k, branch_v, lse, delta, tuple(branch_grads[:half]), tuple(branch_grads[half:])),
                *(rows, scale, *_strides(grad), *_strides(q), *_strides(branch_k[0]), heads),
                GROUP=group,
                PASSES=half,
                DIM=dim,
                BLOCK_M=tile.rows,
                BLOCK_D=_block_dim(dim),
                num_warps=tile.warps,
            )
    return dq, dk, dv, branch_grads


def _block_dim(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*x: Tensor) -> tuple[int, int]:
    """Row and head stride of the tensor given, or (0, 0)."""
    return (x[0].stride(0), x[0].stride(1)) if x else (0, 0)


def _alike(branch: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The branch's keys and values with the strides of the first: as they are where all agree, else copied."""
    half = len(branch) // 2
    same = all(x.stride() == branch[0].stride() and x.stride(-1) == 1 for x in branch)
    branch = tuple(branch) if same else tuple(x.contiguous() for x in branch)
    return tuple(branch[:half]), tuple(branch[half:])
