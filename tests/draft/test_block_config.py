"""A block drafter's settings: what comes back, what vLLM makes of them, and what is refused (CASES.md B, G2)."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_spec.draft import DFlash
from lightning_spec.draft.block_config import ARCHITECTURES, BlockConfig, new_block_config
from lightning_spec.errors import ConfigError

Shapes = Callable[..., Any]

SMALL: dict[str, Any] = {"mask_token_id": 20, "num_layers": 3, "block_size": 4}
ATTENTION: dict[str, dict[str, Any]] = {
    "full": {},
    "full, causal": {"causal": True},
    "window": {"sliding_window": 5},
    "window, causal": {"sliding_window": 5, "causal": True},
}
KINDS: tuple[Any, ...] = ("dflash", "dspark")


def vllm_resolver() -> Any:
    """`_resolve_layer_attention` out of the installed vLLM's source: importing vLLM would take most of a minute."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(found.origin).with_name("model_executor") / "models" / "qwen3_dflash.py"
    names = ("_SLIDING_ATTENTION", "_dflash_layer_causal", "_resolve_layer_attention")
    wanted = []
    for node in ast.parse(source.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        if any(getattr(t, "id", getattr(t, "name", None)) in names for t in targets):
            wanted.append(node)
    assert len(wanted) == len(names)
    scope: dict[str, Any] = {"Qwen3Config": object}
    exec(compile(ast.Module(wanted, []), str(source), "exec"), scope)
    return scope["_resolve_layer_attention"]


def read(raw: dict[str, Any], kind: Any = "dflash", names: tuple[str, ...] = ()) -> BlockConfig:
    return BlockConfig.from_json(raw, names, 8, "config.json", kind)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rope",
    [{}, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}}, {"head_dim": 8}],
    ids=["default", "yarn", "head_dim"],
)
def test_a_config_comes_back_from_its_file(kind: Any, attention: str, rope: Any, make_shape: Shapes) -> None:
    config = new_block_config(kind, SMALL | ATTENTION[attention], make_shape(**rope))
    config.check(make_shape(**rope))
    again = read(config.to_json(), kind)
    assert again == config
    again.same(config, "config.json")
    other = read(config.to_json() | {"block_size": 5}, kind)
    with pytest.raises(ConfigError, match=r"another draft \(block_size\)"):
        config.same(other, "config.json")


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", KINDS)
def test_vllm_gives_every_layer_the_window_and_the_causality_that_is_trained(
    kind: Any, attention: str, make_shape: Shapes
) -> None:
    resolve = vllm_resolver()
    config = new_block_config(kind, SMALL | ATTENTION[attention], make_shape())
    found = [resolve(as_vllm_reads(config.to_json()), layer) for layer in range(3)]
    assert found == list(zip(config.windows, config.causal, strict=True))


def as_vllm_reads(raw: dict[str, Any]) -> Any:
    """By way of the transformers class, which fills in and drops things."""
    from transformers import Qwen3Config

    return Qwen3Config(**raw)


FOREIGN: dict[str, dict[str, Any]] = {
    "no layer types": {"layer_types": None, "dflash_config": {}},
    "no switch, full": {"layer_types": ["full_attention"] * 3, "dflash_config": {}},
    "no switch, sliding": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 7, "dflash_config": {}},
    "use_swa alone": {"layer_types": None, "dflash_config": {"use_swa": True, "swa_window_size": 6}},
    "use_swa over full layers": {
        "layer_types": ["full_attention"] * 3,
        "dflash_config": {"use_swa": True, "swa_window_size": 6},
    },
    "the nested window wins": {
        "layer_types": ["sliding_attention"] * 3,
        "sliding_window": 7,
        "dflash_config": {"swa_window_size": 6, "causal": False},
    },
    "is_causal wins": {"is_causal": True, "dflash_config": {"causal": False}, "layer_types": None},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_published_config_is_read_as_vllm_reads_it(name: str, make_shape: Shapes) -> None:
    resolve = vllm_resolver()
    raw = new_block_config("dflash", SMALL, make_shape()).to_json()
    own = {"mask_token_id": 20, "target_layer_ids": [1, 3]}
    raw |= FOREIGN[name] | {"dflash_config": FOREIGN[name]["dflash_config"] | own}
    config = read(raw)
    namespace = SimpleNamespace(**raw)  # a config.json without layer_types stays one without
    found = [resolve(namespace, layer) for layer in range(3)]
    assert found == list(zip(config.windows, config.causal, strict=True))
    assert config.aux_layer_ids == (2, 4)


