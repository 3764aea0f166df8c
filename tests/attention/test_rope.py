"""Rotary embedding: the frequencies and factors of transformers (CASES B1, B2), and a rotation that is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from lightning_spec.attention import RotaryEmbedding, apply_rotary
from lightning_spec.errors import ConfigError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    LLAMA3,
    YARN,
    {**YARN, "attention_factor": 1.25},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    {**YARN, "beta_fast": 20, "beta_slow": 2},
    {**YARN, "truncate": False},
    {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 2.0},
]


def config(
    scaling: dict[str, Any] | None, theta: float = 500000.0, head_dim: int = 64, partial: float = 1.0
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={
            **(scaling or {"rope_type": "default"}),
            "rope_theta": theta,
            "partial_rotary_factor": partial,
        },
    )


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000.0])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_and_factor_equal_those_of_transformers(
    scaling: dict[str, Any] | None, head_dim: int, theta: float
) -> None:
    theirs = LlamaRotaryEmbedding(config(scaling, theta, head_dim))
    ours = RotaryEmbedding(head_dim, theta, 131072, scaling)
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    assert ours.attention_factor == theirs.attention_scaling


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, LLAMA3, YARN])
def test_partial_rotation_has_the_frequencies_of_transformers(scaling: dict[str, Any]) -> None:
    inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config(scaling, partial=0.5), torch.device("cpu"))
    ours = RotaryEmbedding(64, 500000.0, 131072, scaling, partial_factor=0.5)
    assert torch.equal(ours.inv_freq, inv_freq)
    assert ours.attention_factor == factor


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_queries_equal_those_of_transformers(scaling: dict[str, Any] | None, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 2, 0, 5, 130000])
    x = torch.randn(6, 4, 64).to(dtype)
    cos, sin = LlamaRotaryEmbedding(config(scaling))(x, positions[None])
    theirs, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    ours = apply_rotary(x, *RotaryEmbedding(64, 500000.0, 131072, scaling).cos_sin(positions, dtype))
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs[0].transpose(0, 1))


def test_channels_past_the_partial_factor_pass_through() -> None:
    x = torch.randn(5, 2, 16)
    rope = RotaryEmbedding(16, 10000.0, 512, partial_factor=0.5)
    turned = apply_rotary(x, *rope.cos_sin(torch.arange(5), torch.float32))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(
        turned[..., :8], apply_rotary(x[..., :8], *RotaryEmbedding(8, 10000.0, 512).cos_sin(torch.arange(5), x.dtype))
    )


def test_logits_depend_on_distance_only_in_float64() -> None:
    rope = RotaryEmbedding(32, 10000.0, 4096)
    q, k = torch.randn(2, 1, 3, 32, dtype=torch.float64)

    def logit(t: int, s: int) -> torch.Tensor:
        turned = [
            apply_rotary(x, *rope.cos_sin(torch.tensor([n]), torch.float64))
            for x, n in zip((q, k), (t, s), strict=True)
        ]
        return (turned[0] * turned[1]).sum(-1)

    torch.testing.assert_close(logit(7, 3), logit(3007, 3003), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_rotation_is_differentiable(partial: float) -> None:
    rope = RotaryEmbedding(8, 10000.0, 512, partial_factor=partial)
    cos, sin = rope.cos_sin(torch.arange(3), torch.float64)
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: apply_rotary(y, cos, sin), x)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters.rope_type"),
        ({"scaling": {"rope_type": "linear"}}, "rope_parameters.factor"),
        ({"scaling": {"rope_type": "linear", "factor": -1.0}}, "rope_parameters.factor"),
        ({"scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "rope_parameters.high_freq_factor"),
        ({"scaling": {**YARN, "original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
        ({"partial_factor": 0.2}, "partial_rotary_factor"),
        ({"theta": 0.0}, "rope_theta"),
    ],
)
def test_bad_settings_are_refused_with_the_key_to_change(arguments: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        RotaryEmbedding(**{"head_dim": 16, "theta": 10000.0, "max_positions": 512, **arguments})
