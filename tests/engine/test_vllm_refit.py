"""New weights in a running engine: CASES.md D1 to D4, D7. The engines are shared: each test refits what it needs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spec.errors import EngineError
from lightning_spec.rollout.engine import Request, Sampling

PROMPTS = [tuple(range(3 + i, 13 + 2 * i)) for i in range(4)]
REQUESTS = [Request(prompt) for prompt in PROMPTS]
GREEDY = Sampling(temperature=0, max_tokens=32)


def tokens(served: Any) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in served.engine.generate(REQUESTS, GREEDY)]


def moved(model: Any, seed: int, size: float = 0.5) -> Any:
    """Another policy of the same shape."""
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + size * torch.randn_like(parameter))
    return other


@pytest.fixture
def restored(eagle: Any, tiny: Any) -> Iterator[Any]:
    """The session's engine, with its first weights again afterwards."""
    yield eagle
    if eagle.engine.running:
        eagle.engine.refit(tiny.policy_tensors(eagle.model), iter(eagle.draft.items()), 0)


def test_after_a_refit_greedy_output_is_that_of_the_new_weights_and_carries_the_version(
    restored: Any, tiny: Any
) -> None:
    old = tokens(restored)
    other = moved(restored.model, 1)
    report = restored.engine.refit(tiny.policy_tensors(other), None, 7)
    completions = restored.engine.generate(REQUESTS, GREEDY)
    want = [tiny.greedy(other, prompt, 32) for prompt in PROMPTS]
    assert [c.tokens for c in completions] == want
    assert want != old
    assert {c.version for c in completions} == {7}
    assert (report.version, report.tensors) == (7, len(dict(tiny.policy_tensors(other))))
    assert report.bytes > 0


def test_keys_and_values_of_old_weights_are_not_read_after_a_refit(restored: Any, tiny: Any) -> None:
    # A prompt of many cache blocks, generated before the refit: without the reset its blocks are reused.
    prompt = tuple((7 * i) % 120 for i in range(300))
    request = [Request(prompt)]
    restored.engine.generate(request, GREEDY)
    other = moved(restored.model, 2, size=0.05)
    restored.engine.refit(tiny.policy_tensors(other), None, 1)
    (completion,) = restored.engine.generate(request, GREEDY)
    exact = tiny.exact_logprobs(other, prompt, completion.tokens, 1.0)
    chosen = exact.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs).double(), chosen, atol=1e-4, rtol=0)


def test_verify_counts_every_tensor_of_both_models(restored: Any, tiny: Any) -> None:
    report = restored.engine.refit(
        tiny.policy_tensors(moved(restored.model, 3)),
        iter(tiny.helpful_draft(restored.model, 4).items()),
        2,
        verify=True,
    )
    assert report.verified == report.tensors == len(dict(tiny.policy_tensors(restored.model))) + len(restored.draft)


def test_a_draft_refit_changes_acceptance_but_not_a_single_token(restored: Any, tiny: Any) -> None:
    good = tokens(restored)
    accepted = restored.engine.last.spec.accepted
    restored.engine.refit(None, iter(tiny.draft_tensors(99).items()), 3)
    assert tokens(restored) == good
    assert restored.engine.last.spec.accepted != accepted


def test_a_head_that_the_draft_owns_survives_the_policy_s_refit_and_the_reverse(restored: Any, tiny: Any) -> None:
    # At load the two heads are equal, which is when vLLM makes them one module.
    assert torch.equal(restored.draft["lm_head.weight"], restored.model.lm_head.weight)
    assert restored.engine.facts["head_aliased"] is False
    draft = tiny.helpful_draft(restored.model, 5)
    draft["lm_head.weight"] = draft["lm_head.weight"].flip(0).contiguous()
    policy = dict(tiny.policy_tensors(restored.model))
    restored.engine.refit(policy.items(), draft.items(), 1)
    # Checksums of what each model computes with, after the other one's refit.
    restored.engine.refit(moved_tensors(policy), None, 2, verify=True)
    held = restored.engine._request("checksums", "draft", {"lm_head.weight": [tiny.vocabulary, 64]})
    restored.engine.refit(None, draft.items(), 3, verify=True)
    assert held == restored.engine._request("checksums", "draft", {"lm_head.weight": [tiny.vocabulary, 64]})
    restored.engine.refit(policy.items(), None, 4, verify=True)
    before = restored.engine._request("checksums", "policy", {"lm_head.weight": [tiny.vocabulary, 64]})
    restored.engine.refit(None, iter(tiny.draft_tensors(6).items()), 5)
    assert before == restored.engine._request("checksums", "policy", {"lm_head.weight": [tiny.vocabulary, 64]})


