"""One-process Megatron groups, and tiny Hugging Face policies of every family to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spec.parallel.cpu_stand_in import cpu_stand_in
from lightning_spec.parallel.groups import ParallelSizes, initialise_groups, start_single_process_world

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-llama3-rope": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama-yarn": {"model_type": "llama", "rope_parameters": YARN},
    "llama-attention-bias": {"model_type": "llama", "attention_bias": True},
    "llama-mlp-bias": {"model_type": "llama", "mlp_bias": True},
    "llama-wide-heads": {"model_type": "llama", "head_dim": 12},
    "llama-one-kv-head": {"model_type": "llama", "num_key_value_heads": 1},
    "llama-all-kv-heads": {"model_type": "llama", "num_key_value_heads": 4},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-attention-bias": {"model_type": "qwen3", "head_dim": 8, "attention_bias": True},
}

LENGTHS = [7, 1, 12, 5]


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    """Process groups of one gloo process, and the CPU as Megatron's device. The groups stay, as in a run."""
    start_single_process_world(60)
    with cpu_stand_in():
        initialise_groups(ParallelSizes(1, 1, 1, 1, 1), timeout_s=60)
        yield


@pytest.fixture
def hf_policy(tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """make(family, **changes) -> (transformers model, its saved folder). No weight is at a special value."""

    def make(family: str, **changes: Any) -> tuple[Any, Path]:
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = {**SIZES, **FAMILIES[family], **changes}
        kind = settings.pop("model_type")
        settings["dtype"] = torch.float32
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), attn_implementation="sdpa")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("norm.weight", ".bias")):
                    parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
        folder = tmp_path / f"hf-{family}"
        model.save_pretrained(folder)
        return model.eval(), folder

    return make


@pytest.fixture
def packed() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """tokens [T], positions [T], lengths of four documents, one of a single token."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, SIZES["vocab_size"], (sum(LENGTHS),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return tokens, positions, LENGTHS
