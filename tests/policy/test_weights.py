"""The map between Hugging Face's tensors and Megatron's parameters, and the initial weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spec.policy import build_policy, hf_tensors, new_policy_config, placements, policy_from_folder
from lightning_spec.shapes import PolicyShape

MakeHF = Callable[..., tuple[Any, Path]]


def tiny(**changes: Any) -> PolicyShape:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, **changes}
    return PolicyShape.from_hf(new_policy_config(**sizes))


def test_query_groups_interleave_in_megatrons_fused_projection(hf_policy: MakeHF) -> None:
    reference, folder = hf_policy("llama-wide-heads")
    policy = policy_from_folder(folder)
    attention = reference.model.layers[1].self_attn
    q, k, v = (getattr(attention, f"{n}_proj").weight for n in "qkv")
    group = [q[0:24], k[0:12], v[0:12], q[24:48], k[12:24], v[12:24]]  # heads of 12, two query heads a kv head
    assert torch.equal(policy.decoder.layers[1].self_attention.linear_qkv.weight, torch.cat(group))
    assert policy.decoder.layers[1].self_attention.linear_proj.weight.shape == (32, 48)


def test_every_element_of_every_parameter_belongs_to_exactly_one_tensor(hf_policy: MakeHF) -> None:
    for family in ("llama-tied", "llama-mlp-bias", "llama-attention-bias", "llama-wide-heads", "qwen2", "qwen3"):
        policy = policy_from_folder(hf_policy(family)[1])
        parameters = dict(policy.named_parameters())
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.zero_()
            for name, places in placements(policy).items():
                for piece in (piece for place in places for piece in place.pieces(parameters[name])):
                    piece.tensor.add_(1)
        for name, parameter in parameters.items():
            assert bool((parameter == 1).all()), name


def test_names_and_shapes_are_those_of_transformers(hf_policy: MakeHF) -> None:
    for family in ("llama-wide-heads", "llama-tied", "llama-mlp-bias", "qwen2", "qwen3-attention-bias"):
        reference, folder = hf_policy(family)
        ours = {name: tensor.shape for name, tensor in hf_tensors(policy_from_folder(folder))}
        assert ours == {name: parameter.shape for name, parameter in reference.named_parameters()}


def test_fused_groups_come_out_together(hf_policy: MakeHF) -> None:
    names = [name for name, _ in hf_tensors(policy_from_folder(hf_policy("qwen2")[1]))]
    for first, *rest in (("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),):
        for start in (i for i, name in enumerate(names) if name.endswith(first)):
            assert [name.split(".", 3)[3] for name in names[start + 1 : start + 3]] == rest
    for i, name in enumerate(names):
        if name.endswith("gate_proj.weight"):
            assert names[i + 1] == name.replace("gate", "up")


def test_random_weights_depend_on_the_seed_and_the_name_alone() -> None:
    shape = tiny(tied_embeddings=False)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = dict(hf_tensors(build_policy(shape, seed=5)))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    same = dict(hf_tensors(build_policy(shape, seed=5, vocab_multiple=128)))
    other = dict(hf_tensors(build_policy(shape, seed=6)))
    half = dict(hf_tensors(build_policy(shape, seed=5, dtype=torch.bfloat16)))
    deeper = dict(hf_tensors(build_policy(tiny(num_layers=3, tied_embeddings=False), seed=5)))
    for name, tensor in one.items():
        assert torch.equal(tensor, same[name])
        assert torch.equal(tensor.bfloat16(), half[name])
        assert torch.equal(tensor, deeper[name])
        assert ("norm" in name) == torch.equal(tensor, other[name])
    drawn = [tensor for name, tensor in one.items() if "norm" not in name]
    assert len({tensor.flatten()[0].item() for tensor in drawn}) == len(drawn)


def test_random_weights_have_the_spread_that_the_config_names() -> None:
    shape = PolicyShape.from_hf(
        new_policy_config("qwen2", vocab_size=512, hidden_size=64, num_layers=8, num_heads=4, initializer_range=0.05)
    )
    for scaled in (False, True):
        for name, tensor in hf_tensors(build_policy(shape, seed=0, scaled_output_init=scaled)):
            if name.endswith("norm.weight"):
                assert bool((tensor == 1).all())
            elif name.endswith("bias"):
                assert not tensor.any()
            else:
                back = scaled and name.endswith(("o_proj.weight", "down_proj.weight"))
                assert tensor.std().item() == pytest.approx(0.05 / (4 if back else 1), rel=0.05)