def moved_tensors(policy: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in policy.items():
        yield name, tensor * 1.25


@pytest.mark.parametrize("target", ["policy", "draft"])
def test_a_missing_tensor_is_named_and_nothing_has_changed(restored: Any, tiny: Any, target: str) -> None:
    good = tokens(restored)
    whole = dict(tiny.policy_tensors(moved(restored.model, 8))) if target == "policy" else tiny.draft_tensors(8)
    lost = sorted(whole)[3]
    stream = ((name, tensor) for name, tensor in whole.items() if name != lost)
    with pytest.raises(EngineError, match=f"missing: {lost}"):
        restored.engine.refit(*((stream, None) if target == "policy" else (None, stream)), version=4)
    assert tokens(restored) == good


def test_a_surplus_a_repeated_and_a_misshapen_tensor_are_refused(restored: Any, tiny: Any) -> None:
    good = tokens(restored)
    whole = tiny.draft_tensors(8)
    cases = {
        "surplus tensor 'embed_tokens.weight'": [*whole.items(), ("embed_tokens.weight", torch.zeros(128, 64))],
        "'norm.weight' was sent twice": [*whole.items(), ("norm.weight", whole["norm.weight"])],
        "'fc.weight' has shape": [("fc.weight", torch.zeros(64, 64))],
    }
    for message, stream in cases.items():
        with pytest.raises(EngineError, match=message):
            restored.engine.refit(None, stream, 4)
    assert tokens(restored) == good


def test_a_refit_that_breaks_off_is_never_served_and_a_full_one_repairs_it(
    restored: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_spec.rollout.vllm.BUCKET_BYTES", 1 << 15)
    other = moved(restored.model, 9)

    def torn() -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(tiny.policy_tensors(other)):
            if number == 40:
                raise RuntimeError("the trainer lost a tensor")
            yield item

    with pytest.raises(RuntimeError, match="lost a tensor"):
        restored.engine.refit(torn(), None, 5)
    with pytest.raises(EngineError, match="half replaced"):
        restored.engine.generate(REQUESTS, GREEDY)
    restored.engine.refit(tiny.policy_tensors(other), None, 6, verify=True)
    assert tokens(restored) == [tiny.greedy(other, prompt, 32) for prompt in PROMPTS]


def test_a_tied_head_follows_its_embedding(tied: Any, tiny: Any) -> None:
    other = moved(tied.model, 12)
    tied.engine.refit(tiny.policy_tensors(other), None, 1, verify=True)
    try:
        assert tokens(tied) == [tiny.greedy(other, prompt, 32) for prompt in PROMPTS]
    finally:
        tied.engine.refit(tiny.policy_tensors(tied.model), None, 0)


def test_an_engine_without_a_draft_refuses_draft_tensors(tied: Any, tiny: Any) -> None:
    with pytest.raises(EngineError, match="no draft to refit"):
        tied.engine.refit(None, tiny.draft_tensors(1).items(), 1)


def test_forty_refits_leave_no_file_behind(restored: Any, tiny: Any) -> None:
    from lightning_spec.rollout.weight_transfer import PREFIX, SHARED_MEMORY

    before = set(SHARED_MEMORY.glob(f"{PREFIX}*"))
    for version in range(40):
        restored.engine.refit(tiny.policy_tensors(restored.model), restored.draft.items(), version)
    assert set(SHARED_MEMORY.glob(f"{PREFIX}*")) <= before
