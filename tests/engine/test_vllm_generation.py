"""What vLLM samples through our engine, against transformers: CASES.md E1, E2, E4 and A10."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from lightning_spec.batch import SpecStats
from lightning_spec.errors import ConfigError
from lightning_spec.rollout.engine import EngineFiles, Request, Sampling
from lightning_spec.rollout.speculation import Speculation

PROMPTS = [tuple(range(3 + i, 13 + 2 * i)) for i in range(6)]
REQUESTS = [Request(prompt) for prompt in PROMPTS]


def chi_square(pairs: list[tuple[int, int]], model: Any, prompt: tuple[int, ...], vocabulary: int) -> float:
    """p-value of sampled (token 1, token 2) against the exact joint; cells with under 5 expected are merged."""
    with torch.inference_mode():
        first = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        nexts = torch.tensor([[*prompt, token] for token in range(vocabulary)])
        second = model(nexts).logits[:, -1].double().softmax(-1)
    expected = (first[:, None] * second).flatten() * len(pairs)
    observed = torch.bincount(torch.tensor([a * vocabulary + b for a, b in pairs]), minlength=vocabulary**2).double()
    keep = expected >= 5
    cells = torch.cat([observed[keep], observed[~keep].sum()[None]])
    want = torch.cat([expected[keep], expected[~keep].sum()[None]])
    return float(chisquare(cells.numpy(), (want * cells.sum() / want.sum()).numpy()).pvalue)


def sample_pairs(engine: Any, prompt: tuple[int, ...], count: int, seed: int) -> list[tuple[int, int]]:
    requests = [Request(prompt, seed=seed + i) for i in range(count)]
    completions = engine.generate(requests, Sampling(temperature=1.0, max_tokens=3))
    return [(completion.tokens[0], completion.tokens[1]) for completion in completions]


def test_greedy_with_eagle3_equals_transformers_token_for_token(eagle: Any, tiny: Any) -> None:
    completions = eagle.engine.generate(REQUESTS, Sampling(temperature=0, max_tokens=40))
    assert [c.tokens for c in completions] == [tiny.greedy(eagle.model, prompt, 40) for prompt in PROMPTS]
    assert 0 < eagle.engine.last.spec.accepted < eagle.engine.last.spec.drafted


def test_greedy_logprobs_are_of_the_unscaled_distribution(eagle: Any, tiny: Any) -> None:
    (completion,) = eagle.engine.generate(REQUESTS[:1], Sampling(temperature=0, max_tokens=24))
    exact = tiny.exact_logprobs(eagle.model, PROMPTS[0], completion.tokens, 1.0)
    exact = exact.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs).double(), exact, atol=1e-4, rtol=0)


@pytest.mark.parametrize("served", ["eagle", "tied"])
def test_logprobs_at_temperature_0_7_are_those_of_transformers_at_0_7(
    served: str, request: pytest.FixtureRequest, tiny: Any
) -> None:
    engine = request.getfixturevalue(served)
    sampling = Sampling(temperature=0.7, max_tokens=24, seed=5)
    for prompt, completion in zip(PROMPTS, engine.engine.generate(REQUESTS, sampling), strict=True):
        exact = tiny.exact_logprobs(engine.model, prompt, completion.tokens, 0.7)
        exact = exact.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), exact, atol=1e-3, rtol=0)


@pytest.mark.parametrize("served", ["eagle", "tied"])
def test_logprobs_are_of_the_distribution_after_top_k(served: str, request: pytest.FixtureRequest, tiny: Any) -> None:
    engine = request.getfixturevalue(served)
    sampling = Sampling(temperature=1.3, top_k=5, max_tokens=16, seed=9)
    for prompt, completion in zip(PROMPTS, engine.engine.generate(REQUESTS, sampling), strict=True):
        exact = tiny.exact_logprobs(engine.model, prompt, completion.tokens, 1.3)
        chosen = exact.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        best = exact.topk(5, dim=-1).values
        assert (chosen >= best[:, -1] - 1e-6).all()
        want = chosen - best.logsumexp(-1)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), want, atol=1e-3, rtol=0)


def test_speculation_leaves_the_joint_of_two_tokens_unchanged_at_temperature_1(eagle: Any, tiny: Any) -> None:
    before = eagle.engine.stats()
    pairs = sample_pairs(eagle.engine, PROMPTS[0], 5000, seed=1)
    counted = eagle.engine.stats() - before
    assert 0 < counted.accepted < counted.drafted
    assert chi_square(pairs, eagle.model, PROMPTS[0], tiny.vocabulary) > 1e-3


def test_a_seed_repeats_its_completion_and_another_does_not(eagle: Any) -> None:
    sampling = Sampling(temperature=1.0, max_tokens=20)

    def tokens(seed: int) -> list[tuple[int, ...]]:
        requests = [Request(PROMPTS[0], seed=seed), Request(PROMPTS[1], seed=seed + 1)]
        return [c.tokens for c in eagle.engine.generate(requests, sampling)]

    assert tokens(7) == tokens(7)
    assert tokens(7) != tokens(11)


def test_results_come_in_request_order_with_each_request_s_own_length(eagle: Any, tiny: Any) -> None:
    requests = [Request(prompt, max_tokens=30 - 5 * i) for i, prompt in enumerate(PROMPTS)]
    completions = eagle.engine.generate(requests, Sampling(temperature=0, max_tokens=99))
    assert [len(c.tokens) for c in completions] == [30, 25, 20, 15, 10, 5]
    assert all(
        c.tokens == tiny.greedy(eagle.model, p, len(c.tokens)) for c, p in zip(completions, PROMPTS, strict=True)
    )


def test_a_stop_token_ends_the_completion_and_is_its_last_token(eagle: Any, tiny: Any) -> None:
    plain = tiny.greedy(eagle.model, PROMPTS[0], 30)
    stop = plain[10]
    (completion,) = eagle.engine.generate(REQUESTS[:1], Sampling(temperature=0, max_tokens=30, stop_token_ids=(stop,)))
    assert completion.tokens == plain[: plain.index(stop) + 1]
    assert completion.finish == "stop"
    (whole,) = eagle.engine.generate(REQUESTS[:1], Sampling(temperature=0, max_tokens=30))
    assert (whole.finish, len(whole.tokens)) == ("length", 30)


def test_completions_carry_statistics_that_add_up_to_the_engine_s_counters(eagle: Any) -> None:
    before = eagle.engine.stats()
    completions = eagle.engine.generate(REQUESTS, Sampling(temperature=0, max_tokens=30))
    counted = eagle.engine.stats() - before
    total = sum((c.spec for c in completions if c.spec is not None), SpecStats())
    assert total == counted == eagle.engine.last.spec
    assert counted.drafts > 0
    assert sum(counted.per_position) == counted.accepted
    # Every token but the first of each completion came from a verification step.
    assert counted.accepted + counted.drafts >= eagle.engine.last.tokens - len(REQUESTS)
    assert eagle.engine.last.tokens == 180
    assert eagle.engine.last.tokens_per_second > 0


def test_progress_is_reported_up_to_the_last_completion(eagle: Any) -> None:
    seen: list[tuple[int, int]] = []
    eagle.engine.generate(
        REQUESTS, Sampling(temperature=0, max_tokens=8), lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (6, 6)
    assert seen == sorted(seen)


def test_no_requests_is_no_work(eagle: Any) -> None:
    assert eagle.engine.generate([], Sampling()) == []


@pytest.mark.parametrize(
    ("request_", "sampling", "what"),
    [
        (Request(()), Sampling(), "does not fit"),
        (Request(tuple([1] * 448)), Sampling(), "does not fit"),
        (Request((1, 128)), Sampling(), "outside the vocabulary"),
        (Request((1, -1)), Sampling(), "outside the vocabulary"),
        (Request((1,), max_tokens=0), Sampling(), "bad max_tokens"),
        (Request((1,)), Sampling(temperature=2.5), "beyond what vLLM takes"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_and_the_engine_lives(
    eagle: Any, request_: Request, sampling: Sampling, what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        eagle.engine.generate([request_], sampling)
    assert eagle.engine.running


def test_a_completion_is_cut_at_the_context_s_end_with_finish_length(eagle: Any) -> None:
    (completion,) = eagle.engine.generate([Request(tuple([5] * 440))], Sampling(temperature=0, max_tokens=50))
    assert len(completion.tokens) == 8
    assert completion.finish == "length"


def test_the_engine_s_environment_has_nothing_of_the_launcher(eagle: Any) -> None:
    with open(f"/proc/{eagle.engine.pid}/environ", "rb") as file:
        environment = dict(item.decode().split("=", 1) for item in file.read().split(b"\0") if b"=" in item)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        assert name not in environment
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert "HOME" in environment or "HOME" not in os.environ


def test_sleep_and_wake_say_that_a_cpu_has_nothing_to_give_back(eagle: Any) -> None:
    assert eagle.engine.sleep() is False
    assert eagle.engine.wake() is False


@pytest.mark.parametrize(
    "speculation",
    [
        Speculation("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3),
        Speculation("suffix", 4),
        Speculation("draft_model", 2, by_batch_size=[[1, 2, 2], [3, 64, 0]]),
    ],
    ids=lambda speculation: speculation.method,
)
def test_other_methods_start_draft_and_are_greedy_equal(
    speculation: Speculation, tied: Any, start_engine: Any, tiny: Any, tmp_path: Any
) -> None:
    if speculation.method == "suffix":
        pytest.importorskip("arctic_inference")
    draft = None
    if speculation.method == "draft_model":
        draft = tmp_path / "draft"
        tiny.make_policy(draft, 11)
    engine = start_engine(tied.folder / "policy", draft, speculation=speculation)
    try:
        # Repetitive prompts, so that text-based methods find something to propose.
        prompts = [tuple([4, 9, 2, 7] * 6), tuple([8, 3] * 10), tuple([5, 6, 1] * 5)]
        requests = [Request(prompt) for prompt in prompts]
        for batch in (requests[:1], requests):
            completions = engine.generate(batch, Sampling(temperature=0, max_tokens=48))
            want = [tiny.greedy(tied.model, r.prompt_tokens, 48) for r in batch]
            assert [c.tokens for c in completions] == want
        assert engine.stats().drafts > 0
        assert engine.takes_draft is (draft is not None)
    finally:
        engine.close()


def test_a_plain_engine_counts_no_drafts(tied: Any) -> None:
    completions = tied.engine.generate(REQUESTS, Sampling(temperature=0, max_tokens=8))
    assert tied.engine.stats() == SpecStats()
    assert all(c.spec is None for c in completions)
    assert tied.engine.speculative is False


def test_eagle3_without_a_draft_is_refused_before_anything_starts(tied: Any) -> None:
    from lightning_spec.rollout.vllm import VLLMEngine

    engine = VLLMEngine(Speculation("eagle3", 3))
    with pytest.raises(ConfigError, match="needs a draft"):
        engine.start(EngineFiles(tied.folder / "policy"))
    assert not engine.running
