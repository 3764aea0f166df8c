"""A mixture-of-experts policy in vLLM: served from our export, refitted with our tensors, read back by checksum."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spec.errors import EngineError
from lightning_spec.parallel.cpu_stand_in import cpu_stand_in
from lightning_spec.parallel.groups import ParallelSizes, initialise_groups, start_single_process_world
from lightning_spec.policy import export_policy, hf_tensors, new_policy_config, policy_from_folder
from lightning_spec.rollout import vllm_cpu
from lightning_spec.rollout.engine import Request, Sampling
from lightning_spec.rollout.vllm import VLLMEngine

PROMPTS = [tuple(range(3 + i, 13 + 2 * i)) for i in range(4)]
GREEDY = Sampling(temperature=0, max_tokens=24)


@dataclass
class Policies:
    """Two policies of one shape in our exports, and the tensors that a refit sends."""

    folders: list[Path]
    tensors: list[dict[str, Tensor]]

    def reference(self, number: int) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folders[number]).eval()


def make_policies(folder: Path, inner: int, norm: bool) -> Policies:
    """Peaky random weights; one dense layer among the sparse ones."""
    raw = new_policy_config(
        "qwen3_moe",
        vocab_size=128,
        hidden_size=64,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=128,
        max_positions=512,
        tied_embeddings=False,
        initializer_range=0.15,
        num_experts=4,
        expert_intermediate_size=inner,
        norm_topk_prob=norm,
        mlp_only_layers=[1],
    )
    (folder / "start").mkdir(parents=True)
    (folder / "start" / "config.json").write_text(json.dumps(raw))
    found = Policies([], [])
    start_single_process_world(60)
    with cpu_stand_in():
        initialise_groups(ParallelSizes(), timeout_s=60)
        for seed in range(2):
            policy = policy_from_folder(folder / "start", seed=seed)
            export_policy(policy, folder / f"policy{seed}")
            found.folders.append(folder / f"policy{seed}")
            found.tensors.append({name: tensor.clone() for name, tensor in hf_tensors(policy)})
    return found


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    """Experts of 48: on a CPU the engine pads them to 64."""
    return make_policies(tmp_path_factory.mktemp("moe"), 48, True)


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., VLLMEngine], policies: Policies) -> Iterator[VLLMEngine]:
    engine = start_engine(policies.folders[0])
    yield engine
    engine.close()


def check(engine: VLLMEngine, model: Any, tiny: Any) -> None:
    """Greedy tokens and their log-probs are transformers'."""
    for prompt, completion in zip(PROMPTS, engine.generate([Request(p) for p in PROMPTS], GREEDY), strict=True):
        assert completion.tokens == tiny.greedy(model, prompt, GREEDY.max_tokens)
        exact = tiny.exact_logprobs(model, prompt, completion.tokens, 1.0)
        chosen = exact.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), chosen, atol=1e-4, rtol=0)


def test_an_exported_policy_is_served_as_transformers_runs_it(
    engine: VLLMEngine, policies: Policies, tiny: Any
) -> None:
    check(engine, policies.reference(0), tiny)


def test_a_refit_gives_the_new_experts_and_every_tensor_is_verified(
    engine: VLLMEngine, policies: Policies, tiny: Any
) -> None:
    assert engine.facts["mends"][vllm_cpu.EXPERTS_RELOAD] in ("mended", "not needed")
    for number in (1, 0):
        report = engine.refit(iter(policies.tensors[number].items()), None, number, verify=True)
        assert report.verified == report.tensors == len(policies.tensors[number])
        check(engine, policies.reference(number), tiny)


def test_one_wrong_number_in_one_expert_is_found(engine: VLLMEngine, policies: Policies) -> None:
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    shape = list(policies.tensors[0][name].shape)
    engine.refit(iter(policies.tensors[0].items()), None, 2)
    before = engine._request("checksums", "policy", {name: shape})
    changed = dict(policies.tensors[0])
    changed[name] = changed[name].clone()
    changed[name][5, 7] += 0.5
    engine.refit(iter(changed.items()), None, 3, verify=True)
    assert engine._request("checksums", "policy", {name: shape}) != before


def test_without_the_reload_work_round_verify_names_the_experts(
    start_engine: Callable[..., VLLMEngine], tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Experts of 64 need no padding: nothing but the numbers would show that they were not packed again.
    policies = make_policies(tmp_path, 64, norm=False)
    monkeypatch.setenv(vllm_cpu.KEEP_VARIABLE, vllm_cpu.EXPERTS_RELOAD)
    engine = start_engine(policies.folders[0])
    try:
        assert engine.facts["mends"][vllm_cpu.EXPERTS_RELOAD] == "kept"
        check(engine, policies.reference(0), tiny)
        with pytest.raises(EngineError, match=r"mlp\.experts\.0\.gate_proj"):
            engine.refit(iter(policies.tensors[1].items()), None, 1, verify=True)
    finally:
        engine.close()