def test_defaults_follow_the_policy(make_shape: Shapes) -> None:
    shape = make_shape()
    for kind, block, proposals in (("dflash", 8, 7), ("dspark", 7, 7)):
        config = new_block_config(kind, {"mask_token_id": 20}, shape)  # type: ignore[arg-type]
        config.check(shape)
        assert (config.vocab_size, config.hidden_size, config.head_dim) == (23, 16, 4)
        assert (config.num_heads, config.num_kv_heads, config.intermediate_size) == (4, 2, 24)
        assert (config.max_positions, config.norm_eps, config.rope) == (64, 1e-5, shape.rope)
        assert (config.block_size, config.proposals, config.num_layers) == (block, proposals, 1)
        assert (config.markov_rank > 0, config.confidence) == (kind == "dspark", kind == "dspark")
        assert config.to_json()["architectures"] == [ARCHITECTURES[config.kind]]


# ---- G2: the mask token ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_g2_a_new_draft_needs_a_mask_token(kind: Any, make_shape: Shapes) -> None:
    with pytest.raises(ConfigError, match=r"needs a mask token[\s\S]*model\.draft\.init_args\.mask_token_id"):
        new_block_config(kind, {"block_size": 4, "mask_token_id": None}, make_shape())


@pytest.mark.parametrize("token", [-1, 23, 1000])
def test_g2_a_mask_token_outside_of_the_vocabulary_is_refused(token: int, make_shape: Shapes) -> None:
    draft = DFlash(block_size=4, mask_token_id=token)
    with pytest.raises(ConfigError, match=r"mask token is not in the policy's vocabulary[\s\S]*0\.\.22"):
        draft.build(make_shape())
    assert draft.config is None


@pytest.mark.parametrize(
    ("special", "name"),
    [({"bos_token_id": 20}, "bos"), ({"eos_token_id": [4, 20]}, "eos"), ({"pad_token_id": 20}, "pad")],
    ids=["bos", "eos", "pad"],
)
def test_g2_a_mask_token_with_a_meaning_in_text_is_refused(special: Any, name: str, make_shape: Shapes) -> None:
    config = new_block_config("dflash", SMALL, make_shape())
    config.check(make_shape())
    with pytest.raises(ConfigError, match=rf"meaning in text[\s\S]*{name}_token_id[\s\S]*mask_token_id"):
        config.check(make_shape(**special))


# ---- other refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "given", "match"),
    [
        ("dflash", {"block_size": 1}, "without a slot that predicts"),
        ("dspark", {"block_size": 0}, "without a slot that predicts"),
        ("dflash", {"num_layers": 0}, "bad num_layers"),
        ("dflash", {"intermediate_size": -8}, "bad intermediate_size"),
        ("dflash", {"max_positions": 0}, "bad max_positions"),
        ("dflash", {"head_dim": 5}, "odd size"),
        ("dflash", {"num_heads": 4, "num_kv_heads": 3}, "do not divide"),
        ("dflash", {"aux_layer_ids": (2, 2)}, "bad aux layers"),
        ("dflash", {"aux_layer_ids": (0, 3)}, "bad aux layers"),
        ("dflash", {"aux_layer_ids": (3, 9)}, "bad aux layers"),
        ("dflash", {"aux_layer_ids": ()}, "bad aux layers"),
        ("dflash", {"sliding_window": 0}, "bad sliding_window"),
        ("dflash", {"sliding_window": (4, 4)}, "not given for each layer"),
        ("dflash", {"sliding_window": (4, None, 4)}, "different windows"),
        ("dflash", {"causal": (True, False, True)}, "one switch for all layers"),
        ("dspark", {"markov_rank": -1}, "bad markov_rank"),
        ("dspark", {"markov_rank": 0, "confidence_with_markov": True}, "Markov embedding that is not there"),
        ("dspark", {"confidence": False, "confidence_with_markov": True}, "Markov embedding that is not there"),
    ],
)
def test_what_cannot_be_served_is_refused(kind: Any, given: dict[str, Any], match: str, make_shape: Shapes) -> None:
    with pytest.raises(ConfigError, match=match):
        new_block_config(kind, SMALL | given, make_shape()).check(make_shape())


