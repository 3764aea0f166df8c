"""Rotary position embedding, in the half-rotation layout of Hugging Face, with the scalings that engines serve."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_spec.errors import ConfigError

_KEY = "rope_parameters"
KNOWN_SCALINGS = ("default", "linear", "llama3", "yarn")


class RotaryEmbedding:
    """Rotary embedding of one attention: frequencies and the factor on cos and sin. Holds no parameters or buffers.

    The frequencies equal transformers' `ROPE_INIT_FUNCTIONS` bit for bit (they are float32 there, whatever the model's
    type), so a draft trained here and a draft served by vLLM rotate alike (CASES B2).

    Args:
        head_dim: D. Only the first `int(D * partial_factor)` channels are rotated.
        theta: base of the wavelengths.
        max_positions: the model's context length; yarn and llama3 use it where `original_max_position_embeddings` is
            missing, yarn also where `factor` is missing. It is not a limit on positions.
        scaling: None, or the `rope_scaling` / `rope_parameters` dict of a config.json; `rope_type` (or `type`) is one
            of default, linear, llama3, yarn.
        partial_factor: share of the channels that is rotated.

    Raises:
        ConfigError: unknown type, missing or non-positive value, odd rotary width.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        max_positions: int,
        scaling: dict[str, Any] | None = None,
        partial_factor: float = 1.0,
    ) -> None:
        self.head_dim, self.max_positions = head_dim, max_positions
        self.rotary_dim = int(head_dim * partial_factor)
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > head_dim:
            raise ConfigError(
                "the rotated part of a head must have an even width",
                found=f"head_dim {head_dim} * partial_rotary_factor {partial_factor} = {self.rotary_dim}",
                needed=f"an even number from 2 to {head_dim}",
                key="partial_rotary_factor",
            )
        if not theta > 0:
            raise ConfigError("bad RoPE base", found=theta, needed="a positive number", key="rope_theta")
        scaling = dict(scaling or {})
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in KNOWN_SCALINGS:
            raise ConfigError(
                "unsupported RoPE scaling", found=kind, needed=f"one of {KNOWN_SCALINGS}", key=f"{_KEY}.rope_type"
            )
        self.theta, self.kind, self.attention_factor = float(theta), str(kind), 1.0
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64).to(torch.float32) / self.rotary_dim
        wavelengths = self.theta**exponents  # over 2 pi
        if kind == "default":
            self.inv_freq = 1.0 / wavelengths
        elif kind == "linear":
            self.inv_freq = 1.0 / wavelengths / _positive(scaling, "factor")
        elif kind == "llama3":
            self.inv_freq = _llama3(1.0 / wavelengths, scaling, max_positions)
        else:
            self.inv_freq, self.attention_factor = _yarn(wavelengths, self.theta, scaling, max_positions)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles at `positions`.

        Args:
            positions: [T] integers, position inside the document (plus the pass, for a draft's branch).
            dtype: of the result. Angles are float32 as in transformers, or float64 for float64 results.

        Returns:
            (cos, sin), each [T, rotary_dim], the attention factor included.
        """
        angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        inv_freq = self.inv_freq.to(device=positions.device, dtype=angle_dtype)
        angles = positions.to(angle_dtype)[:, None] * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `cos.shape[-1]` channels of every head of `x`; the rest pass through.

    Args:
        x: [T, H, D].
        cos, sin: [T, rot] with rot <= D, from `RotaryEmbedding.cos_sin`.

    Returns:
        [T, H, D] in the dtype of `x`.
    """
    rot = cos.shape[-1]
    turned = x if rot == x.shape[-1] else x[..., :rot]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
    return turned if rot == x.shape[-1] else torch.cat((turned, x[..., rot:]), dim=-1)


def _positive(scaling: dict[str, Any], name: str, default: float | None = None) -> float:
    value = scaling.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"bad RoPE {name}", found=value, needed="a positive number", key=f"{_KEY}.{name}")
    return value


def _llama3(inv_freq: Tensor, scaling: dict[str, Any], max_positions: int) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor = _positive(scaling, "factor")
    low, high = _positive(scaling, "low_freq_factor"), _positive(scaling, "high_freq_factor")
    if not high > low:
        raise ConfigError(
            "bad RoPE high_freq_factor",
            found=high,
            needed=f"more than low_freq_factor ({low})",
            key=f"{_KEY}.high_freq_factor",
        )
    context = _positive(scaling, "original_max_position_embeddings", max_positions)
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > context / low, inv_freq / factor, inv_freq)
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * stretched / factor + smooth * stretched
    is_between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(is_between, between, stretched)


def _yarn(wavelengths: Tensor, theta: float, scaling: dict[str, Any], max_positions: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, sections 3.2 to 3.4), with DeepSeek's mscale options."""
    context = _positive(scaling, "original_max_position_embeddings", max_positions)
    factor = _positive(scaling, "factor", max_positions / context)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
        else:
            attention_factor = _mscale(factor)
    dim = 2 * len(wavelengths)

    def dim_of(rotations: float) -> float:
        return (dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dim_of(scaling.get("beta_fast") or 32), dim_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep, float(attention_factor)


def _mscale(factor: float, mscale: float = 1) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
