"""The reference engine with the project's own draft: lossless, counted, refitted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_spec.draft.eagle3 import Eagle3
from lightning_spec.errors import EngineError
from lightning_spec.rollout.engine import EngineFiles, Request, Sampling
from lightning_spec.rollout.reference import ReferenceEngine
from lightning_spec.shapes import PolicyShape


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> EngineFiles:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "policy")
    export_draft(folder / "policy", folder / "draft", seed=0)
    return EngineFiles(folder / "policy", folder / "draft", "lightning_spec.draft.eagle3.Eagle3")


def export_draft(policy: Path, folder: Path, seed: int) -> Eagle3:
    draft = Eagle3(aux_layer_ids=[1, 2, 3])
    draft.build(PolicyShape.from_file(policy), seed=seed)
    draft.export(folder)
    return draft


def started(files: EngineFiles, method: str = "draft") -> ReferenceEngine:
    engine = ReferenceEngine(method=method, num_speculative_tokens=3)
    engine.start(files)
    return engine


def test_greedy_tokens_are_equal_with_and_without_the_draft(files):
    requests = [Request((1, 2, 3)), Request((4,)), Request((7, 8, 9, 10, 11))]
    sampling = Sampling(temperature=0.0, max_tokens=40)
    plain = started(files, "none").generate(requests, sampling)
    engine = started(files)
    drafted = engine.generate(requests, sampling)
    assert [c.tokens for c in plain] == [c.tokens for c in drafted]
    assert engine.stats().drafts > 0
    assert engine.stats().per_position[0] >= engine.stats().per_position[2]


def test_sampled_marginals_do_not_depend_on_the_draft(files):
    from collections import Counter

    from scipy import stats

    from lightning_spec.rollout.sampling import target_probs

    sampling = Sampling(temperature=1.0, max_tokens=2)
    n = 500
    engine = started(files)
    done = engine.generate([Request((1, 2), seed=i) for i in range(n)], sampling)
    model = started(files, "none")._model
    with torch.no_grad():
        first = target_probs(model(torch.tensor([[1, 2]])).logits[0, -1], sampling)
        seconds = target_probs(model(torch.tensor([[1, 2, t] for t in range(20)])).logits[:, -1], sampling)
    wanted = n * (first[:, None] * seconds).flatten()
    seen = Counter(c.tokens for c in done)
    cells = [i for i in range(400) if wanted[i] >= 5]
    observed = [seen[divmod(i, 20)] for i in cells] + [n - sum(seen[divmod(i, 20)] for i in cells)]
    expected = [float(wanted[i]) for i in cells] + [n - float(sum(wanted[i] for i in cells))]
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    assert engine.stats().accepted < engine.stats().drafted


def test_a_draft_refit_changes_proposals_and_never_the_greedy_tokens(files, tmp_path):
    engine = started(files)
    sampling = Sampling(temperature=0.0, max_tokens=40)
    before = engine.generate([Request((1, 2, 3))], sampling)[0]
    other = export_draft(files.policy, tmp_path / "other", seed=1)
    report = engine.refit(None, other.engine_tensors(), version=2, verify=True)
    after = engine.generate([Request((1, 2, 3))], sampling)[0]
    assert report.verified == report.tensors == len(dict(other.engine_tensors()))
    assert after.version == 2
    assert after.tokens == before.tokens
    fresh = started(EngineFiles(files.policy, tmp_path / "other", files.draft_class))
    assert fresh.generate([Request((1, 2, 3))], sampling)[0].spec == after.spec
    some = list(other.engine_tensors())[1:]
    with pytest.raises(EngineError, match="missing"):
        engine.refit(None, some, version=3)
