"""The reference engine: speculation is lossless, log-probs are those of the sampling distribution, refits are whole."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

from lightning_spec.batch import SpecStats
from lightning_spec.errors import ConfigError, EngineError
from lightning_spec.rollout.engine import EngineFiles, Request, Sampling
from lightning_spec.rollout.proposers import Context, NgramProposer, Proposer
from lightning_spec.rollout.reference import ReferenceEngine
from lightning_spec.rollout.sampling import draw, target_probs, verify

VOCAB = 12


def tiny_model(seed: int = 0, tied: bool = False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=48,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tiny_model().save_pretrained(folder)
    return folder


def engine(policy: Path, proposer: Proposer | None = None, k: int = 3) -> ReferenceEngine:
    made = ReferenceEngine(proposer=proposer, num_speculative_tokens=k)
    made.start(EngineFiles(policy))
    return made


class Adversary(Proposer):
    """Draws from a distribution that is far from the policy's and differs at each slot."""

    def __init__(self, vocab: int = VOCAB) -> None:
        generator = torch.Generator().manual_seed(5)
        self.q = (3 * torch.randn(8, vocab, generator=generator, dtype=torch.float64)).softmax(-1)

    def propose(self, context: Context, k: int) -> tuple[list[int], Tensor]:
        q = self.q[:k]
        return [int(torch.multinomial(row, 1, generator=context.generator)) for row in q], q


class Repeat(Proposer):
    """Proposes one fixed token, with certainty: greedy proposals under sampled verification."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, context: Context, k: int) -> tuple[list[int], Tensor]:
        return [self.token] * k, torch.nn.functional.one_hot(torch.tensor([self.token] * k), VOCAB).double()


class Script(Proposer):
    """Proposes what is known to come (an oracle), from a completion made before."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def propose(self, context: Context, k: int) -> tuple[list[int], Tensor]:
        found = self.tokens[len(context.tokens) : len(context.tokens) + k]
        return found, torch.nn.functional.one_hot(torch.tensor(found, dtype=torch.int64), VOCAB).double()


