"""The plain statement of block attention (SEMANTICS.md section 2): one [A, B, T + B] softmax in PyTorch, autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dense_block_attention(
    q: Tensor,
    trunk_k: Tensor,
    trunk_v: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    anchors: Tensor,
    lengths: Sequence[int],
    causal: bool,
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    """q [A, B, H, D], trunk [T, K, D], block [A, B, K, D] -> [A, B, H, D]; kv heads expanded, every score held."""
    total, slots, group = trunk_k.shape[0], q.shape[1], q.shape[2] // trunk_k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    o, s, a = torch.arange(slots), torch.arange(total), anchors[:, None, None]
    trunk = (s < a) & (document[anchors][:, None, None] == document)  # [A, 1, T]
    trunk = trunk.expand(-1, slots, -1)
    block = (o <= o[:, None]) if causal else torch.ones(slots, slots, dtype=torch.bool)
    if window is not None:
        trunk = trunk & (a + o[:, None] - s < window)
        block = block & ((o[:, None] - o).abs() < window)

    def wide(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, dim=-2)

    scores = torch.einsum("abhd,shd->abhs", q, wide(trunk_k)).masked_fill(~trunk[:, :, None], -torch.inf)
    own = torch.einsum("abhd,aohd->abho", q, wide(block_k)).masked_fill(~block[:, None], -torch.inf)
    weights = (torch.cat((scores, own), dim=-1) * scale).softmax(-1)
    out = torch.einsum("abhs,shd->abhd", weights[..., :total], wide(trunk_v))
    return out + torch.einsum("abho,aohd->abhd", weights[..., total:], wide(block_v))


def block_inputs(
    anchors: int, slots: int, rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int
) -> list[Tensor]:
    """q, trunk k, trunk v, block k, block v."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(anchors, slots, heads, dim)] + 2 * [(rows, kv_heads, dim)] + 2 * [(anchors, slots, kv_heads, dim)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
