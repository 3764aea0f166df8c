"""Compiles the Triton kernels for compute capability 9.0, without a GPU; prints one JSON line of facts."""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_spec.attention import triton_kernels
from lightning_spec.attention.triton_launch import tile_of

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
KERNELS = ("forward_kernel", "query_grad_kernel", "key_grad_kernel", "branch_grad_kernel")


def compiled(kernel: Any, dtype: torch.dtype, dim: int, passes: int) -> dict[str, int]:
    tile = tile_of(torch.zeros(1, 1, dim, dtype=dtype))
    constants = {"GROUP": 4, "PASSES": passes, "DIM": dim, "BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "BLOCK_D": dim}
    signature: dict[str, Any] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.startswith("BRANCH"):
            signature[name] = (f"*{NAMES[dtype]}",) * passes
        elif name in ("LOW", "HIGH", "BLOCK_LOW", "BLOCK_HIGH", "FIRST", "LAST"):
            signature[name] = "*i32"
        elif name in ("LSE", "DELTA", "DQ", "DK", "DV"):
            signature[name] = "*fp32"
        elif name.isupper():
            signature[name] = f"*{NAMES[dtype]}"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, name in enumerate(kernel.arg_names)
        if name.endswith(("_row", "_head")) or (isinstance(signature[name], str) and signature[name].startswith("*"))
    }
    source = ASTSource(kernel, signature, {k: v for k, v in constants.items() if k in kernel.arg_names}, aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {"shared": result.metadata.shared, "cubin": len(result.asm["cubin"])}


if __name__ == "__main__":
    facts = {
        f"{name} {NAMES[dtype]}": compiled(getattr(triton_kernels, name), dtype, 128, 1)
        for dtype in NAMES
        for name in KERNELS
    }
    print(json.dumps(facts))