def exact_sequences(policy: Path, prompt: tuple[int, ...], length: int, sampling: Sampling) -> dict[tuple, float]:
    """Probability of every completion of the given length, by enumeration."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy)
    table = {(): 1.0}
    for _ in range(length):
        grown = {}
        for done, mass in table.items():
            with torch.no_grad():
                probs = target_probs(model(torch.tensor([[*prompt, *done]])).logits[0, -1], sampling)
            grown.update({(*done, t): mass * float(p) for t, p in enumerate(probs) if p > 0})
        table = grown
    return table


@pytest.mark.parametrize(
    ("proposer", "sampling"),
    [
        (Adversary(), Sampling(temperature=1.0, max_tokens=3)),
        (Adversary(), Sampling(temperature=0.6, top_k=5, top_p=0.9, max_tokens=3)),
        (Repeat(4), Sampling(temperature=1.3, max_tokens=3)),
    ],
)
def test_speculation_changes_no_distribution(policy, proposer, sampling):
    prompt = (1, 5, 2)
    expected = exact_sequences(policy, prompt, 3, sampling)
    n = 600
    done = engine(policy, proposer).generate([Request(prompt, seed=i) for i in range(n)], sampling)
    seen = Counter(c.tokens for c in done)
    assert set(seen) <= set(expected)
    # The first token comes from the prompt's forward; the next ones pass through drafts. Test each and the pair.
    for places in ((1,), (2,), (1, 2)):
        wanted: Counter = Counter()
        observed: Counter = Counter()
        for sequence, mass in expected.items():
            wanted[tuple(sequence[i] for i in places)] += mass * n
            observed[tuple(sequence[i] for i in places)] += seen[sequence]
        # Rare outcomes are pooled, so that every cell expects enough.
        common = [key for key, count in wanted.items() if count >= 5]
        cells = [(observed[key], wanted[key]) for key in common]
        cells.append((n - sum(o for o, _ in cells), n - sum(w for _, w in cells)))
        cells = [cell for cell in cells if cell[1] > 1e-6 * n]
        assert len(cells) >= 4
        assert stats.chisquare([o for o, _ in cells], [w for _, w in cells]).pvalue > 1e-3
    assert 0 < sum(c.spec.accepted for c in done) < sum(c.spec.drafted for c in done)


def test_rejection_sampling_is_exact_for_any_draft_distribution():
    generator = torch.Generator().manual_seed(0)
    p = (2 * torch.randn(2, 6, generator=generator, dtype=torch.float64)).softmax(-1)
    for sharp in (0.0, 2.0, 20.0):
        q = (sharp * torch.randn(1, 6, generator=generator, dtype=torch.float64)).softmax(-1)
        n, first = 4_000, Counter()
        uniforms = torch.rand(n * 3, generator=generator, dtype=torch.float64).tolist()
        take = iter(uniforms)
        for _ in range(n):
            x = draw(q[0], next(take))
            accepted, token = verify(p, [x], q, take.__next__)
            first[x if accepted else token] += 1
        assert stats.chisquare([first[t] for t in range(6)], (p[0] * n).tolist()).pvalue > 1e-3


@pytest.mark.parametrize("proposer", [Adversary(), NgramProposer(), Repeat(3)])
def test_greedy_tokens_are_equal_with_and_without_speculation(policy, proposer):
    prompts = [(1, 2, 3), (4,), (7, 7, 7, 7), (11, 0, 5, 9, 2)]
    requests = [Request(p) for p in prompts]
    sampling = Sampling(temperature=0.0, max_tokens=30, stop_token_ids=(6,))
    plain = engine(policy).generate(requests, sampling)
    drafted = engine(policy, proposer).generate(requests, sampling)
    assert [c.tokens for c in plain] == [c.tokens for c in drafted]
    assert [c.finish for c in plain] == [c.finish for c in drafted]
    for a, b in zip(plain, drafted, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.7, max_tokens=12), Sampling(temperature=0.0, max_tokens=12)]
)
@pytest.mark.parametrize("proposer", [None, Adversary()])
def test_logprobs_are_those_of_one_plain_forward_at_the_sampling_temperature(policy, sampling, proposer):
    from transformers import AutoModelForCausalLM

    prompt = (3, 1, 4)
    done = engine(policy, proposer).generate([Request(prompt, seed=2)], sampling)[0]
    model = AutoModelForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *done.tokens]])).logits[0].double()
    # At temperature 0 the raw distribution is reported.
    logps = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
    wanted = [float(logps[len(prompt) - 1 + i, t]) for i, t in enumerate(done.tokens)]
    assert done.logprobs == pytest.approx(wanted, abs=1e-4)


def test_an_oracle_is_accepted_whole_and_counted_by_position(policy):
    prompt, sampling = (1, 2, 3), Sampling(temperature=0.0, max_tokens=13)
    plain = engine(policy).generate([Request(prompt)], sampling)[0]
    oracle = engine(policy, Script([*prompt, *plain.tokens]), k=3)
    done = oracle.generate([Request(prompt)], sampling)[0]
    assert done.tokens == plain.tokens
    # 1 token from the prompt's forward, then 3 verifications of 3 proposals, each giving 4 tokens.
    assert done.spec == SpecStats(3, 9, 9, (3, 3, 3))
    assert done.spec.acceptance_length == 4.0
    oracle.generate([Request(prompt)], sampling)
    assert oracle.stats() == SpecStats(6, 18, 18, (6, 6, 6))
    assert oracle.last.spec == done.spec
    assert oracle.last.tokens == 13


def test_a_completion_depends_on_its_seed_and_not_on_the_other_requests(policy):
    sampling = Sampling(temperature=1.0, max_tokens=10)
    subject = engine(policy, Adversary())
    alone = subject.generate([Request((1, 2), seed=9)], sampling)[0]
    among = subject.generate([Request((3,), seed=1), Request((1, 2), seed=9), Request((5, 5), seed=9)], sampling)
    assert among[1].tokens == alone.tokens
    assert among[0].tokens != among[1].tokens
    state = torch.get_rng_state()
    other = subject.generate([Request((1, 2), seed=10)], sampling)[0]
    assert torch.equal(state, torch.get_rng_state())
    assert other.tokens != alone.tokens


def test_call_seeds_number_the_requests_and_unseeded_calls_differ(policy):
    sampling = Sampling(temperature=1.0, max_tokens=12, seed=100)
    subject = engine(policy)
    one = subject.generate([Request((1, 2))] * 3, sampling)
    assert one == subject.generate([Request((1, 2))] * 3, sampling)
    assert one[1].tokens == subject.generate([Request((1, 2), seed=101)], sampling)[0].tokens
    free = Sampling(temperature=1.0, max_tokens=12)
    assert len({c.tokens for c in subject.generate([Request((1, 2))] * 6, free)}) > 1


def test_stop_and_length_ends_are_told_apart_and_cut_inside_a_draft(policy):
    sampling = Sampling(temperature=0.0, max_tokens=20)
    prompt = (1, 2, 3)
    free = engine(policy).generate([Request(prompt)], sampling)[0]
    assert free.finish == "length"
    assert len(free.tokens) == 20
    stop = free.tokens[5]
    first = free.tokens.index(stop)
    script = Script([*prompt, *free.tokens])
    halted = engine(policy, script).generate(
        [Request(prompt)], Sampling(temperature=0.0, max_tokens=20, stop_token_ids=(stop,))
    )[0]
    assert halted.tokens == free.tokens[: first + 1]
    assert halted.finish == "stop"
    short = engine(policy, script).generate([Request(prompt, max_tokens=4)], sampling)[0]
    assert short.tokens == free.tokens[:4]
    assert short.finish == "length"
    # A stop token at the limit is a stop.
    edge = Sampling(temperature=0.0, max_tokens=first + 1, stop_token_ids=(stop,))
    assert engine(policy, script).generate([Request(prompt)], edge)[0].finish == "stop"
    # A completion that is only the stop token.
    only = Sampling(temperature=0.0, max_tokens=9, stop_token_ids=(free.tokens[0],))
    assert engine(policy, script).generate([Request(prompt)], only)[0].tokens == free.tokens[:1]


def test_generation_fills_the_context_to_its_last_position_and_refuses_more(policy):
    sampling = Sampling(temperature=0.0, max_tokens=46)
    plain = engine(policy).generate([Request((1, 2))], sampling)[0]
    drafted = engine(policy, Adversary(), k=7).generate([Request((1, 2))], sampling)[0]
    assert len(plain.tokens) == 46
    assert plain.tokens == drafted.tokens
    for request in (Request((1, 2, 3)), Request(()), Request((1, VOCAB)), Request((1,), max_tokens=0)):
        with pytest.raises(ConfigError):
            engine(policy).generate([request], sampling)


def test_a_refit_changes_what_is_sampled_and_the_version(policy):
    other = tiny_model(seed=1)
    subject = engine(policy, Adversary())
    sampling = Sampling(temperature=0.0, max_tokens=16)
    before = subject.generate([Request((1, 2, 3))], sampling)[0]
    report = subject.refit(other.state_dict().items(), None, version=7, verify=True)
    after = subject.generate([Request((1, 2, 3))], sampling)[0]
    names = len(other.state_dict())
    assert (report.version, report.tensors, report.verified) == (7, names, names)
    assert report.bytes == 4 * sum(t.numel() for t in other.state_dict().values())
    assert (before.version, after.version) == (0, 7)
    assert before.tokens != after.tokens
    wanted = other.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert list(after.tokens) == wanted[0, 3:].tolist()


def test_the_engine_keeps_its_own_copy_of_refitted_weights(policy):
    other = tiny_model(seed=1)
    subject = engine(policy)
    subject.refit(other.state_dict().items(), None, version=1)
    sampling = Sampling(temperature=0.0, max_tokens=8)
    before = subject.generate([Request((1, 2, 3))], sampling)[0]
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert subject.generate([Request((1, 2, 3))], sampling)[0].tokens == before.tokens


@pytest.mark.parametrize("fault", ["missing", "surplus", "shape", "twice", "draft"])
def test_a_bad_refit_raises_and_changes_nothing(policy, fault):
    tensors = dict(tiny_model(seed=1).state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    stream = list(tensors.items())
    draft = None
    if fault == "missing":
        stream = [(n, t) for n, t in stream if n != name]
    elif fault == "surplus":
        stream.append(("model.layers.9.weight", torch.zeros(1)))
    elif fault == "shape":
        stream = [(n, t[:-1] if n == name else t) for n, t in stream]
    elif fault == "twice":
        stream.append((name, tensors[name]))
    else:
        draft = [("fc.weight", torch.zeros(1))]
    subject = engine(policy)
    sampling = Sampling(temperature=0.0, max_tokens=8)
    before = subject.generate([Request((1, 2, 3))], sampling)
    with pytest.raises(EngineError, match="refit"):
        subject.refit(stream, draft, version=3)
    assert subject.generate([Request((1, 2, 3))], sampling) == before
    assert subject.version == 0


def test_a_tied_head_follows_the_embedding_in_a_refit(tmp_path):
    tiny_model(tied=True).save_pretrained(tmp_path)
    subject = engine(tmp_path)
    other = tiny_model(seed=1, tied=True)
    stream = [(n, t) for n, t in other.state_dict().items() if n != "lm_head.weight"]
    subject.refit(stream, None, version=1, verify=True)
    done = subject.generate([Request((1, 2, 3))], Sampling(temperature=0.0, max_tokens=16))[0]
    wanted = other.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert list(done.tokens) == wanted[0, 3:].tolist()


def test_ngram_lookup_continues_the_most_recent_longest_match():
    head = torch.zeros(50, 2)
    context = Context([1, 2, 3, 9, 2, 3, 8, 7, 2, 3], None, head, head, 1.0, torch.Generator())
    tokens, probs = NgramProposer(longest=3).propose(context, 3)
    assert tokens == [8, 7, 2]
    assert probs.argmax(-1).tolist() == tokens
    assert probs.sum() == 3
    context.tokens = [1, 2, 3, 9, 4, 3, 8, 2, 3]
    assert NgramProposer(longest=3).propose(context, 2)[0] == [9, 4]
    context.tokens = [1, 2, 3]
    assert NgramProposer().propose(context, 2)[0] == []
    context.tokens = [5]
    assert NgramProposer().propose(context, 2)[0] == []


def test_the_engine_says_what_is_wrong_before_it_starts(policy, tmp_path):
    with pytest.raises(ConfigError, match="method"):
        ReferenceEngine(method="magic")
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        ReferenceEngine(num_speculative_tokens=0)
    with pytest.raises(ConfigError, match="needs a draft"):
        ReferenceEngine(method="draft").start(EngineFiles(policy))
    with pytest.raises(ConfigError, match=r"config\.json"):
        ReferenceEngine().start(EngineFiles(tmp_path))
    with pytest.raises(ConfigError, match="no such draft class"):
        ReferenceEngine(method="draft").start(EngineFiles(policy, tmp_path, "lightning_spec.draft.eagle3.Egale3"))
    idle = ReferenceEngine()
    with pytest.raises(EngineError, match="not running"):
        idle.generate([Request((1,))], Sampling())
    idle.close()
    idle.close()
    started = engine(policy)
    assert started.running
    started.close()
    assert not started.running


def test_top_k_then_top_p_keep_the_smallest_sufficient_set():
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()
    kept = target_probs(logits, Sampling(temperature=1.0, top_p=0.7))
    assert kept.tolist() == pytest.approx([5 / 7, 2 / 7, 0, 0, 0])
    kept = target_probs(logits, Sampling(temperature=1.0, top_k=3, top_p=0.8))
    assert kept.tolist() == pytest.approx([5 / 7, 2 / 7, 0, 0, 0])
    kept = target_probs(logits, Sampling(temperature=1.0, top_p=1e-6))
    assert kept.tolist() == [1, 0, 0, 0, 0]
    kept = target_probs(logits, Sampling(temperature=0.5, top_k=2))
    assert kept.tolist() == pytest.approx([25 / 29, 4 / 29, 0, 0, 0])
    assert target_probs(logits, Sampling(temperature=0)).tolist() == [1, 0, 0, 0, 0]
