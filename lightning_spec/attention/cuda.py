"""Flash attention on CUDA behind the interface of `kernels.flash_attend`: the flash-attn package, else PyTorch's own.

Both take float16 and bfloat16, head sizes that are multiples of 8 up to 256, H a multiple of K, and no mask of keys.
This file cannot run without a GPU; the CPU tests check the flash-attn calls against a stand-in with its signature.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

MAX_HEAD_DIM = 256


def supports(q: Tensor) -> bool:
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= MAX_HEAD_DIM
    )


@functools.cache
def flash_attn() -> Any | None:
    """flash-attn's functional interface (2.7 or newer), or None where it is not installed."""
    try:
        return importlib.import_module("flash_attn.flash_attn_interface")
    except ImportError:
        return None


def forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q [B, H, Tq, D], k and v [B, K, Tk, D] -> out [B, H, Tq, D], lse [B, H, Tq] float32."""
    package = flash_attn()
    if package is None:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = package._flash_attn_forward(q, k, v, 0.0, scale, causal, -1, -1, 0.0, None, False)
    return out.transpose(1, 2), lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the joint out and lse."""
    lse = lse.contiguous()
    package = flash_attn()
    if package is None:
        seed = torch.zeros((), dtype=torch.int64)  # of the dropout that there is not
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed), scale=scale
        )
    grad, q, k, v, out = (x.transpose(1, 2).contiguous() for x in (grad, q, k, v, out))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    package._flash_attn_backward(*(grad, q, k, v, out, lse, dq, dk, dv, 0.0, scale, causal, -1, -1, 0.0, None, False))
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
