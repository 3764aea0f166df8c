"""Speculation that does not pay is switched off in the running engine, by batch size, and no sample is the worse for
it (CASES.md E1, E3)."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spec.errors import ConfigError
from lightning_spec.rollout import vllm
from lightning_spec.rollout.adaptive import AdaptiveConfig
from lightning_spec.rollout.engine import EngineFiles, Request, Sampling
from lightning_spec.rollout.speculation import Speculation
from lightning_spec.rollout.vllm_adaptive import AdaptiveScheduler

PROMPTS = [tuple(range(3 + i, 13 + 2 * i)) for i in range(4)]
WORD = 7
GREEDY = Sampling(temperature=0, max_tokens=120)


@pytest.fixture(scope="module")
def adaptive(eagle: Any, start_engine: Any, tiny: Any) -> Iterator[Any]:
    """The policy of `eagle` with a draft of random weights, which is never right; proposals cost time for nothing."""
    folder = eagle.folder / "adaptive"
    tiny.make_draft(folder, tiny.draft_tensors(5))
    speculation = Speculation("eagle3", 3, adaptive=True, probes=AdaptiveConfig(every=24, probe=4, first=3, window=5))
    engine = start_engine(eagle.folder / "policy", folder, speculation=speculation)
    yield engine
    engine.close()


def test_a_draft_of_random_weights_is_switched_off_a_good_one_on_again_and_no_greedy_token_changes(
    adaptive: Any, eagle: Any, tiny: Any
) -> None:
    want = [tiny.greedy(eagle.model, prompt, 120) for prompt in PROMPTS]

    def generate(prompts: list[tuple[int, ...]]) -> Any:
        completions = adaptive.generate([Request(prompt) for prompt in prompts], GREEDY)
        assert [c.tokens for c in completions] == want[: len(prompts)]
        return adaptive.last.adaptive

    first = generate(PROMPTS)
    assert (first.chosen[4], first.chosen[1]) == (0, 3), "four ran together; nobody has run alone yet"
    assert adaptive.last.spec.acceptance_length < 1.2
    assert set(first.gains) == {4}
    assert first.gains[4] < 1
    second = generate(PROMPTS)
    assert second.off / second.requests > 0.9
    assert second.proposals / second.requests < 1.0, "only probes make proposals"
    assert generate(PROMPTS[:1]).chosen[1] == 0

    # A policy that says one word, and a draft that knows it: now proposals pay, and probes find out.
    policy, draft = monotonous(eagle.model, tiny)
    adaptive.refit(iter(policy.items()), iter(draft.items()), 1)
    for _ in range(8):
        completions = adaptive.generate([Request(prompt) for prompt in PROMPTS], GREEDY)
        assert {token for c in completions for token in c.tokens} == {WORD}
    report = adaptive.last.adaptive
    assert report.chosen[4] == 3
    assert report.gains[4] > 1
    assert adaptive.last.spec.acceptance_length > 3.5
    adaptive.refit(tiny.policy_tensors(eagle.model), iter(tiny.helpful_draft(eagle.model, 1).items()), 2)


def monotonous(model: Any, tiny: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of a policy that answers `WORD` whatever it reads, and of a draft with its head on its last tap."""
    policy = {name: tensor.clone() for name, tensor in tiny.policy_tensors(model)}
    for name, tensor in policy.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    policy["model.embed_tokens.weight"].mul_(0.01).add_(1.0)
    policy["lm_head.weight"].mul_(0.01)[WORD] = 1.0
    draft = tiny.helpful_draft(model, 1)
    draft["lm_head.weight"] = policy["lm_head.weight"].clone()
    return policy, draft


def test_what_is_known_is_carried_into_another_engine(adaptive: Any) -> None:
    adaptive.generate([Request(PROMPTS[0])], Sampling(temperature=0, max_tokens=4))
    state = adaptive.last.adaptive.state
    adaptive.restore_speculation({"4": {**state["4"], "on": False, "stage": "usual", "since": 0}})
    adaptive.generate([Request(PROMPTS[0])], Sampling(temperature=0, max_tokens=4))
    assert adaptive.last.adaptive.chosen[4] == 0
    assert adaptive.last.adaptive.state["1"]["since"] >= state["1"]["since"]


def test_samples_at_temperature_1_while_k_changes_are_of_the_policy(adaptive: Any, eagle: Any, tiny: Any) -> None:
    """Log-probs of what was sampled are the policy's, in steps with proposals, without, and at each change."""
    requests = [Request(prompt, seed=i) for i, prompt in enumerate(PROMPTS)]
    for prompt, completion in zip(
        PROMPTS, adaptive.generate(requests, Sampling(temperature=1.0, top_k=20, max_tokens=120)), strict=True
    ):
        exact = tiny.exact_logprobs(eagle.model, prompt, completion.tokens, 1.0)
        chosen = exact.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0] - exact.topk(20).values.logsumexp(-1)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), chosen, atol=1e-3, rtol=0)
    assert adaptive.last.spec.drafts > 0


def test_an_engine_whose_scheduler_is_elsewhere_refuses_before_it_starts(
    eagle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = vllm.VLLMEngine(Speculation("eagle3", 3, adaptive=True), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"speculation\.adaptive"):
        engine.start(EngineFiles(eagle.folder / "policy", eagle.folder / "draft"))


def scheduler_of(fake: Any, clock: list[float]) -> AdaptiveScheduler:
    return AdaptiveScheduler(fake, AdaptiveConfig(every=8, probe=2, first=1, window=1), lambda: clock[0])


class FakeScheduler:
    """vLLM's scheduler as far as it is wrapped: one request, a second a proposal, none accepted."""

    def __init__(self, clock: list[float]) -> None:
        self.dynamic_sd_lookup = [0, 2, 2]
        self.clock, self.drafts = clock, 0

    def schedule(self) -> Any:
        k, spec = self.dynamic_sd_lookup[1], {"r": [7] * self.drafts} if self.drafts else {}
        return types.SimpleNamespace(
            num_scheduled_tokens={"r": 1 + self.drafts},
            total_num_scheduled_tokens=1 + self.drafts,
            scheduled_spec_decode_tokens=spec,
            scheduled_new_reqs=[],
            num_spec_tokens_to_schedule=k,
        )

    def update_from_output(self, scheduled: Any, _: Any) -> Any:
        self.drafts = scheduled.num_spec_tokens_to_schedule
        self.clock[0] += 1 + self.drafts
        return {0: types.SimpleNamespace(outputs=[types.SimpleNamespace(new_token_ids=[5])])}


def test_the_table_is_rewritten_in_place_and_the_first_step_after_a_change_is_not_counted() -> None:
    clock = [0.0]
    fake = FakeScheduler(clock)
    table = fake.dynamic_sd_lookup
    wrapped = scheduler_of(fake, clock)
    asked = []
    for _ in range(30):
        scheduled = fake.schedule()
        asked.append(scheduled.num_spec_tokens_to_schedule)
        fake.update_from_output(scheduled, None)
    assert fake.dynamic_sd_lookup is table
    assert wrapped.controller.chosen() == [0, 0, 2]
    assert wrapped.controller.gains() == {1: pytest.approx(1 / 3)}
    report = wrapped.report()
    assert (report.requests, report.proposals) == (30, sum(asked))
    assert wrapped.report().requests == 0
    with pytest.raises(RuntimeError, match="dynamic_sd_lookup"):
        AdaptiveScheduler(types.SimpleNamespace(dynamic_sd_lookup=None), AdaptiveConfig())
