"""A mixture-of-experts policy computes what transformers' Qwen3-MoE computes, and its weights go both ways."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from lightning_spec.errors import ConfigError
from lightning_spec.policy import (
    build_policy,
    export_policy,
    head_weight,
    hf_gradients,
    hf_tensors,
    new_policy_config,
    policy_from_folder,
)
from lightning_spec.policy.moe import expert_placements, route
from lightning_spec.shapes import PolicyShape
from tests.float64 import in_float64
from tests.policy.test_parity import hf_logits, some_loss

MakeHF = Callable[..., tuple[Any, Path]]
Packed = tuple[Tensor, Tensor, list[int]]

EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
CASES: dict[str, dict[str, Any]] = {
    "normed": {},
    "not-normed": {"norm_topk_prob": False},
    "every-second-layer": {"decoder_sparse_step": 2, "norm_topk_prob": False},
    "some-layers-dense": {"mlp_only_layers": [0, 2]},
    "one-expert-per-token": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "all-experts": {"num_experts_per_tok": 4},
    "biased-attention-and-tied": {"attention_bias": True, "tie_word_embeddings": True},
    "expert-as-wide-as-dense": {"moe_intermediate_size": 48, "mlp_only_layers": [1]},
}


def exact_router(gate: Any) -> Any:
    """transformers' router computes its softmax in float32 whatever the dtype; this one does not."""

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        weights, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    gate.forward = types.MethodType(forward, gate)


