"""Tiny policies and packed micro-batches for the draft's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lightning_spec.draft import DraftInputs
from lightning_spec.shapes import PolicyShape


def _shape(**change: Any) -> PolicyShape:
    raw = {
        "model_type": "llama",
        "vocab_size": 23,
        "hidden_size": 16,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_theta": 100.0,
    }
    return PolicyShape.from_hf(raw | change)


def _inputs(
    lengths: Sequence[int],
    *,
    sampled: Sequence[bool] | None = None,
    stop: Sequence[bool] | None = None,
    taps: int = 3,
    width: int = 16,
    vocab: int = 23,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> DraftInputs:
    """Random policy activations; by default every token but each document's first is sampled and none stops."""
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    tokens = torch.randint(0, vocab, (total,), generator=g)
    positions = torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.zeros(0, dtype=torch.int64)
    table = torch.randn(vocab, width, generator=g, dtype=torch.float64).to(dtype)
    return DraftInputs(
        features=torch.randn(total, taps * width, generator=g, dtype=torch.float64).to(dtype),
        embeddings=table[tokens],
        hidden=torch.randn(total, width, generator=g, dtype=torch.float64).to(dtype),
        tokens=tokens,
        positions=positions,
        lengths=list(lengths),
        sampled=torch.tensor(sampled, dtype=torch.bool) if sampled is not None else positions > 0,
        stop=torch.tensor(stop, dtype=torch.bool) if stop is not None else torch.zeros(total, dtype=torch.bool),
        policy_head=torch.randn(vocab, width, generator=g, dtype=torch.float64).to(dtype),
        policy_embedding=table,
    )


@pytest.fixture
def make_shape() -> Callable[..., PolicyShape]:
    return _shape


@pytest.fixture
def make_inputs() -> Callable[..., DraftInputs]:
    return _inputs
