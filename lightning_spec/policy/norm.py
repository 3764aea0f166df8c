"""Root-mean-square norm for Megatron's layer spec, on every device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in float32 or better.

    Megatron's own torch norm refuses sequence parallelism. This one marks its weight instead, so that
    `finalize_model_grads` sums its gradient over the tensor-parallel ranks, each of which saw its own rows only.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        # On the CPU first, like every weight of the policy; build_policy moves the whole model.
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., C] -> [..., C] of the same dtype."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