def sparse_blocks(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def reference_of(model: Any) -> Any:
    """In float64 throughout, by the plain loop over experts."""
    model.config._experts_implementation = "eager"
    for block in sparse_blocks(model):
        exact_router(block.gate)
    return in_float64(model)


def reference_gradients(model: Any) -> dict[str, Tensor]:
    """Under the names of a checkpoint: transformers holds all experts of a layer in one parameter."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(gradient):
                for part, half in zip(("gate", "up"), both.chunk(2), strict=True):
                    found[f"{name.removesuffix('gate_up_proj')}{expert}.{part}_proj.weight"] = half
        elif name.endswith("experts.down_proj"):
            for expert, one in enumerate(gradient):
                found[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = one
        else:
            found[name] = gradient
    return found


@pytest.mark.parametrize("case", CASES)
def test_logits_and_all_gradients_equal_transformers_in_float64(case: str, hf_policy: MakeHF, packed: Packed) -> None:
    reference, folder = hf_policy("qwen3", **{**EXPERTS, **CASES[case]})
    reference = reference_of(reference)
    tokens, positions, lengths = packed
    policy = policy_from_folder(folder, dtype=torch.float64)
    logits = policy(tokens, positions, lengths) @ head_weight(policy).T
    expected = hf_logits(reference, tokens, lengths)
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=1e-10)

    some_loss(logits, tokens).backward()
    some_loss(expected, tokens).backward()
    gradients, wanted = dict(hf_gradients(policy)), reference_gradients(reference)
    assert set(gradients) == set(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    assert sum(bool(gradient.abs().max() > 1e-6) for gradient in wanted.values()) > 0.8 * len(wanted)


@pytest.mark.parametrize("case", ["normed", "not-normed"])
def test_logits_and_gradients_equal_unchanged_transformers_in_float32(
    case: str, hf_policy: MakeHF, packed: Packed
) -> None:
    reference, folder = hf_policy("qwen3", **{**EXPERTS, **CASES[case]})
    tokens, positions, lengths = packed
    policy = policy_from_folder(folder)
    logits = policy(tokens, positions, lengths) @ head_weight(policy).T
    expected = hf_logits(reference, tokens, lengths)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    some_loss(logits, tokens).backward()
    some_loss(expected, tokens).backward()
    gradients = dict(hf_gradients(policy))
    for name, gradient in reference_gradients(reference).items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm", [True, False])
def test_the_router_chooses_and_weighs_as_transformers_does_bit_for_bit(dtype: torch.dtype, norm: bool) -> None:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=16, num_experts=32, num_experts_per_tok=4, norm_topk_prob=norm)
    gate = Qwen3MoeTopKRouter(config).to(dtype)
    torch.nn.init.normal_(gate.weight)
    # bfloat16 logits tie often: which of equals is chosen must be the same too.
    logits, wanted, chosen = gate(torch.randn(200, 16, dtype=dtype))
    if dtype is torch.bfloat16:
        assert (logits.sort(-1).values.diff(dim=-1) == 0).any()
    weights, choice = route(logits, 4, norm)
    assert torch.equal(choice, torch.zeros_like(choice).scatter(1, chosen, True))
    assert torch.equal(weights.gather(1, chosen), wanted)
    assert torch.equal(weights != 0, choice)


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    ],
    ids=["full", "experts-and-attention", "dense-mlp"],
)
def test_recompute_changes_no_bit_of_the_gradients(
    recompute: dict[str, Any], hf_policy: MakeHF, packed: Packed
) -> None:
    _, folder = hf_policy("qwen3", **{**EXPERTS, "mlp_only_layers": [1]})
    tokens, positions, lengths = packed
    results = []
    for options in ({}, recompute):
        policy = policy_from_folder(folder, **options)
        some_loss(policy(tokens, positions, lengths) @ head_weight(policy).T, tokens).backward()
        results.append(dict(hf_gradients(policy)))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_an_exported_policy_is_byte_for_byte_what_transformers_saved(hf_policy: MakeHF, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference, folder = hf_policy("qwen3", **{**EXPERTS, "mlp_only_layers": [1]})
    policy = policy_from_folder(folder)
    export_policy(policy, tmp_path / "out")
    saved, exported = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(saved) == set(exported) == {name for name, _ in hf_tensors(policy)}
    assert all(torch.equal(saved[name], exported[name]) for name in saved)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_new_policy_starts_from_the_same_distribution_in_every_expert(tmp_path: Path) -> None:
    raw = new_policy_config(
        "qwen3_moe", vocab_size=64, hidden_size=32, num_layers=3, num_heads=2, num_experts=4, mlp_only_layers=[1]
    )
    policy = build_policy(PolicyShape.from_hf(raw), seed=5)
    tensors = dict(hf_tensors(policy))
    experts = [tensor for name, tensor in tensors.items() if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    for tensor in experts:
        assert 0.015 < tensor.std() < 0.025
    assert not torch.equal(experts[0], experts[3])
    assert tensors["model.layers.0.mlp.gate.weight"].std() > 0.01
    again = dict(hf_tensors(build_policy(PolicyShape.from_hf(raw), seed=5)))
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    assert (
        sum(tensor.numel() for tensor in tensors.values())
        == sum(policy.shape.layer_parameters(layer) for layer in range(3))
        + tensors["model.embed_tokens.weight"].numel()
        + tensors["model.norm.weight"].numel()
    )


@pytest.mark.parametrize("rows", [1, 0])
def test_an_idle_micro_batch_leaves_every_gradient_zero_and_none_missing(rows: int, hf_policy: MakeHF) -> None:
    _, folder = hf_policy("qwen3", **{**EXPERTS, "num_experts_per_tok": 1})
    policy = policy_from_folder(folder)
    tokens = torch.zeros(rows, dtype=torch.int64)
    hidden = policy(tokens, tokens, [1] * rows)
    assert hidden.shape == (rows, 32)
    (hidden.sum() * 0.0).backward()
    # A missing gradient (three of four experts have no row) would leave Megatron's data parallel wrapper waiting.
    for name, parameter in policy.named_parameters():
        if name != "output_layer.weight":
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name


def test_experts_of_all_ranks_are_placed_once_and_under_checkpoint_names(hf_policy: MakeHF) -> None:
    _, folder = hf_policy("qwen3", **EXPERTS)
    shape = PolicyShape.from_file(folder)
    saved = {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}
    prefix = "model.layers.2."
    for size in (1, 2, 4):
        held: list[str] = []
        for rank in range(size):
            for name, place in expert_placements(shape, prefix, "x.", expert_rank=rank, expert_size=size):
                assert tuple(place.shape) == tuple(saved[place.name])
                assert sum(span.count for span in place.spans) == place.shape[0]
                if not name.endswith("router.weight"):
                    held.append(place.name)
        assert sorted(held) == sorted(name for name in saved if name.startswith(f"{prefix}mlp.experts."))


def test_options_that_the_router_would_ignore_are_refused(hf_policy: MakeHF) -> None:
    shape = PolicyShape.from_file(hf_policy("qwen3", **EXPERTS)[1])
    for option in ("moe_router_topk", "moe_router_dtype", "moe_aux_loss_coeff", "moe_expert_capacity_factor"):
        with pytest.raises(ConfigError, match=option):
            build_policy(shape, seed=None, **{option: 1})


def test_a_new_config_says_what_is_missing() -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
    with pytest.raises(ConfigError, match="num_experts"):
        new_policy_config("qwen3_moe", **sizes)
    with pytest.raises(ConfigError, match="num_experts"):
        new_policy_config("llama", num_experts=4, **sizes)
    raw = new_policy_config("qwen3_moe", num_experts=4, experts_per_token=2, intermediate_size=48, **sizes)
    assert json.loads(json.dumps(raw)) == raw
    experts = PolicyShape.from_hf(raw).experts
    assert experts is not None
    assert (experts.num_experts, experts.top_k, experts.intermediate_size) == (4, 2, 24)


def test_the_reference_engine_takes_a_refit_of_every_expert(hf_policy: MakeHF, tmp_path: Path) -> None:
    from lightning_spec.rollout.engine import EngineFiles, Request, Sampling
    from lightning_spec.rollout.reference import ReferenceEngine

    reference, folder = hf_policy("qwen3", **{**EXPERTS, "mlp_only_layers": [1]})
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text((folder / "config.json").read_text())
    policy = policy_from_folder(tmp_path / "new", seed=9)
    prompt, greedy = Request((3, 14, 15, 9)), Sampling(temperature=0, max_tokens=8)
    engine = ReferenceEngine()
    engine.start(EngineFiles(folder, None))
    (before,) = engine.generate([prompt], greedy)
    expected = reference.generate(torch.tensor([prompt.prompt_tokens]), max_new_tokens=8, do_sample=False)[0, 4:]
    assert before.tokens == tuple(expected.tolist())
    report = engine.refit(hf_tensors(policy), None, 1, verify=True)
    assert report.verified == report.tensors == len(dict(hf_tensors(policy)))
    (after,) = engine.generate([prompt], greedy)
    tokens = torch.tensor([*prompt.prompt_tokens, *after.tokens])
    with torch.no_grad():
        logits = policy(tokens, torch.arange(len(tokens)), [len(tokens)]) @ head_weight(policy).T
    chosen = logits[3:-1].log_softmax(-1).gather(1, tokens[4:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(after.logprobs), chosen, atol=1e-5, rtol=1e-5)
    assert after.tokens == tuple(logits[3:-1].argmax(-1).tolist())
    engine.close()
