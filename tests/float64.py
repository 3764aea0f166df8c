"""Models of transformers in float64, as references."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Norm64(nn.Module):
    """transformers' norms compute in float32 whatever the model's dtype; this one does not."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def in_float64(model: Any) -> Any:
    """A transformers model that computes in float64 throughout (norms, rotary tables, softmax by SDPA)."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, Norm64(child))
    rotary = model.model.rotary_emb

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * rotary.inv_freq.double()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling

    rotary.forward = forward
    return model.double()