def test_the_last_layer_s_output_is_a_tap_and_the_embedding_is_none(make_shape: Shapes) -> None:
    config = new_block_config("dflash", SMALL | {"aux_layer_ids": [8, 1]}, make_shape())
    config.check(make_shape())
    assert config.aux_layer_ids == (1, 8)
    assert config.to_json()["dflash_config"]["target_layer_ids"] == [0, 7]


@pytest.mark.parametrize("change", [{"vocab_size": 24}, {"hidden_size": 32, "head_dim": 4}])
def test_a_draft_of_another_policy_is_refused(change: dict[str, Any], make_shape: Shapes) -> None:
    config = new_block_config("dflash", SMALL, make_shape(**change))
    with pytest.raises(ConfigError, match="borrows the policy's head"):
        config.check(make_shape())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "not a dflash draft"),
        ({"architectures": [ARCHITECTURES["dspark"]]}, "not a dflash draft"),
        ({"architectures": None}, "not a dflash draft"),
        ({"attention_bias": True}, "unsupported attention_bias"),
        ({"hidden_act": "gelu"}, "unsupported hidden_act"),
        ({"quantization_config": {"quant_method": "fp8"}}, "unsupported quantization_config"),
        ({"draft_vocab_size": 7}, "unsupported draft_vocab_size"),
        ({"target_hidden_size": 32}, "unsupported target_hidden_size"),
        ({"vocab_size": None}, "bad vocab_size"),
        ({"num_hidden_layers": "3"}, "bad num_hidden_layers"),
        ({"layer_types": ["full_attention"] * 2}, "as long as the draft is deep"),
        ({"block_size": None}, "no block_size"),
        ({"mask_token_id": None, "dflash_config": {"target_layer_ids": [1]}}, "no mask token"),
        ({"dflash_config": {"mask_token_id": 20}}, "bad target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 20, "target_layer_ids": [3, 1]}}, "bad target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 20, "target_layer_ids": [1, 8]}}, "bad target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 20, "target_layer_ids": [1, "3"]}}, "bad target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 20, "target_layer_ids": [1], "use_swa": True}}, "without a window"),
        ({"is_neox_style": False}, "unsupported is_neox_style"),
        (
            {"dflash_config": {"mask_token_id": 20, "target_layer_ids": [1], "attention_value_scale": 0.5}},
            "unsupported attention_value_scale",
        ),
    ],
)
def test_a_file_that_the_engine_would_serve_differently_is_refused(
    change: dict[str, Any], match: str, make_shape: Shapes
) -> None:
    raw = new_block_config("dflash", SMALL, make_shape()).to_json() | change
    with pytest.raises(ConfigError, match=match):
        read(raw)


@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight", "mask_embedding", "d2t"])
def test_a_file_with_a_tensor_that_is_borrowed_is_refused(name: str, make_shape: Shapes) -> None:
    with pytest.raises(ConfigError, match="tensor of its own"):
        read(new_block_config("dflash", SMALL, make_shape()).to_json(), names=("fc.weight", name))
