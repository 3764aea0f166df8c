"""Attention that returns its log-sum-exp, and whose backward takes the output and log-sum-exp of the *joint* softmax.

Four kernels, chosen by what is installed and where the tensors are; `use_kernel` forces one.
    flash      on a padded batch [B, H, L, D] (`flash_attend`): PyTorch's on the CPU, flash-attn or PyTorch's on CUDA
    triton     on packed rows that each see one interval of the keys, on CUDA (`triton_launch.py`)
    plain      the same in matmuls over row chunks (`interval_attend`): any type, any device
    reference  one dense float64 softmax, for tests (`reference.py`)
But for the reference, nothing of size Tq x Tk is ever held, and kv heads are never expanded (H is a multiple of K).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_spec.attention import cuda

_LOG = logging.getLogger(__name__)

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_FLASH_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_CHUNK_ELEMENTS = 1 << 20
"""Elements of one chunk of scores in `interval_attend`; a row chunk is chosen to stay near it."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of log-sum-exps and of merging: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


Kernel = Literal["flash", "triton", "plain", "reference"]
_forced: Kernel | Literal["auto"] = "auto"


@contextlib.contextmanager
def use_kernel(name: Kernel | Literal["auto"]) -> Iterator[None]:
    """Inside, every attention of this process uses the kernel `name`, forward and backward: for tests and gpu-check.

    With "flash", work that flash kernels do not serve (windows, scattered rows) still goes to the plain kernel.

    Raises:
        ValueError: on use, where the kernel forced does not serve the tensors given.
    """
    global _forced
    if name not in ("auto", "flash", "triton", "plain", "reference"):
        raise ValueError(f"unknown attention kernel {name!r}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def choose(q: Tensor) -> Kernel:
    """Which kernel serves `q` [R, H, D] where no window is in force. What was chosen is logged once."""
    if _forced in ("auto", "flash"):
        if q.device.type == "cpu" and q.dtype in _FLASH_DTYPES:
            return _chosen("flash", q, "PyTorch's flash kernel")
        if cuda.supports(q):
            package = "PyTorch" if cuda.flash_attn() is None else "flash-attn"
            return _chosen("flash", q, f"{package}'s flash kernel")
        if _forced == "flash":
            raise ValueError(f"no flash kernel for {_described(q)}")
    return choose_intervals(q)


def choose_intervals(q: Tensor) -> Kernel:
    """Which kernel serves `q` [R, H, D] where rows see intervals that are no items of a flash kernel."""
    if _forced == "reference":
        return _chosen("reference", q, "the dense float64 reference")
    launch = triton_launch() if _forced == "triton" or (_forced == "auto" and q.is_cuda) else None
    if launch is not None and launch.supports(q):
        return _chosen("triton", q, "Triton's interval kernel")
    if _forced == "triton":
        why = "Triton is not installed" if launch is None else "it serves 16 and 32 bit floats on CUDA, up to D = 256"
        raise ValueError(f"no Triton kernel for {_described(q)}: {why}")
    return _chosen("plain", q, "plain matmuls over chunks for intervals")


@functools.cache
def triton_launch() -> Any | None:
    """The module `triton_launch`, or None where Triton is not installed. Triton is imported here and nowhere else."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return None
    return importlib.import_module("lightning_spec.attention.triton_launch")


def _described(q: Tensor) -> str:
    return f"{q.dtype} with head size {q.shape[-1]} on {q.device.type}"


def _chosen(kernel: Kernel, q: Tensor, words: str) -> Kernel:
    _log_once(f"{_described(q)}: {words}")
    return kernel


@functools.cache
def _log_once(message: str) -> None:
    _LOG.info("attention kernel for %s", message)


def flash_attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of a padded batch by a flash kernel.

    Args:
        q: [B, H, Tq, D];  k, v: [B, K, Tk, D], K divides H. Any strides with D contiguous.
        causal: query row r sees keys 0..r (top-left aligned).
        key_mask: [B, 1, 1, Tk] bool, True where the key exists; on the CPU only. Every row must have one: for a fully
            masked row the kernel returns lse = 0 where -inf is meant.

    Returns:
        out [B, H, Tq, D]; lse [B, H, Tq] in the accumulation dtype.
    """
    if q.is_cuda:
        return cuda.forward(q, k, v, scale=scale, causal=causal)
    return _FLASH(q, k, v, 0.0, causal, attn_mask=_additive(key_mask, q), scale=scale)


def flash_attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `flash_attend`'s keys, given `out` and `lse` of the joint softmax that they are a part of."""
    if q.is_cuda:
        return cuda.backward(grad, q, k, v, out, lse, scale=scale, causal=causal)
    return _FLASH_BACKWARD(grad, q, k, v, out, lse, 0.0, causal, attn_mask=_additive(key_mask, q), scale=scale)


def _additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The kernel wants the mask added to the logits, in the dtype of q; it broadcasts without a copy."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)


def interval_attend(
    q: Tensor, k: Tensor, v: Tensor, low: Tensor, high: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention in which query row r sees the keys [low[r], high[r]), by row chunks in plain PyTorch.

    Args:
        q: [R, H, D];  k, v: [T, K, D], K divides H.
        low, high: [R] int64 on the CPU; an empty interval gives out = 0, lse = -inf.

    Returns:
        out [R, H, D] and lse [R, H], both in the accumulation dtype.
    """
    rows, heads, dim = q.shape
    acc = accumulation_dtype(q.dtype)
    out = torch.zeros(rows, heads, dim, dtype=acc, device=q.device)
    lse = torch.full((rows, heads), -torch.inf, dtype=acc, device=q.device)
    for first, last, start, stop in _chunks(low, high, heads):
        scores, _ = _scores(q, k, low, high, (first, last, start, stop), scale, acc)
        part = torch.logsumexp(scores, dim=-1)
        weights = (scores - _finite(part)[..., None]).exp_()
        lse[first:last] = _rows(part[..., None], last - first)[..., 0]
        out[first:last] = _rows(weights @ v[start:stop].to(acc).transpose(0, 1), last - first)
    return out, lse


def interval_attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    low: Tensor,
    high: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [R, H, D], dk, dv [T, K, D]) in the accumulation dtype, from the joint `out` [R, H, D] and `lse` [R, H]."""
    acc = accumulation_dtype(q.dtype)
    kv_heads = k.shape[1]
    dq = torch.zeros(q.shape, dtype=acc, device=q.device)
    dk = torch.zeros(k.shape, dtype=acc, device=q.device)
    dv = torch.zeros(v.shape, dtype=acc, device=q.device)
    for first, last, start, stop in _chunks(low, high, q.shape[1]):
        scores, q_chunk = _scores(q, k, low, high, (first, last, start, stop), scale, acc)
        weights = (scores - _finite(_fold(lse[first:last, :, None], kv_heads))).exp_()
        do = _fold(grad[first:last].to(acc), kv_heads)
        delta = (do * _fold(out[first:last].to(acc), kv_heads)).sum(-1, keepdim=True)
        dv[start:stop] += (weights.transpose(1, 2) @ do).transpose(0, 1)
        ds = weights.mul_((do @ v[start:stop].to(acc).permute(1, 2, 0)).sub_(delta)).mul_(scale)
        dq[first:last] = _rows(ds @ k[start:stop].to(acc).transpose(0, 1), last - first)
        dk[start:stop] += (ds.transpose(1, 2) @ q_chunk).transpose(0, 1)
    return dq, dk, dv


def _chunks(low: Tensor, high: Tensor, heads: int) -> list[tuple[int, int, int, int]]:
    """(first row, last row, first key, last key) of each chunk of rows; rows without keys are skipped."""
    lows, highs = low.tolist(), high.tolist()
    chunks, first = [], 0
    while first < len(lows):
        start, stop, last = lows[first], highs[first], first + 1
        while last < len(lows):
            wider = min(start, lows[last]), max(stop, highs[last])
            if (last + 1 - first) > 16 and (last + 1 - first) * (wider[1] - wider[0]) * heads > _CHUNK_ELEMENTS:
                break
            start, stop, last = wider[0], wider[1], last + 1
        if stop > start:
            chunks.append((first, last, start, stop))
        first = last
    return chunks


def _scores(
    q: Tensor,
    k: Tensor,
    low: Tensor,
    high: Tensor,
    chunk: tuple[int, int, int, int],
    scale: float,
    acc: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Scaled, masked scores [K, g * rows, keys] of a chunk, and its queries [K, g * rows, D]."""
    first, last, start, stop = chunk
    kv_heads = k.shape[1]
    q_chunk = _fold(q[first:last].to(acc), kv_heads)
    scores = (q_chunk @ k[start:stop].to(acc).permute(1, 2, 0)).mul_(scale)
    keys = torch.arange(start, stop, device=q.device)
    low, high = low[first:last, None].to(q.device), high[first:last, None].to(q.device)
    hidden = (keys < low) | (keys >= high)
    scores.view(kv_heads, -1, last - first, stop - start).masked_fill_(hidden, -torch.inf)
    return scores, q_chunk


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """[rows, H, X] -> [K, g * rows, X]."""
    rows, heads, width = x.shape
    return x.view(rows, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3).reshape(kv_heads, -1, width)


def _rows(x: Tensor, rows: int) -> Tensor:
    """[K, g * rows, X] -> [rows, H, X], the inverse of `_fold`."""
    kv_heads, _, width = x.shape
    return x.view(kv_heads, -1, rows, width).permute(2, 0, 1, 3).reshape(rows, -1, width)


def _finite(lse: Tensor) -> Tensor:
    """exp(-inf - lse) must be 0, not nan, where a row has no keys."""
    return torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
