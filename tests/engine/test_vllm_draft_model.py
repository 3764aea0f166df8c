"""A language model draft in vLLM: lossless, counted as in the reference engine, distilled, refitted (CASES A12, D1 to
D4, E1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_spec.batch import SpecStats
from lightning_spec.draft import DraftInputs, DraftModel
from lightning_spec.loss.draft import SoftCrossEntropy
from lightning_spec.rollout.engine import EngineFiles, Request, Sampling
from lightning_spec.rollout.reference import ReferenceEngine
from lightning_spec.rollout.speculation import Speculation
from lightning_spec.shapes import PolicyShape

PROMPTS = [tuple(range(3 + i, 13 + 2 * i)) for i in range(4)]
REQUESTS = [Request(prompt) for prompt in PROMPTS]
GREEDY = Sampling(temperature=0, max_tokens=24)
K = 3


@dataclass
class Served:
    engine: Any
    model: Any
    policy: Path
    draft: DraftModel
    """The trainer's; the engine was started from it."""


@pytest.fixture(scope="module")
def served(start_engine: Callable[..., Any], tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A Qwen3 draft with tied embeddings, half as wide as the Llama policy and with more key/value heads."""
    folder = tmp_path_factory.mktemp("draft-model")
    model = tiny.make_policy(folder / "policy", 0)
    draft = DraftModel(
        num_proposals=K, model_type="qwen3", num_layers=2, hidden_size=32, intermediate_size=48, num_kv_heads=2,
        tie_embeddings=True,
    )  # fmt: skip
    draft.build(PolicyShape.from_file(folder / "policy"))
    engine = start_engine(folder / "policy", draft.export(folder / "draft"), speculation=Speculation("draft_model", K))
    return Served(engine, model, folder / "policy", draft)


def accepted(engine: Any) -> tuple[list[tuple[int, ...]], SpecStats]:
    before = engine.stats()
    completions = engine.generate(REQUESTS, GREEDY)
    return [c.tokens for c in completions], engine.stats() - before


def by_reference(served: Served, folder: Path) -> SpecStats:
    engine = ReferenceEngine(method="draft", num_speculative_tokens=K)
    engine.start(EngineFiles(served.policy, served.draft.export(folder), "lightning_spec.draft.lm.DraftModel"))
    engine.generate(REQUESTS, GREEDY)
    return engine.stats()


def distil(served: Served, completions: list[tuple[int, ...]], steps: int) -> None:
    """Optimiser steps on what the policy generated."""
    documents = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, completions, strict=True)]
    lengths = [len(document) for document in documents]
    positions = torch.cat([torch.arange(n) for n in lengths])
    prompts = torch.tensor([len(prompt) for prompt in PROMPTS]).repeat_interleave(torch.tensor(lengths))
    with torch.no_grad():
        hidden = torch.cat([served.model.model(torch.tensor([one])).last_hidden_state[0] for one in documents])
    x = DraftInputs(
        features=hidden[:, :0],
        embeddings=hidden[:, :0],
        hidden=hidden,
        tokens=torch.tensor([token for document in documents for token in document]),
        positions=positions,
        lengths=lengths,
        sampled=positions >= prompts,
        stop=torch.zeros_like(positions, dtype=torch.bool),
        policy_head=served.model.lm_head.weight,
        policy_embedding=None,
    )
    totals = served.draft.counts(x)  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(served.draft.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        served.draft(x, SoftCrossEntropy(), totals).loss.backward()
        optimizer.step()


def test_distillation_raises_acceptance_as_the_reference_engine_counts_it_and_changes_no_token(
    served: Served, tiny: Any, tmp_path: Path
) -> None:
    want = [tiny.greedy(served.model, prompt, 24) for prompt in PROMPTS]
    tokens, untrained = accepted(served.engine)
    assert tokens == want
    assert untrained == by_reference(served, tmp_path / "untrained")
    distil(served, want, 120)
    report = served.engine.refit(None, served.draft.engine_tensors(), 1, verify=True)
    assert report.verified == report.tensors == len(dict(served.draft.engine_tensors()))
    tokens, trained = accepted(served.engine)
    assert tokens == want
    assert trained == by_reference(served, tmp_path / "trained")
    assert trained.accepted > trained.drafted / 2 > untrained.accepted


def checksums(served: Served, target: str) -> Any:
    tensors = dict(served.draft.engine_tensors()) if target == "draft" else served.model.state_dict()
    (sums,) = served.engine._request("checksums", target, {name: list(t.shape) for name, t in tensors.items()})
    return sums


def test_a_refit_of_one_model_changes_no_tensor_of_the_other_though_they_have_names_in_common(
    served: Served, tiny: Any
) -> None:
    assert served.engine.facts["head_aliased"] is False
    assert served.engine.facts["embedding_aliased"] is False
    policy, draft = checksums(served, "policy"), checksums(served, "draft")
    changed = {name: 1.25 * tensor for name, tensor in tiny.policy_tensors(served.model)}
    assert served.engine.refit(changed.items(), None, 2, verify=True).verified == len(changed)
    assert checksums(served, "draft") == draft
    new = checksums(served, "policy")
    assert all(new[name] != policy[name] for name in changed)
    other = {name: 0.5 * tensor for name, tensor in served.draft.engine_tensors()}
    assert served.engine.refit(None, other.items(), 3, verify=True).verified == len(other)
    assert checksums(served, "policy") == new
    served.model.load_state_dict(changed, strict=False)
    assert accepted(served.engine)[0] == [tiny.greedy(served.model, prompt, 24) for prompt in PROMPTS]


def test_sampled_proposals_leave_a_fixed_seed_s_logprobs_exact(served: Served, tiny: Any) -> None:
    sampling = Sampling(temperature=0.8, max_tokens=16, seed=5)
    for prompt, completion in zip(PROMPTS, served.engine.generate(REQUESTS, sampling), strict=True):
        exact = tiny.exact_logprobs(served.model, prompt, completion.tokens, 0.8)
        chosen = exact.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), chosen, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["lm_head", "embeddings"])
def test_vllm_shares_no_module_of_a_draft_model_even_if_its_weights_equal_the_policy_s(kind: str) -> None:
    """What `init_from_policy` relies on when it copies (CASES D2)."""
    pytest.importorskip("vllm")
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    def model() -> SimpleNamespace:
        weight = SimpleNamespace(weight=torch.ones(4, 2))
        return SimpleNamespace(lm_head=weight, model=SimpleNamespace(embed_tokens=weight))

    draft, policy = model(), model()
    getattr(DraftModelProposer, f"_maybe_share_{kind}")(SimpleNamespace(model=draft), policy)
    assert draft.lm_head is not policy.lm_head
    assert draft.model.embed_tokens is not policy.model.embed_tokens
