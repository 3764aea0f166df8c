"""Taps are the policy's own features: exact, detached, once per forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spec.errors import ConfigError
from lightning_spec.policy import (
    TapRecorder,
    check_layer_ids,
    embedding_weight,
    head_weight,
    hf_gradients,
    policy_from_folder,
    tap_owner,
)

Packed = tuple[Tensor, Tensor, list[int]]
MakeHF = Callable[..., tuple[Any, Path]]
ALL = (0, 1, 2, 3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("family", ["llama-attention-bias", "qwen3"])
def test_taps_equal_transformers_hidden_states(
    family: str, grad: bool, training: bool, hf_policy: MakeHF, packed: Packed
) -> None:
    reference, folder = hf_policy(family)
    tokens, positions, lengths = packed
    policy = policy_from_folder(folder).train(training)
    with TapRecorder(policy, ALL) as recorder, torch.set_grad_enabled(grad):
        policy(tokens, positions, lengths)
        taps = recorder.take()
    with torch.no_grad():
        parts = [reference(d[None], output_hidden_states=True).hidden_states[:4] for d in tokens.split(lengths)]
    for k in ALL:
        expected = torch.cat([part[k][0] for part in parts])
        torch.testing.assert_close(taps.features[:, 32 * k : 32 * (k + 1)], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(taps.embeddings, embedding_weight(policy)[tokens])
    assert not taps.features.requires_grad
    assert not taps.embeddings.requires_grad


def test_the_tap_after_the_last_layer_gives_the_policys_own_logits(hf_policy: MakeHF, packed: Packed) -> None:
    _, folder = hf_policy("llama")
    tokens, positions, lengths = packed
    policy = policy_from_folder(folder)
    with TapRecorder(policy, [4]) as recorder:
        hidden = policy(tokens, positions, lengths)
        again = policy.decoder.final_layernorm(recorder.take().features)
    assert torch.equal(again, hidden)
    assert (again @ head_weight(policy).T).std() > 0.1


def test_features_lie_in_ascending_layer_order_whatever_the_order_asked_for(hf_policy: MakeHF, packed: Packed) -> None:
    policy = policy_from_folder(hf_policy("llama")[1])
    taken = []
    for ids in ((3, 1), (1, 3)):
        with TapRecorder(policy, ids) as recorder:
            policy(*packed)
            taken.append(recorder.take().features)
    assert recorder.layer_ids == (1, 3)
    assert torch.equal(*taken)


def test_recording_changes_neither_hidden_states_nor_gradients(hf_policy: MakeHF, packed: Packed) -> None:
    folder = hf_policy("qwen2")[1]
    plain, tapped = policy_from_folder(folder), policy_from_folder(folder)
    hidden = [plain(*packed)]
    with TapRecorder(tapped, ALL) as recorder:
        hidden.append(tapped(*packed))
        (recorder.take().features * 3).sum()
    for states in hidden:
        states.square().sum().backward()
    assert torch.equal(*hidden)
    gradients = dict(hf_gradients(plain))
    for name, gradient in hf_gradients(tapped):
        assert torch.equal(gradient, gradients[name])


@pytest.mark.parametrize("recorded_during", ["full", "core_attn"])
def test_a_recomputed_layer_does_not_record_again(recorded_during: str, hf_policy: MakeHF, packed: Packed) -> None:
    options: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if recorded_during == "full":
        options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    folder = hf_policy("llama")[1]
    plain, policy = policy_from_folder(folder), policy_from_folder(folder, **options)
    with TapRecorder(plain, ALL) as expected, TapRecorder(policy, ALL) as recorder:
        plain(*packed)
        hidden = policy(*packed)
        assert torch.equal(recorder.take().features, expected.take().features)
        hidden.square().sum().backward()
        with pytest.raises(RuntimeError, match="no forward pass"):
            recorder.take()
        # As a pipeline interleaves them: the backward of one micro-batch between another's forward and its take.
        first = policy(*packed)
        policy(packed[0].flip(0), *packed[1:])
        plain(packed[0].flip(0), *packed[1:])
        first.square().sum().backward()
        assert torch.equal(recorder.take().features, expected.take().features)


def test_each_forward_replaces_what_the_one_before_left(hf_policy: MakeHF, packed: Packed) -> None:
    policy = policy_from_folder(hf_policy("llama")[1])
    tokens, positions, lengths = packed
    with TapRecorder(policy, [2]) as recorder:
        policy(tokens[:3], positions[:3], [3])
        policy(tokens, positions, lengths)
        assert recorder.take().features.shape == (len(tokens), 32)


def test_a_disabled_recorder_keeps_nothing(hf_policy: MakeHF, packed: Packed) -> None:
    policy = policy_from_folder(hf_policy("llama")[1])
    with TapRecorder(policy, [2]) as recorder:
        policy(*packed)
        recorder.enabled = False
        policy(*packed)
        with pytest.raises(RuntimeError, match="no forward pass"):
            recorder.take()
        recorder.enabled = True
        policy(*packed)
        assert recorder.take().features.shape == (len(packed[0]), 32)


def test_a_failed_forward_leaves_nothing_to_take(hf_policy: MakeHF, packed: Packed) -> None:
    policy = policy_from_folder(hf_policy("llama")[1])
    tokens, positions, lengths = packed
    with TapRecorder(policy, [0, 3]) as recorder:
        policy(tokens, positions, lengths)
        with pytest.raises(IndexError):
            policy(tokens + 1000, positions, lengths)
        assert not recorder._recording  # or the backward of an earlier micro-batch would record
        with pytest.raises(RuntimeError, match="no forward pass"):
            recorder.take()
        with pytest.raises(RuntimeError, match="no forward pass"):
            recorder.take_parts()


def test_parts_are_the_taps_by_layer(hf_policy: MakeHF, packed: Packed) -> None:
    policy = policy_from_folder(hf_policy("llama")[1])
    with TapRecorder(policy, [3, 0, 4]) as recorder:
        policy(*packed)
        parts = recorder.take_parts()
        policy(*packed)
        taps = recorder.take()
        with pytest.raises(RuntimeError, match="no forward pass"):
            recorder.take_parts()
    assert recorder.own_ids == (0, 3, 4)
    assert list(parts.features) == [0, 3, 4]
    assert torch.equal(torch.cat(list(parts.features.values()), dim=-1), taps.features)
    assert parts.embeddings is not None
    assert torch.equal(parts.embeddings, taps.embeddings)


def test_a_micro_batch_without_rows_leaves_one_idle_row(hf_policy: MakeHF) -> None:
    policy = policy_from_folder(hf_policy("llama")[1])
    nothing = torch.zeros(0, dtype=torch.long)
    with TapRecorder(policy, [0, 4]) as recorder:
        hidden = policy(nothing, nothing, [])
        parts = recorder.take_parts()
    assert hidden.shape == (0, 32)
    assert {k: tensor.shape[0] for k, tensor in parts.features.items()} == {0: 1, 4: 1}
    hidden.sum().backward()
    gradients = dict(hf_gradients(policy))
    # All there, for reductions that wait for each, and all zero. (The head is the loss's.)
    assert len(gradients) == len(dict(policy.named_parameters())) - 1 + 3 * 4
    assert not any(gradient.any() for gradient in gradients.values())


def test_a_tap_belongs_to_the_stage_whose_layer_reads_it() -> None:
    # Layers 0, 1 | 2 | none | 3.
    assert tap_owner([2, 1, 0, 1], [0, 1, 2, 3, 4]) == {0: 0, 1: 0, 2: 1, 3: 3, 4: 3}
    assert tap_owner([0, 2, 0], [0, 1, 2]) == {0: 1, 1: 1, 2: 2}


def test_taps_work_through_megatrons_data_parallel_wrapper_and_stop_when_closed(
    hf_policy: MakeHF, packed: Packed
) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    policy = policy_from_folder(hf_policy("llama")[1])
    wrapped = DistributedDataParallel(policy.config, DistributedDataParallelConfig(), policy)
    recorder = TapRecorder(wrapped, [1, 2])
    wrapped(*packed)
    assert recorder.take().features.shape == (len(packed[0]), 64)
    recorder.close()
    recorder.close()
    wrapped(*packed)
    with pytest.raises(RuntimeError, match="no forward pass"):
        recorder.take()
    assert not policy._forward_hooks
    assert not policy._forward_pre_hooks


def test_without_layer_ids_the_embeddings_are_recorded_alone(hf_policy: MakeHF, packed: Packed) -> None:
    policy = policy_from_folder(hf_policy("llama")[1])
    with TapRecorder(policy, ()) as recorder:
        policy(*packed)
        taps = recorder.take()
    assert taps.features.shape == (len(packed[0]), 0)
    assert torch.equal(taps.embeddings, embedding_weight(policy)[packed[0]])
    with pytest.raises(ConfigError, match="no tap layers"):
        check_layer_ids((), 4)


@pytest.mark.parametrize("ids", [[1, 1, 1], [-1], [5]], ids=["collide", "negative", "past the last"])
def test_layer_ids_that_cannot_be_tapped_are_refused(ids: list[int], hf_policy: MakeHF) -> None:
    policy = policy_from_folder(hf_policy("llama")[1])
    with pytest.raises(ConfigError, match=r"tap layer.*draft\.aux_layer_ids"):
        TapRecorder(policy, ids)
    assert not policy._forward_hooks
