"""Serving a block drafter: proposals come from the distributions that training sees at the same anchor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spec.draft import DFlash, DraftInputs, DSpark, Proposal
from lightning_spec.draft.block import BlockDraft
from lightning_spec.loss.draft import SoftCrossEntropy
from lightning_spec.rollout.engine import EngineFiles, Request, Sampling
from lightning_spec.rollout.reference import ReferenceEngine
from lightning_spec.shapes import PolicyShape
from tests.draft.block_reference import rms, rotate

Shapes = Callable[..., Any]
Inputs = Callable[..., DraftInputs]

KIND: dict[str, Any] = {"dflash": DFlash, "dspark": DSpark}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}),
    "dflash, causal window": ("dflash", {"causal": True, "sliding_window": 4}),
    "dflash, window shorter than a block": ("dflash", {"sliding_window": 2}),
    "dspark": ("dspark", {}),
    "dspark without markov": ("dspark", {"markov_rank": 0, "confidence_with_markov": False}),
    "dspark, causal": ("dspark", {"causal": True}),
}
SMALL = {"block_size": 5, "num_layers": 2, "mask_token_id": 20, "aux_layer_ids": [2, 4, 6]}
SPARK = {"markov_rank": 3, "confidence": True, "confidence_with_markov": True}
BONUS, HEAT = [3, 7, 20], 0.9


def build(variant: str, shape: PolicyShape, **options: Any) -> BlockDraft:
    kind, own = VARIANTS[variant]
    draft: BlockDraft = KIND[kind](**(SMALL | (SPARK if kind == "dspark" else {}) | own | options))
    draft.build(shape, dtype=torch.float64, seed=3)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in draft.named_parameters():
            noise = torch.randn(p.shape, generator=g, dtype=p.dtype)
            if "norm" in name:
                p.mul_(1 + 0.3 * noise)
            elif "markov" in name or "confidence" in name:
                p.add_(noise)  # the bias starts at zero, and would not show
    return draft


def propose(draft: BlockDraft, x: DraftInputs, bonus: list[int], k: int, **args: Any) -> Proposal:
    assert x.policy_embedding is not None
    return draft.propose(
        x.features, x.tokens, x.lengths, torch.tensor(bonus), k,
        policy_head=x.policy_head, policy_embedding=x.policy_embedding, **args,
    )  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_proposals_equal_the_training_forward_at_the_same_anchor(
    variant: str, make_shape: Shapes, make_inputs: Inputs
) -> None:
    draft, context = build(variant, make_shape()), make_inputs([6, 1, 9])
    slots = draft.built().proposals
    sampled = propose(draft, context, BONUS, slots, temperature=HEAT, generator=torch.Generator().manual_seed(0))
    for b, (start, n) in enumerate(zip([0, 6, 7], context.lengths, strict=True)):
        # Rows from the anchor on have features that the block must not look at.
        x = make_inputs([n + 1 + slots], seed=b + 1)
        x.tokens = torch.cat([context.tokens[start : start + n], torch.tensor(BONUS[b : b + 1]), sampled.tokens[b]])
        x.features[:n] = context.features[start : start + n]
        x.policy_head, x.policy_embedding = context.policy_head, context.policy_embedding
        assert x.policy_embedding is not None
        x.embeddings = x.policy_embedding[x.tokens]
        x.sampled = torch.arange(n + 1 + slots) >= n
        seen: list[Tensor] = []

        class Recorder(SoftCrossEntropy):
            def __call__(self, hidden: Tensor, head: Tensor, *rest: Any, seen: list[Tensor] = seen, **more: Any) -> Any:
                logits = hidden @ head.T
                if more.get("bias") is not None:
                    logits = logits + more["bias"][0] @ more["bias"][1].T
                # Slot by slot, anchors ascending; slot s has one anchor less than slot s - 1.
                seen.extend(rows[0].detach() for rows in (logits / HEAT).split([slots - s for s in range(slots)]))
                return super().__call__(hidden, head, *rest, **more)

        draft(x, Recorder(), draft.counts(x))  # type: ignore[arg-type]
        for s in range(slots):
            torch.testing.assert_close(sampled.probs[b, s], seen[s].softmax(-1), atol=1e-11, rtol=0)


def plain(draft: BlockDraft, features: Tensor, bonus: int, k: int, head: Tensor, table: Tensor) -> Tensor:
    """[k, H] states that the head reads: trunk and block in one sequence, an explicit mask, one softmax a layer."""
    config, p = draft.built(), dict(draft.named_parameters())
    n, slots = features.shape[0], k + (config.kind == "dflash")
    eps, dim = config.norm_eps, config.head_dim
    fused = rms(features @ p["fc.weight"].T, p["hidden_norm.weight"], eps)
    h = torch.stack([table[bonus]] + [table[config.mask_token_id]] * (slots - 1))
    query, key = torch.arange(n, n + slots)[:, None], torch.arange(n + slots)[None]
    for layer in range(config.num_layers):
        name, window = f"layers.{layer}.", config.windows[layer]
        see = key <= query if config.causal[layer] else torch.ones(slots, n + slots, dtype=torch.bool)
        if window is not None:
            see = see & ((query - key).abs() < window)

        def heads(x: Tensor, which: str, at: int, name: str = name) -> Tensor:
            y = (x @ p[f"{name}self_attn.{which}_proj.weight"].T).unflatten(-1, (-1, dim))
            if which == "v":
                return y
            y = rms(y, p[f"{name}self_attn.{which}_norm.weight"], eps)
            return torch.stack([rotate(row, at + i, config.rope.theta) for i, row in enumerate(y)])

        c = rms(h, p[name + "input_layernorm.weight"], eps)
        group = config.num_heads // config.num_kv_heads
        k_, v_ = (torch.cat([heads(fused, w, 0), heads(c, w, n)]).repeat_interleave(group, 1) for w in "kv")
        scores = torch.einsum("qhd,khd->hqk", heads(c, "q", n), k_) / dim**0.5
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~see, -torch.inf).softmax(-1), v_).flatten(1)
        y = h + out @ p[name + "self_attn.o_proj.weight"].T
        m = rms(y, p[name + "post_attention_layernorm.weight"], eps)
        gate, up = m @ p[name + "mlp.gate_proj.weight"].T, m @ p[name + "mlp.up_proj.weight"].T
        h = y + (torch.nn.functional.silu(gate) * up) @ p[name + "mlp.down_proj.weight"].T
    return rms(h[slots - k :], p["norm.weight"], eps)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fewer_proposals_than_the_block_has_are_those_of_a_shorter_block(
    variant: str, k: int, make_shape: Shapes, make_inputs: Inputs
) -> None:
    draft, x = build(variant, make_shape()), make_inputs([6, 1, 9])
    assert x.policy_embedding is not None
    sampled = propose(draft, x, BONUS, k, temperature=HEAT, generator=torch.Generator().manual_seed(2))
    assert sampled.tokens.shape == (3, k)
    for b, rows in enumerate(x.features.split(x.lengths)):
        with torch.no_grad():
            logits = plain(draft, rows, BONUS[b], k, x.policy_head, x.policy_embedding) @ x.policy_head.T
        if draft.markov_head is not None:
            before = torch.tensor([BONUS[b], *sampled.tokens[b, :-1].tolist()])
            w1, w2 = draft.markov_head.markov_w1.weight.detach(), draft.markov_head.markov_w2.weight.detach()
            logits = logits + w1[before] @ w2.T
        torch.testing.assert_close(sampled.probs[b], (logits / HEAT).softmax(-1), atol=1e-11, rtol=0)
    if k > 1 and not draft.built().causal[0]:
        # A slot more changes all of them where slots see each other, so k cannot be cut off a longer block.
        one = propose(draft, x, BONUS, 1, temperature=HEAT, generator=torch.Generator().manual_seed(2))
        assert float((one.probs[:, 0] - sampled.probs[:, 0]).abs().max()) > 1e-6


@pytest.mark.parametrize("variant", ["dflash", "dspark"])
def test_greedy_proposals_are_the_most_likely_tokens_and_packing_changes_nothing(
    variant: str, make_shape: Shapes, make_inputs: Inputs
) -> None:
    draft, x = build(variant, make_shape()), make_inputs([6, 4])
    greedy = propose(draft, x, [3, 7], 3)
    assert torch.equal(greedy.probs.argmax(-1), greedy.tokens)
    assert bool(((greedy.probs == 0) | (greedy.probs == 1)).all())
    first = make_inputs([6])
    first.features, first.tokens = x.features[:6], x.tokens[:6]
    first.policy_head, first.policy_embedding = x.policy_head, x.policy_embedding
    assert propose(draft, first, [3], 3).tokens[0].tolist() == greedy.tokens[0].tolist()


@pytest.mark.parametrize("variant", ["dflash", "dspark"])
def test_sampled_proposals_are_drawn_from_the_distributions_reported_with_them(
    variant: str, make_shape: Shapes, make_inputs: Inputs
) -> None:
    draft, x = build(variant, make_shape()), make_inputs([4])
    g, draws = torch.Generator().manual_seed(1), 600
    seen, want = torch.zeros(23, dtype=torch.float64), torch.zeros(23, dtype=torch.float64)
    for _ in range(draws):
        sampled = propose(draft, x, [3], 2, temperature=3.0, generator=g)
        torch.testing.assert_close(sampled.probs.sum(-1), torch.ones(1, 2, dtype=torch.float64))
        assert bool((sampled.probs.gather(-1, sampled.tokens[..., None]) > 0).all())
        seen[sampled.tokens[0, 1]] += 1 / draws
        want += sampled.probs[0, 1] / draws
    assert float((seen - want).abs().sum()) < 0.25  # about 0.12 of noise; a draw of the wrong slot is far off
    same = [propose(draft, x, [3], 4, temperature=3.0, generator=torch.Generator().manual_seed(9)) for _ in range(2)]
    assert torch.equal(same[0].tokens, same[1].tokens)
    with pytest.raises(ValueError, match="generator"):
        propose(draft, x, [3], 2, temperature=1.0)


def test_a_proposal_ends_before_the_first_token_of_less_confidence(make_shape: Shapes, make_inputs: Inputs) -> None:
    draft, lengths = build("dspark", make_shape()), set()
    assert isinstance(draft, DSpark)
    assert draft.confidence_head is not None
    assert draft.markov_head is not None
    proj, w1 = draft.confidence_head.proj, draft.markov_head.markov_w1.weight
    assert proj.bias is not None
    for seed, bonus in enumerate([3, 8, 11, 14, 17, 19]):
        x = make_inputs([6], seed=seed)
        assert x.policy_embedding is not None
        draft.confidence_threshold = None
        whole = propose(draft, x, [bonus], 5)
        assert whole.tokens.shape == (1, 5)
        with torch.no_grad():
            states = plain(draft, x.features, bonus, 5, x.policy_head, x.policy_embedding)
            read = torch.cat([states, w1[torch.tensor([bonus, *whole.tokens[0, :-1].tolist()])]], -1)
            chance = (read @ proj.weight[0] + proj.bias[0]).sigmoid().tolist()
        for threshold in [0.0, *(c + d for c in chance for d in (-1e-9, 1e-9)), 1.0]:
            draft.confidence_threshold = min(max(threshold, 0.0), 1.0)
            want = next((i for i, c in enumerate(chance) if c < draft.confidence_threshold), 5)
            got = propose(draft, x, [bonus], 5)
            assert torch.equal(got.tokens, whole.tokens[:, :want])
            assert torch.equal(got.probs, whole.probs[:, :want])
            lengths.add(want)
    assert {0, 5} < lengths


def test_with_several_sequences_a_proposal_ends_where_the_last_of_them_does(
    make_shape: Shapes, make_inputs: Inputs
) -> None:
    draft, x = build("dspark", make_shape()), make_inputs([6, 9])
    assert isinstance(draft, DSpark)
    singles = []
    for features, tokens in zip(x.features.split(x.lengths), x.tokens.split(x.lengths), strict=True):
        one = make_inputs([len(tokens)])
        one.features, one.tokens = features, tokens
        one.policy_head, one.policy_embedding = x.policy_head, x.policy_embedding
        singles.append(one)
    found = set()
    for threshold in (0.1, 0.3, 0.5, 0.7, 0.9):
        draft.confidence_threshold = threshold
        alone = [propose(draft, one, [bonus], 5).tokens.shape[1] for one, bonus in zip(singles, [3, 7], strict=True)]
        assert propose(draft, x, [3, 7], 5).tokens.shape == (2, max(alone))
        found.add(tuple(alone))
    assert any(a != b for a, b in found)


@pytest.mark.parametrize(
    ("lengths", "bonus", "k"), [([6, 0], [3, 7], 2), ([6], [3, 7], 2), ([5], [3], 2), ([6], [3], 0), ([6], [3], 5)]
)
def test_what_cannot_be_proposed_is_refused(
    lengths: list[int], bonus: list[int], k: int, make_shape: Shapes, make_inputs: Inputs
) -> None:
    draft, x = build("dflash", make_shape()), make_inputs([6])
    x.lengths = lengths
    with pytest.raises(ValueError, match=r"lengths|proposals"):
        propose(draft, x, bonus, k)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    sizes = {"vocab_size": 23, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **special, initializer_range=0.3)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("threshold", [None, 0.5])
@pytest.mark.parametrize("kind", KIND)
def test_the_reference_engine_s_greedy_tokens_are_the_policy_s_own(
    kind: str, threshold: float | None, policy: Path, tmp_path: Path
) -> None:
    if kind == "dflash" and threshold is not None:
        pytest.skip("DFlash has no confidence head")
    draft = build(kind, PolicyShape.from_file(policy), aux_layer_ids=[1, 3], block_size=4)
    files = EngineFiles(policy, draft.export(tmp_path), f"lightning_spec.draft.{KIND[kind].__name__}")
    requests, sampling = [Request((1, 2, 3)), Request((4,)), Request((7, 8, 9, 10, 11))], Sampling(0.0, max_tokens=40)
    plain_engine = ReferenceEngine("none")
    plain_engine.start(files)
    engine = ReferenceEngine("draft", 3, confidence_threshold=threshold)
    engine.start(files)
    want = [c.tokens for c in plain_engine.generate(requests, sampling)]
    assert [c.tokens for c in engine.generate(requests, sampling)] == want
    stats = engine.stats()
    assert stats.drafts > 0
    assert (stats.drafted == 3 * stats.drafts) is (threshold is None)
