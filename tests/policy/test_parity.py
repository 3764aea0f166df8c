"""The policy computes what transformers computes: hidden states, logits, gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_spec.policy import build_policy, embedding_weight, head_weight, hf_gradients, policy_from_folder
from lightning_spec.shapes import PolicyShape
from tests.float64 import in_float64

FAMILY_NAMES = [
    "llama",
    "llama-tied",
    "llama-llama3-rope",
    "llama-yarn",
    "llama-attention-bias",
    "llama-mlp-bias",
    "llama-wide-heads",
    "llama-one-kv-head",
    "llama-all-kv-heads",
    "qwen2",
    "qwen2-tied",
    "qwen3",
    "qwen3-attention-bias",
]
Packed = tuple[Tensor, Tensor, list[int]]
MakeHF = Callable[..., tuple[Any, Path]]


def hf_logits(model: Any, tokens: Tensor, lengths: list[int]) -> Tensor:
    """Each document alone, end to end: [T, V]."""
    return torch.cat([model(document[None]).logits[0] for document in tokens.split(lengths)])


def some_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits, tokens.flip(0)) + 0.01 * logits.square().mean()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_logits_on_packed_documents_equal_transformers_document_by_document(
    family: str, hf_policy: MakeHF, packed: Packed
) -> None:
    reference, folder = hf_policy(family)
    tokens, positions, lengths = packed
    policy = policy_from_folder(folder)
    with torch.no_grad():
        hidden = policy(tokens, positions, lengths)
        logits = hidden @ head_weight(policy).T
        expected = hf_logits(reference, tokens, lengths)
    assert hidden.shape == (len(tokens), policy.shape.hidden_size)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_logits_and_all_gradients_equal_transformers_in_float64(family: str, hf_policy: MakeHF, packed: Packed) -> None:
    reference, folder = hf_policy(family)
    reference = in_float64(reference)
    tokens, positions, lengths = packed
    policy = policy_from_folder(folder, dtype=torch.float64)
    logits = policy(tokens, positions, lengths) @ head_weight(policy).T
    expected = hf_logits(reference, tokens, lengths)
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=1e-10)

    some_loss(logits, tokens).backward()
    some_loss(expected, tokens).backward()
    gradients = dict(hf_gradients(policy))
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert set(gradients) == set(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    assert sum(bool(gradient.abs().max() > 1e-6) for gradient in wanted.values()) > 0.8 * len(wanted)


@pytest.mark.parametrize("family", ["llama-yarn", "qwen2", "qwen3"])
def test_gradients_equal_transformers_in_float32(family: str, hf_policy: MakeHF, packed: Packed) -> None:
    reference, folder = hf_policy(family)
    tokens, positions, lengths = packed
    policy = policy_from_folder(folder)
    some_loss(policy(tokens, positions, lengths) @ head_weight(policy).T, tokens).backward()
    some_loss(hf_logits(reference, tokens, lengths), tokens).backward()
    gradients = dict(hf_gradients(policy))
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4)


def test_bfloat16_logits_stay_near_float32(hf_policy: MakeHF, packed: Packed) -> None:
    reference, folder = hf_policy("qwen3")
    tokens, positions, lengths = packed
    policy = policy_from_folder(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        hidden = policy(tokens, positions, lengths)
        expected = hf_logits(reference, tokens, lengths)
    assert hidden.dtype is torch.bfloat16
    logits = (hidden @ head_weight(policy).T).float()
    assert (logits - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("length", [1, 2])
def test_a_micro_batch_of_one_short_document_works(length: int, hf_policy: MakeHF) -> None:
    reference, folder = hf_policy("llama-one-kv-head")
    policy = policy_from_folder(folder)
    tokens = torch.arange(5, 5 + length)
    with torch.no_grad():
        logits = policy(tokens, torch.arange(length), [length]) @ head_weight(policy).T
        torch.testing.assert_close(logits, reference(tokens[None]).logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    ],
    ids=["full-uniform", "full-block", "core-attention", "mlp"],
)
def test_recompute_changes_no_bit_of_the_gradients(
    recompute: dict[str, Any], hf_policy: MakeHF, packed: Packed
) -> None:
    _, folder = hf_policy("qwen3")
    tokens, positions, lengths = packed
    results = []
    for options in ({}, recompute):
        policy = policy_from_folder(folder, **options)
        some_loss(policy(tokens, positions, lengths) @ head_weight(policy).T, tokens).backward()
        results.append(dict(hf_gradients(policy)))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("family", ["llama-tied", "qwen2"])
def test_gradients_are_the_same_inside_megatrons_data_parallel_wrapper(
    family: str, hf_policy: MakeHF, packed: Packed
) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    _, folder = hf_policy(family)
    tokens, positions, lengths = packed
    plain = policy_from_folder(folder)
    some_loss(plain(tokens, positions, lengths) @ head_weight(plain).T, tokens).backward()
    expected = dict(hf_gradients(plain))

    policy = policy_from_folder(folder)
    wrapped = DistributedDataParallel(
        policy.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False), policy
    )
    wrapped.zero_grad_buffer()
    some_loss(wrapped(tokens, positions, lengths) @ head_weight(wrapped).T, tokens).backward()
    wrapped.finish_grad_sync()
    gradients = dict(hf_gradients(wrapped))
    assert set(gradients) == set(expected)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_padding_the_vocabulary_changes_nothing_that_is_seen(hf_policy: MakeHF, packed: Packed) -> None:
    for family in ("llama", "llama-tied"):
        reference, folder = hf_policy(family)
        tokens, positions, lengths = packed
        policy = policy_from_folder(folder, vocab_multiple=64)
        embedding = policy.embedding.word_embeddings.weight
        assert embedding.shape[0] == 128
        assert embedding_weight(policy).shape == head_weight(policy).shape == (96, 32)
        logits = policy(tokens, positions, lengths) @ head_weight(policy).T
        expected = hf_logits(reference, tokens, lengths)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        logits.square().mean().backward()
        assert not embedding[96:].any()
        assert not embedding.grad[96:].any()


def test_tied_and_own_heads_are_the_parameters_themselves(hf_policy: MakeHF) -> None:
    tied = policy_from_folder(hf_policy("llama-tied")[1])
    own = policy_from_folder(hf_policy("llama")[1])
    assert head_weight(tied) is embedding_weight(tied)
    assert head_weight(own) is own.output_layer.weight
    assert head_weight(own) is not embedding_weight(own)
    assert "output_layer.weight" not in dict(tied.named_parameters())


def test_parameters_carry_the_marks_that_megatrons_gradient_norm_reads(hf_policy: MakeHF) -> None:
    shape = PolicyShape.from_file(hf_policy("qwen3")[1])
    policy = build_policy(shape)
    assert policy.config.qk_layernorm  # its gradients are summed over tensor-parallel ranks
    for name, parameter in policy.named_parameters():
        if "norm" in name:
            assert parameter.sequence_parallel is False
        else:
            assert hasattr(parameter, "tensor_model_parallel"), name
