"""Reading a Hugging Face config: what is supported, and errors that name the key."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from lightning_spec.errors import ConfigError
from lightning_spec.shapes import PolicyShape

GOOD: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 5000.0,
}


def test_both_spellings_of_rope_are_read_alike() -> None:
    old = PolicyShape.from_hf({**GOOD, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new_raw = {k: v for k, v in GOOD.items() if k != "rope_theta"}
    new_raw["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    new = PolicyShape.from_hf(new_raw)
    assert old.rope == new.rope
    assert old.rope.theta == 5000.0
    assert old.rope.rope_type == "linear"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type"),
        ({"use_sliding_window": True, "sliding_window": 128}, "use_sliding_window"),
    ],
)
def test_a_bad_config_names_what_was_found_what_is_needed_and_the_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PolicyShape.from_hf({**GOOD, **change}, key="here/config.json")
    text = str(caught.value)
    assert text.count("found") == 1
    assert "needed" in text
    assert "here/config.json" in caught.value.key
    assert key in caught.value.key


def test_a_folder_without_a_config_names_the_yaml_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"change `model\.policy\.path`"):
        PolicyShape.from_file(tmp_path)


def test_the_raw_config_survives_for_export(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GOOD, "torch_dtype": "float32"}))
    assert PolicyShape.from_file(tmp_path).raw["torch_dtype"] == "float32"


def test_config_errors_cross_process_borders() -> None:
    error = ConfigError("x", found=1, needed=2, key="a.b")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.key) == (str(error), "a.b")


def test_absent_fields_have_the_familys_own_defaults() -> None:
    """As transformers reads them: a hand-written config.json may leave these out."""
    from transformers import LlamaConfig, Qwen3Config

    bare = {k: v for k, v in GOOD.items() if k not in ("num_key_value_heads", "model_type")}
    bare |= {"num_attention_heads": 32, "hidden_size": 256}
    llama, qwen3 = LlamaConfig(**bare), Qwen3Config(**bare)
    ours = PolicyShape.from_hf({**bare, "model_type": "llama"})
    assert (ours.num_kv_heads, ours.head_dim) == (llama.num_key_value_heads, llama.head_dim)
    ours = PolicyShape.from_hf({**bare, "model_type": "qwen3"})
    assert (ours.num_kv_heads, ours.head_dim) == (qwen3.num_key_value_heads, qwen3.head_dim)


MOE: dict[str, Any] = {
    **GOOD,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 3, "mlp_only_layers": [2, 4]},
        {"mlp_only_layers": [0, 7]},
    ],
)
def test_the_layers_with_experts_are_those_of_transformers(changes: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = {**MOE, **changes}
    config = AutoConfig.for_model(**{name: value for name, value in raw.items() if name != "rope_theta"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # Read back as transformers 5 writes it, where the number of experts has another name.
    for shape in (PolicyShape.from_hf(raw), PolicyShape.from_hf(json.loads(config.to_json_string()))):
        assert shape.experts is not None
        assert shape.experts.sparse_layers == tuple(hasattr(layer.mlp, "gate") for layer in model.model.layers)
        assert (shape.experts.num_experts, shape.experts.top_k) == (8, 2)
        for number, layer in enumerate(model.model.layers):
            assert shape.layer_parameters(number) == sum(parameter.numel() for parameter in layer.parameters())
            assert shape.mlp_width(number) == (48 if shape.is_sparse(number) else 128)


def test_layer_parameters_count_biases_and_norms_as_transformers_does() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for raw in ({**GOOD, "attention_bias": True, "mlp_bias": True}, {**GOOD, "model_type": "qwen3", "head_dim": 16}):
        config = AutoConfig.for_model(**{name: value for name, value in raw.items() if name != "rope_theta"})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        wanted = sum(parameter.numel() for parameter in model.model.layers[3].parameters())
        assert PolicyShape.from_hf(raw).layer_parameters(3) == wanted


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_experts": None}, "num_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": [8]}, "mlp_only_layers"),
        ({"shared_expert_intermediate_size": 32}, "shared_expert_intermediate_size"),
        ({"output_router_logits": True}, "output_router_logits"),
    ],
)
def test_bad_experts_name_their_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        PolicyShape.from_hf({**MOE, **change})


def test_a_mixture_whose_layers_are_all_dense_has_no_experts() -> None:
    assert PolicyShape.from_hf({**MOE, "mlp_only_layers": list(range(8))}).experts is None
    assert PolicyShape.from_hf({**MOE, "num_experts": 0}).experts is None
