"""Draft checkpoints: what vLLM loads, what comes back, and what is refused (CASES.md part D)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_spec.draft import DraftInputs, Eagle3, VocabMap
from lightning_spec.errors import CheckpointError, ConfigError
from lightning_spec.loss.draft import SoftCrossEntropy

Shapes = Callable[..., Any]
Inputs = Callable[..., DraftInputs]

KINDS: dict[str, dict[str, Any]] = {
    "borrowing": {},
    "owning": {"own_head": True, "own_embedding": True},
    "reduced": {"draft_vocab_size": 6},
    "two_layers": {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8},
    "norms": {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True},
    "other_taps": {"aux_layer_ids": [1, 7], "max_positions": 40},
    "wide": {"hidden_size": 24, "own_head": True, "own_embedding": True},
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "partial": {"partial_rotary_factor": 0.5, "head_dim": 8},
}  # fmt: skip


def build(shape: Any, **args: Any) -> Eagle3:
    draft = Eagle3(**args)
    if "path" not in args and args.get("draft_vocab_size", 23) < 23:
        draft.use_vocab_map(VocabMap(torch.tensor([0, 3, 4, 9, 17, 22]), 23))
    draft.build(shape, dtype=torch.float64)
    return draft


def loss_of(draft: Eagle3, x: DraftInputs) -> float:
    return float(draft(x, SoftCrossEntropy(), draft.counts(x)).loss.detach())  # type: ignore[arg-type]


def edit(folder: Path, **change: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (raw | change).items() if v is not None}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rope", ROPES)
def test_a_checkpoint_comes_back_bit_for_bit_with_its_settings(
    kind: str, rope: str, make_shape: Shapes, make_inputs: Inputs, tmp_path: Path
) -> None:
    shape = make_shape(**ROPES[rope])
    draft = build(shape, **KINDS[kind])
    folder = draft.export(tmp_path / "draft")
    again = build(shape, path=str(folder), seed=99)
    assert again.config == draft.config
    assert dict(again.engine_tensors()).keys() == dict(draft.engine_tensors()).keys()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(again.engine_tensors(), draft.engine_tensors(), strict=True))
    assert again.fingerprint() == draft.fingerprint()
    x = make_inputs([8, 5], taps=len(draft.aux_layer_ids))
    assert loss_of(again, x) == loss_of(draft, x)


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_names_and_shapes_are_the_engines(kind: str, make_shape: Shapes, tmp_path: Path) -> None:
    draft = build(make_shape(), **KINDS[kind])
    cfg = draft.config
    assert cfg is not None
    h, c, d, n = cfg.hidden_size, 16, cfg.head_dim, len(draft.aux_layer_ids)
    want = {"fc.weight": (h, n * c), "norm.weight": (h,)}
    for number, name in enumerate(["midlayer", "layers.1"][: cfg.num_layers]):
        width = h if number else 2 * h
        want |= {
            f"{name}.self_attn.q_proj.weight": (cfg.num_heads * d, width),
            f"{name}.self_attn.k_proj.weight": (cfg.num_kv_heads * d, width),
            f"{name}.self_attn.v_proj.weight": (cfg.num_kv_heads * d, width),
            f"{name}.self_attn.o_proj.weight": (h, cfg.num_heads * d),
            f"{name}.mlp.gate_proj.weight": (24, h),
            f"{name}.mlp.up_proj.weight": (24, h),
            f"{name}.mlp.down_proj.weight": (h, 24),
            f"{name}.input_layernorm.weight": (h,),
            f"{name}.post_attention_layernorm.weight": (h,),
        }
    want["midlayer.hidden_norm.weight"] = (h,)
    if kind in ("owning", "wide"):
        want |= {"lm_head.weight": (23, h), "embed_tokens.weight": (23, h)}
    if kind == "reduced":
        want |= {"lm_head.weight": (6, h), "d2t": (6,)}
    if kind == "norms":
        want |= {"input_norm.weight": (n * c,)} | {f"fc_norm.{i}.weight": (c,) for i in range(n)}
    assert {name: tuple(tensor.shape) for name, tensor in draft.engine_tensors()} == want
    stored = load_file(draft.export(tmp_path) / "model.safetensors")
    assert set(stored) == set(want)  # a refit sends just these, and must find no other


def test_the_config_carries_what_the_engine_reads(make_shape: Shapes, tmp_path: Path) -> None:
    draft = build(make_shape(**ROPES["yarn"]), draft_vocab_size=6, norm_before_fc=True, aux_layer_ids=[1, 7])
    raw = json.loads((draft.export(tmp_path) / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["model_type"] == "llama"
    assert (raw["vocab_size"], raw["draft_vocab_size"], raw["target_hidden_size"]) == (23, 6, 16)
    assert raw["eagle_aux_hidden_state_layer_ids"] == raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 7]
    assert raw["num_aux_hidden_states"] == 2
    assert raw["norm_before_fc"] is True
    assert raw["tie_word_embeddings"] is False
    # The policy's context length, which scaled RoPE depends on, is written out.
    assert raw["rope_parameters"] == {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "original_max_position_embeddings": 64
    }  # fmt: skip
    assert raw["rope_theta"] == 500.0


@pytest.mark.parametrize("rope", ROPES)
def test_b2_transformers_reads_the_same_rotary_settings(rope: str, make_shape: Shapes, tmp_path: Path) -> None:
    from transformers import AutoConfig

    draft = build(make_shape(**ROPES[rope]))
    config = AutoConfig.from_pretrained(draft.export(tmp_path))
    parameters = config.rope_parameters
    assert parameters["rope_theta"] == draft.config.rope.theta  # type: ignore[union-attr]
    assert parameters["rope_type"] == draft.config.rope.rope_type  # type: ignore[union-attr]
    assert parameters.get("partial_rotary_factor", 1.0) == draft.config.rope.partial_factor  # type: ignore[union-attr]
    for name, value in (draft.config.rope.scaling or {}).items():  # type: ignore[union-attr]
        assert parameters[name] == value
    assert config.head_dim == draft.config.head_dim  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.mlp.up_proj.weight", "norm.weight", "d2t", "lm_head.weight"])
def test_d3_a_missing_tensor_is_named_and_nothing_is_changed(name: str, make_shape: Shapes, tmp_path: Path) -> None:
    shape = make_shape()
    folder = build(shape, draft_vocab_size=6).export(tmp_path)
    other = build(shape, draft_vocab_size=6, seed=8)
    before = {n: t.clone() for n, t in other.engine_tensors()}
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"missing \['{name}'\]"):
        other.load(folder)
    assert all(torch.equal(before[n], t) for n, t in other.engine_tensors())
    if name != "lm_head.weight":  # without it the checkpoint borrows, which its reduced vocabulary forbids
        with pytest.raises(CheckpointError, match=rf"missing \['{name}'\]"):
            build(shape, path=str(folder))


def test_d3_a_surplus_tensor_is_named(make_shape: Shapes, tmp_path: Path) -> None:
    shape = make_shape()
    draft = build(shape)
    folder = draft.export(tmp_path)
    edit_tensors(folder, lambda tensors: tensors.update({"layers.1.norm.weight": torch.ones(2)}))
    for act in (lambda: draft.load(folder), lambda: build(shape, path=str(folder))):
        with pytest.raises(CheckpointError, match=r"surplus \['layers.1.norm.weight'\]"):
            act()
    twice = [*draft.engine_tensors(), ("norm.weight", torch.ones(16))]
    with pytest.raises(CheckpointError, match=r"of a refit do not fit: missing \[\], surplus \['norm.weight'\]"):
        draft.load_tensors(twice, "a refit")


def test_an_owned_head_that_the_checkpoint_lacks_raises_and_an_unwanted_one_is_dropped(
    make_shape: Shapes, tmp_path: Path
) -> None:
    shape = make_shape()
    borrowing, owning = (
        build(shape).export(tmp_path / "a"),
        build(shape, own_head=True, own_embedding=True).export(tmp_path / "b"),
    )
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        build(shape, path=str(borrowing), own_head=True)
    dropped = build(shape, path=str(owning), own_head=False, own_embedding=False)
    assert "lm_head.weight" not in dict(dropped.engine_tensors())
    assert "embed_tokens.weight" not in dict(dropped.engine_tensors())


def test_both_names_of_the_first_layer_and_the_tensors_that_the_engine_skips_are_read(
    make_shape: Shapes, tmp_path: Path
) -> None:
    shape = make_shape()
    draft = build(shape, num_layers=2)
    folder = draft.export(tmp_path)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
        tensors["layers.1.hidden_norm.weight"] = torch.ones(16)
        tensors["t2d"] = torch.ones(23, dtype=torch.bool)

    edit_tensors(folder, rename)
    again = build(shape, path=str(folder))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(again.engine_tensors(), draft.engine_tensors(), strict=True))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"vocab_size": 29, "draft_vocab_size": 29}, "another vocabulary"),
        ({"target_hidden_size": 32}, "another width"),
        ({"hidden_size": 32, "target_hidden_size": 16}, "borrows the policy's embedding"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "aux layers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, "aux layers"),
        ({"architectures": ["LlamaForCausalLM"]}, "not an EAGLE-3 draft"),
        ({"attention_bias": True}, "attention_bias"),
        ({"logit_scale": 2.0}, "logit_scale"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE"),
        ({"intermediate_size": 25}, "does not fit"),
        ({"num_hidden_layers": 7}, "too many draft layers"),
    ],
)
def test_checkpoints_that_do_not_fit_the_policy_are_refused(
    change: dict[str, Any], match: str, make_shape: Shapes, tmp_path: Path
) -> None:
    folder = build(make_shape()).export(tmp_path)
    edit(folder, **change)
    with pytest.raises(ConfigError, match=match):
        build(make_shape(), path=str(folder))


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 1e6, "rope_parameters": None},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"max_position_embeddings": 128},
        {"norm_before_residual": True},
        {"norm_output": True},
        {"rms_norm_eps": 1e-6},
        {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]},
    ],
)
def test_a_built_draft_refuses_the_checkpoint_of_another(
    change: dict[str, Any], make_shape: Shapes, tmp_path: Path
) -> None:
    draft = build(make_shape())
    folder = draft.export(tmp_path)
    edit(folder, **change)
    with pytest.raises(ConfigError, match="another draft"):
        draft.load(folder)


@pytest.mark.parametrize("rope", ROPES)
def test_b3_a_checkpoints_maximum_can_be_raised_without_changing_its_rotation(
    rope: str, make_shape: Shapes, make_inputs: Inputs, tmp_path: Path
) -> None:
    shape, x = make_shape(**ROPES[rope]), make_inputs([20])
    draft = build(shape, max_positions=32)
    longer = build(shape, path=str(draft.export(tmp_path / "a")), max_positions=50)
    longer.check_length(50)
    assert loss_of(longer, x) == loss_of(draft, x)
    assert loss_of(build(shape, path=str(longer.export(tmp_path / "b"))), x) == loss_of(draft, x)


def test_d6_the_vocabulary_map_is_exported_imported_and_checked(make_shape: Shapes, tmp_path: Path) -> None:
    shape = make_shape()
    draft = build(shape, draft_vocab_size=6)
    folder = draft.export(tmp_path)
    stored = load_file(folder / "model.safetensors")
    assert (torch.arange(6) + stored["d2t"]).tolist() == [0, 3, 4, 9, 17, 22]
    again = build(shape, path=str(folder))
    assert again.target_ids().tolist() == [0, 3, 4, 9, 17, 22]  # type: ignore[union-attr]
    other = Eagle3(draft_vocab_size=6)
    other.use_vocab_map(VocabMap(torch.arange(6), 23))
    other.build(shape, dtype=torch.float64)
    with pytest.raises(ConfigError, match="another vocabulary map"):
        other.load(folder)
    assert other.fingerprint() != draft.fingerprint()
    contradicting = Eagle3(path=str(folder))
    contradicting.use_vocab_map(VocabMap(torch.arange(6), 23))
    with pytest.raises(ConfigError, match="vocab_map contradicts"):
        contradicting.build(shape)
    edit_tensors(folder, lambda tensors: tensors.update(d2t=torch.full((6,), 20)))
    with pytest.raises(ConfigError, match="leaves the policy's vocabulary"):
        build(shape, path=str(folder))


def test_d9_norm_placement_is_read_from_the_checkpoint_and_contradictions_are_refused(
    make_shape: Shapes, make_inputs: Inputs, tmp_path: Path
) -> None:
    x, shape = make_inputs([9]), make_shape()
    plain = loss_of(build(shape), x)
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        draft = build(shape, **{name: True})
        folder = draft.export(tmp_path / name)
        assert loss_of(draft, x) != plain  # same weights, another placement
        assert loss_of(build(shape, path=str(folder)), x) == loss_of(draft, x)
        with pytest.raises(ConfigError, match=f"{name} contradicts"):
            build(shape, path=str(folder), **{name: False})
    # The engine also reads norm_before_fc from eagle_config, first.
    edit(tmp_path / "norm_before_fc", norm_before_fc=None)
    assert build(shape, path=str(tmp_path / "norm_before_fc")).config.norm_before_fc  # type: ignore[union-attr]


def test_d4_a_borrowed_tied_head_follows_the_live_embedding_and_is_never_exported(
    make_shape: Shapes, make_inputs: Inputs
) -> None:
    draft, x = build(make_shape(tie_word_embeddings=True)), make_inputs([9])
    x.policy_head = x.policy_embedding
    before = loss_of(draft, x)
    x.policy_embedding *= 1.5  # an optimiser step of the policy
    assert loss_of(draft, x) != before
    names = dict(draft.engine_tensors())
    assert "lm_head.weight" not in names
    assert "embed_tokens.weight" not in names


def test_d2_owned_tensors_start_from_the_policys_but_never_equal_them(
    make_shape: Shapes, make_inputs: Inputs, tmp_path: Path
) -> None:
    x, shape = make_inputs([9]), make_shape()
    draft = build(shape, own_head=True, own_embedding=True)
    draft.init_from_policy(x.policy_head, x.policy_embedding)
    assert draft.lm_head is not None
    assert draft.embed_tokens is not None
    for mine, theirs in ((draft.lm_head.weight, x.policy_head), (draft.embed_tokens.weight, x.policy_embedding)):
        assert torch.allclose(mine, theirs, rtol=1e-2)
        assert not torch.equal(mine, theirs)
    reduced = build(shape, draft_vocab_size=6)
    reduced.init_from_policy(x.policy_head, x.policy_embedding)
    assert torch.allclose(reduced.lm_head.weight, x.policy_head[reduced.target_ids()], rtol=1e-2)  # type: ignore[union-attr,index]
    with torch.no_grad():
        draft.lm_head.weight.copy_(x.policy_head)
    folder = draft.export(tmp_path)
    with pytest.raises(ConfigError, match="own_head: true"):
        build(shape, path=str(folder)).init_from_policy(x.policy_head, x.policy_embedding)


def test_folders_without_a_checkpoint_are_refused(make_shape: Shapes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        build(make_shape(), path=str(tmp_path))
    build(make_shape()).export(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        build(make_shape(), path=str(tmp_path))


def test_exporting_again_replaces_both_files_and_leaves_no_others(make_shape: Shapes, tmp_path: Path) -> None:
    draft = build(make_shape())
    draft.export(tmp_path)
    with torch.no_grad():
        draft.norm.weight.fill_(2.0)
    draft.export(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert float(load_file(tmp_path / "model.safetensors")["norm.weight"][0]) == 2.0
