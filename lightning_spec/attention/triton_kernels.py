"""Triton kernels for packed rows that each see one interval of the keys, with the branch merged as an epilogue.

Causal attention, windows, chunks of a ring and the staircase of block drafters are all intervals, so one kernel serves
them. Blocks of keys outside of the union of a row block's intervals are never loaded. A row's branch (SEMANTICS.md
section 3) is i more keys of its own: they enter the running softmax after the last block of trunk keys, while the
accumulator is still in registers. kv heads are never expanded; all sums are float32; no atomics, so runs repeat.

Branch keys and values arrive as tuples of i tensors [R, K, D] (i pointers): nothing is stacked or copied. A kernel is
compiled once for each i.

Import this module only through `kernels.triton_launch()`: it needs Triton. It runs on a GPU, and on the CPU in Triton's
interpreter (TRITON_INTERPRET=1 before the first import of triton), which is how the tests run it. See `make gpu-check`.

Names: a *tile* is BLOCK_M rows x BLOCK_N keys; LOW and HIGH [R] are the rows' intervals, BLOCK_LOW and BLOCK_HIGH their
unions by row block; strides are in elements and the last dimension is contiguous. Rows are int64 where they are
multiplied with a stride: T * H * D passes 2^31 at two million tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    Q, K, V, BRANCH_K, BRANCH_V, LOW, HIGH, BLOCK_LOW, BLOCK_HIGH, OUT, LSE,
    rows, scale, q_row, q_head, k_row, k_head, v_row, v_head, branch_row, branch_head, out_row, out_head, heads,
    GROUP: tl.constexpr, PASSES: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """OUT [R, H, D] and LSE [R, H] of one row block and one query head. Grid: (row blocks, H)."""
    block, head = tl.program_id(0), tl.program_id(1)
    kv = head // GROUP
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < rows
    at = row.to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = column < DIM
    tile = real[:, None] & inside
    q = tl.load(Q + at * q_row + head * q_head + column, mask=tile, other=0.0)
    low = tl.load(LOW + row, mask=real, other=0)[:, None]
    high = tl.load(HIGH + row, mask=real, other=0)[:, None]
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    last = tl.load(BLOCK_HIGH + block)
    for start in range(tl.load(BLOCK_LOW + block), last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        key_at = key.to(tl.int64)[:, None]
        key_tile = (key < last)[:, None] & inside
        k = tl.load(K + key_at * k_row + kv * k_head + column, mask=key_tile, other=0.0)
        v = tl.load(V + key_at * v_row + kv * v_head + column, mask=key_tile, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (key[None, :] >= low) & (key[None, :] < high)
        logits = tl.where(seen, logits, float("-inf"))
        new = tl.maximum(peak, tl.max(logits, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp(logits - safe[:, None])
        kept = tl.exp(peak - safe)
        total = total * kept + tl.sum(weights, 1)
        acc = acc * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new
    wide_q = q.to(tl.float32)
    for j in tl.static_range(PASSES):
        mine = at * branch_row + kv * branch_head + column
        branch_k = tl.load(BRANCH_K[j] + mine, mask=tile, other=0.0).to(tl.float32)
        branch_v = tl.load(BRANCH_V[j] + mine, mask=tile, other=0.0).to(tl.float32)
        logit = tl.sum(wide_q * branch_k, 1) * scale
        new = tl.maximum(peak, logit)
        kept, weight = tl.exp(peak - new), tl.exp(logit - new)
        total = total * kept + weight
        acc = acc * kept[:, None] + weight[:, None] * branch_v
        peak = new
    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[:, None]
    lse = tl.where(nothing, float("-inf"), peak + tl.log(tl.where(nothing, 1.0, total)))
    tl.store(OUT + at * out_row + head * out_head + column, acc.to(OUT.dtype.element_ty), mask=tile)
    tl.store(LSE + row.to(tl.int64) * heads + head, lse, mask=real)


@triton.jit
def query_grad_kernel(  # type: ignore[no-untyped-def]
    GRAD, Q, K, V, BRANCH_K, BRANCH_V, OUT, LSE, LOW, HIGH, BLOCK_LOW, BLOCK_HIGH, DQ, DELTA,
    rows, scale, grad_row, grad_head, q_row, q_head, k_row, k_head, v_row, v_head, branch_row, branch_head,
    out_row, out_head, heads,
    GROUP: tl.constexpr, PASSES: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """DQ [R, H, D] float32, contiguous, through trunk and branch; DELTA [R, H] = <do, out>. Grid: (row blocks, H)."""
    block, head = tl.program_id(0), tl.program_id(1)
    kv = head // GROUP
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < rows
    at = row.to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = column < DIM
    tile = real[:, None] & inside
    q = tl.load(Q + at * q_row + head * q_head + column, mask=tile, other=0.0)
    do = tl.load(GRAD + at * grad_row + head * grad_head + column, mask=tile, other=0.0)
    out = tl.load(OUT + at * out_row + head * out_head + column, mask=tile, other=0.0)
    at_head = row.to(tl.int64) * heads + head
    lse = tl.load(LSE + at_head, mask=real, other=0.0)[:, None]
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)[:, None]
    tl.store(DELTA + at_head[:, None], delta, mask=real[:, None])
    low = tl.load(LOW + row, mask=real, other=0)[:, None]
    high = tl.load(HIGH + row, mask=real, other=0)[:, None]
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    last = tl.load(BLOCK_HIGH + block)
    for start in range(tl.load(BLOCK_LOW + block), last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        key_at = key.to(tl.int64)[:, None]
        key_tile = (key < last)[:, None] & inside
        k = tl.load(K + key_at * k_row + kv * k_head + column, mask=key_tile, other=0.0)
        v = tl.load(V + key_at * v_row + kv * v_head + column, mask=key_tile, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (key[None, :] >= low) & (key[None, :] < high)
        weights = tl.exp(tl.where(seen, logits - lse, float("-inf")))
        ds = weights * (tl.dot(do.to(v.dtype), tl.trans(v), input_precision="ieee") - delta)
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    wide_q, wide_do = q.to(tl.float32), do.to(tl.float32)
    for j in tl.static_range(PASSES):
        mine = at * branch_row + kv * branch_head + column
        branch_k = tl.load(BRANCH_K[j] + mine, mask=tile, other=0.0).to(tl.float32)
        branch_v = tl.load(BRANCH_V[j] + mine, mask=tile, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(wide_q * branch_k, 1)[:, None] * scale - lse)
        dq += weight * (tl.sum(wide_do * branch_v, 1)[:, None] - delta) * branch_k
    tl.store(DQ + at * (heads * DIM) + head * DIM + column, dq * scale, mask=tile)


@triton.jit
def key_grad_kernel(  # type: ignore[no-untyped-def]
    GRAD, Q, K, V, LSE, DELTA, LOW, HIGH, BLOCK_LOW, BLOCK_HIGH, FIRST, LAST, DK, DV,
    rows, keys, scale, grad_row, grad_head, q_row, q_head, k_row, k_head, v_row, v_head, heads,
    GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """DK, DV [T, K, D] float32, contiguous, of one key block and one kv head: row blocks FIRST to LAST - 1 may see it.

    Grid: (key blocks, K).
    """
    block, kv = tl.program_id(0), tl.program_id(1)
    start = block * BLOCK_N
    key = start + tl.arange(0, BLOCK_N)
    key_at = key.to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = column < DIM
    key_tile = (key < keys)[:, None] & inside
    k = tl.load(K + key_at * k_row + kv * k_head + column, mask=key_tile, other=0.0)
    v = tl.load(V + key_at * v_row + kv * v_head + column, mask=key_tile, other=0.0)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    first, last = tl.load(FIRST + block), tl.load(LAST + block)
    for head in range(kv * GROUP, kv * GROUP + GROUP):
        for row_block in range(first, last):
            block_low, block_high = tl.load(BLOCK_LOW + row_block), tl.load(BLOCK_HIGH + row_block)
            if (block_low < start + BLOCK_N) & (block_high > start):
                row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
                real = row < rows
                at = row.to(tl.int64)[:, None]
                tile = real[:, None] & inside
                q = tl.load(Q + at * q_row + head * q_head + column, mask=tile, other=0.0)
                do = tl.load(GRAD + at * grad_row + head * grad_head + column, mask=tile, other=0.0)
                at_head = row.to(tl.int64) * heads + head
                lse = tl.load(LSE + at_head, mask=real, other=0.0)[:, None]
                delta = tl.load(DELTA + at_head, mask=real, other=0.0)[:, None]
                low = tl.load(LOW + row, mask=real, other=0)[:, None]
                high = tl.load(HIGH + row, mask=real, other=0)[:, None]
                logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
                seen = (key[None, :] >= low) & (key[None, :] < high)
                weights = tl.exp(tl.where(seen, logits - lse, float("-inf")))
                do = do.to(v.dtype)
                dv += tl.dot(tl.trans(weights.to(v.dtype)), do, input_precision="ieee")
                ds = weights * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta)
                dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee")
    at_key = key_at * (heads // GROUP * DIM) + kv * DIM + column
    tl.store(DK + at_key, dk * scale, mask=key_tile)
    tl.store(DV + at_key, dv, mask=key_tile)


@triton.jit
def branch_grad_kernel(  # type: ignore[no-untyped-def]
    GRAD, Q, BRANCH_K, BRANCH_V, LSE, DELTA, BRANCH_DK, BRANCH_DV,
    rows, scale, grad_row, grad_head, q_row, q_head, branch_row, branch_head, heads,
    GROUP: tl.constexpr, PASSES: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of the branch tensors, each [R, K, D], contiguous, in its own type. Grid: (row blocks, K)."""
    block, kv = tl.program_id(0), tl.program_id(1)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < rows
    at = row.to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    tile = real[:, None] & (column < DIM)
    mine = at * branch_row + kv * branch_head + column
    target = at * (heads // GROUP * DIM) + kv * DIM + column
    for j in tl.static_range(PASSES):
        branch_k = tl.load(BRANCH_K[j] + mine, mask=tile, other=0.0).to(tl.float32)
        branch_v = tl.load(BRANCH_V[j] + mine, mask=tile, other=0.0).to(tl.float32)
        dk = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for head in range(kv * GROUP, kv * GROUP + GROUP):
            q = tl.load(Q + at * q_row + head * q_head + column, mask=tile, other=0.0).to(tl.float32)
            do = tl.load(GRAD + at * grad_row + head * grad_head + column, mask=tile, other=0.0).to(tl.float32)
            at_head = row.to(tl.int64) * heads + head
            lse = tl.load(LSE + at_head, mask=real, other=0.0)
            delta = tl.load(DELTA + at_head, mask=real, other=0.0)
            weight = tl.exp(tl.sum(q * branch_k, 1) * scale - lse)
            dv += weight[:, None] * do
            dk += (weight * (tl.sum(do * branch_v, 1) - delta) * scale)[:, None] * q
        tl.store(BRANCH_DK[j] + target, dk.to(BRANCH_DK[j].dtype.element_ty), mask=tile)
        tl.store(BRANCH_DV[j] + target, dv.to(BRANCH_DV[j].dtype.element_ty), mask=tile)
