"""An MTP head of ours, beside a Llama policy and in a folder of its own, served by vLLM's `mtp` method."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_spec.batch import SpecStats
from lightning_spec.draft import MTP, DraftInputs
from lightning_spec.errors import EngineError
from lightning_spec.loss.draft import SoftCrossEntropy
from lightning_spec.rollout import vllm_cpu
from lightning_spec.rollout.engine import EngineFiles, Request, Sampling
from lightning_spec.rollout.reference import ReferenceEngine
from lightning_spec.rollout.speculation import Speculation
from lightning_spec.shapes import PolicyShape

K, COUNT = 3, 40
# One token alone stands at position 0, whose embedding the head does not read.
PROMPTS = [(5,), *(tuple(range(3 + i, 9 + 2 * i)) for i in range(7))]
REQUESTS = [Request(prompt) for prompt in PROMPTS]
GREEDY = Sampling(temperature=0, max_tokens=COUNT)
SHARED = {"model.embed_tokens.weight": [128, 64]}
"""Of a policy with tied embeddings: its checksums are those of the head, too."""


def states(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[T, C], after the final norm."""
    with torch.inference_mode():
        return model.model(torch.tensor([tokens])).last_hidden_state[0].clone()


def train(draft: MTP, model: Any, texts: Sequence[Sequence[int]], steps: int) -> None:
    """Fit the head to the policy on its own continuations, so that some proposals are right and some are not."""
    tokens = torch.tensor([token for text in texts for token in text])
    table, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    x = DraftInputs(
        features=torch.zeros(len(tokens), 0),
        embeddings=table[tokens],
        hidden=torch.cat([states(model, text) for text in texts]),
        tokens=tokens,
        positions=torch.cat([torch.arange(len(text)) for text in texts]),
        lengths=[len(text) for text in texts],
        sampled=torch.ones(len(tokens), dtype=torch.bool),
        stop=torch.zeros(len(tokens), dtype=torch.bool),
        policy_head=head,
        policy_embedding=table,
    )
    totals = draft.counts(x)  # type: ignore[arg-type]
    optimiser = torch.optim.Adam(draft.parameters(), 5e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        draft(x, SoftCrossEntropy(), totals).loss.backward()
        optimiser.step()


def expected(draft: MTP, model: Any, texts: Sequence[Sequence[int]]) -> SpecStats:
    """Counters of greedy speculation where `propose` proposes: the longest right prefix is accepted each time."""
    total = SpecStats()
    for prompt, text in zip(PROMPTS, texts, strict=True):
        hidden, n = states(model, text), len(prompt)
        while n < len(prompt) + COUNT - 1:
            proposal = draft.propose(
                hidden[:n], torch.tensor(text[:n]), [n], torch.tensor([text[n]]), K,
                policy_head=model.lm_head.weight, policy_embedding=model.model.embed_tokens.weight,
            ).tokens[0].tolist()  # fmt: skip
            right = [proposal[: i + 1] == list(text[n + 1 : n + 2 + i]) for i in range(K)]
            total = total + SpecStats(1, K, sum(right), tuple(map(int, right)))
            n += sum(right) + 1
    return total


class Case:
    def __init__(self, start_engine: Any, tiny: Any, folder: Path) -> None:
        self.tiny, self.folder = tiny, folder
        self.model = tiny.make_policy(folder / "policy", 4, tied=True)
        self.shape = PolicyShape.from_file(folder / "policy")
        self.texts = self.greedy(self.model)
        self.first, self.trained = MTP(num_passes=K), MTP(num_passes=K)
        for draft, steps in ((self.first, 8), (self.trained, 40)):
            draft.build(self.shape)
            train(draft, self.model, self.texts, steps)
        self.first.export(folder / "head")
        self.engine = start_engine(folder / "policy", folder / "head", speculation=Speculation("mtp", K))

    def greedy(self, model: Any) -> list[list[int]]:
        """Prompts with transformers' continuations, a few tokens longer than the engine is asked for."""
        return [[*prompt, *self.tiny.greedy(model, prompt, COUNT + K + 1)] for prompt in PROMPTS]

    def serve(self) -> tuple[list[tuple[int, ...]], SpecStats]:
        completions = self.engine.generate(REQUESTS, GREEDY)
        return [completion.tokens for completion in completions], self.engine.last.spec

    def wanted(self, texts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        return [tuple(text[len(p) : len(p) + COUNT]) for p, text in zip(PROMPTS, texts, strict=True)]


@pytest.fixture(scope="module")
def case(start_engine: Any, tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    served = Case(start_engine, tiny, tmp_path_factory.mktemp("mtp"))
    yield served
    served.engine.close()


@pytest.mark.timeout(300)
def test_a_head_beside_a_llama_policy_is_served_refitted_and_never_shares_what_it_sends(case: Any) -> None:
    assert case.engine.facts["mends"][vllm_cpu.MTP_CONFIG] in ("mended", "not needed")
    assert case.engine.facts["head_aliased"]
    assert case.engine.facts["embedding_aliased"]
    policy = case.engine._request("checksums", "policy", SHARED)

    # As loaded: not a token differs from unspeculated greedy, and as many proposals are accepted as `propose` gives.
    tokens, before = case.serve()
    assert tokens == case.wanted(case.texts)
    assert before == expected(case.first, case.model, case.texts)

    # A refit with a better head: every tensor verified, the policy's shared ones untouched.
    report = case.engine.refit(None, case.trained.engine_tensors(), 1, verify=True)
    assert report.verified == report.tensors == 16
    assert case.engine._request("checksums", "policy", SHARED) == policy
    tokens, after = case.serve()
    assert tokens == case.wanted(case.texts)
    assert after == expected(case.trained, case.model, case.texts)
    assert after.accepted > before.accepted + 50
    assert after.per_position[2] > 10
    reference = ReferenceEngine("draft", K)
    head = case.trained.export(case.folder / "trained")
    reference.start(EngineFiles(case.folder / "policy", head, "lightning_spec.draft.MTP"))
    assert [c.tokens for c in reference.generate(REQUESTS, GREEDY)] == tokens
    assert reference.last.spec == after

    # The policy's own refit reaches the head's embedding and output through the sharing.
    other = copy.deepcopy(case.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    case.engine.refit(case.tiny.policy_tensors(other), None, 2, verify=True)
    texts = case.greedy(other)
    tokens, moved = case.serve()
    assert tokens == case.wanted(texts)
    assert moved == expected(case.trained, other, texts)

    # What is shared is refused in the head's stream.
    tensors = [*case.trained.engine_tensors(), ("lm_head.weight", torch.zeros(128, 64))]
    with pytest.raises(EngineError, match=r"surplus tensor 'lm_head\.weight'"):
        case.engine.refit(None, iter(tensors), 3)


def test_vllm_builds_the_head_from_the_policy_s_config_until_it_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("vllm.model_executor.models.mimo_mtp")
    monkeypatch.setattr(module.MiMoMTP, "__init__", module.MiMoMTP.__init__)  # put back afterwards
    assert vllm_cpu.mtp_config_is_the_policy_s()
    seen: list[Any] = []
    monkeypatch.setattr(module.MiMoMTP, "__init__", lambda self, *, vllm_config, prefix: seen.append(vllm_config))
    vllm_cpu.mend_mtp_config()
    draft = SimpleNamespace(hf_config=SimpleNamespace(num_hidden_layers=0, name="draft"))
    policy = SimpleNamespace(hf_config=SimpleNamespace(num_hidden_layers=8, name="policy"))
    given = SimpleNamespace(model_config=policy, speculative_config=SimpleNamespace(draft_model_config=draft))
    module.MiMoMTP(vllm_config=given, prefix="")
    config = seen[0].model_config.hf_config
    assert (config.name, config.num_hidden_layers) == ("draft", 8)  # numbered after the policy's layers
    assert (given.model_config, draft.hf_config.num_hidden_layers) == (policy, 0)  # nothing else has changed
