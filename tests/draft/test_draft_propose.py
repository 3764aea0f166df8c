"""Serving: proposals come from the distributions that training sees on the same prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spec.draft import DraftInputs, Eagle3, Proposal, VocabMap
from lightning_spec.loss.draft import SoftCrossEntropy

K = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "one_layer": {},
    "two_layers": {"num_layers": 2},
    "own": {"own_head": True, "own_embedding": True},
    "reduced": {"draft_vocab_size": 7},
    "norms": {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True},
}


def build(shape: Any, variant: str) -> Eagle3:
    draft = Eagle3(num_passes=K, **VARIANTS[variant])
    if variant == "reduced":
        draft.use_vocab_map(VocabMap(torch.tensor([0, 2, 3, 9, 12, 17, 22]), 23))
    draft.build(shape, dtype=torch.float64)
    return draft


def propose(draft: Eagle3, x: DraftInputs, bonus: list[int], **args: Any) -> Proposal:
    return draft.propose(
        x.features, x.tokens, x.lengths, torch.tensor(bonus), K,
        policy_head=x.policy_head, policy_embedding=x.policy_embedding, **args,
    )  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_proposals_equal_the_training_passes_on_the_same_prefix(
    variant: str, make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    draft = build(make_shape(), variant)
    context = make_inputs([6, 1, 9])
    g = torch.Generator().manual_seed(0)
    sampled = propose(draft, context, [3, 7, 20], temperature=0.9, generator=g)
    starts = [0, 6, 7]
    for b, (start, length) in enumerate(zip(starts, context.lengths, strict=True)):
        continued = torch.tensor([[3, 7, 20][b], *sampled.tokens[b].tolist()])
        # Training on context + bonus + proposals; rows after the anchor have features the draft must not look at.
        x = make_inputs([length + 1 + K], seed=b + 1)
        x.tokens = torch.cat([context.tokens[start : start + length], continued])
        x.features[:length] = context.features[start : start + length]
        x.policy_head, x.policy_embedding = context.policy_head, context.policy_embedding
        x.embeddings = x.policy_embedding[x.tokens]
        x.sampled = torch.arange(length + 1 + K) == length
        x.sampled[length:] = True
        seen: list[Tensor] = []

        class Recorder(SoftCrossEntropy):
            def __call__(self, hidden: Tensor, head: Tensor, *rest: Any, seen: list[Tensor] = seen, **more: Any) -> Any:
                q = (hidden @ head.T / 0.9).softmax(-1).detach()
                seen.extend(rows[0] for rows in q.split([K + 1 - i for i in range(K)]))  # a pass less, a row less
                return super().__call__(hidden, head, *rest, **more)

        draft.set_attention("ring")
        draft(x, Recorder(), draft.counts(x))  # type: ignore[arg-type]
        ids = draft.target_ids()
        for i in range(K):
            q = sampled.probs[b, i]
            inside = q if ids is None else q[ids]
            assert torch.allclose(inside, seen[i], atol=1e-12)
            assert float(q.sum()) == pytest.approx(1.0)
            assert float(q[sampled.tokens[b, i]]) > 0


@pytest.mark.parametrize("variant", ["one_layer", "reduced"])
def test_greedy_proposals_are_the_most_likely_tokens_and_packing_changes_nothing(
    variant: str, make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    draft = build(make_shape(), variant)
    x = make_inputs([6, 4])
    greedy = propose(draft, x, [3, 7])
    assert torch.equal(greedy.probs.argmax(-1), greedy.tokens)
    assert bool(((greedy.probs == 0) | (greedy.probs == 1)).all())
    first = make_inputs([6])
    first.features, first.tokens = x.features[:6], x.tokens[:6]
    first.policy_head, first.policy_embedding = x.policy_head, x.policy_embedding
    assert propose(draft, first, [3]).tokens[0].tolist() == greedy.tokens[0].tolist()


def test_samples_follow_their_distribution_and_the_generator_alone(
    make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    draft = build(make_shape(), "one_layer")
    x = make_inputs([3])
    many = make_inputs([3] * 2000)
    many.features, many.tokens = x.features.repeat(2000, 1), x.tokens.repeat(2000)
    many.policy_head, many.policy_embedding = x.policy_head, x.policy_embedding
    g = torch.Generator().manual_seed(7)
    out = propose(draft, many, [5] * 2000, temperature=1.0, generator=g)
    found = torch.bincount(out.tokens[:, 0], minlength=23) / 2000
    assert float((found - out.probs[0, 0]).abs().sum()) < 0.1
    assert torch.equal(out.tokens, propose(draft, many, [5] * 2000, temperature=1.0, generator=g.manual_seed(7)).tokens)
    with pytest.raises(ValueError, match="generator"):
        propose(draft, x, [5], temperature=1.0)


def test_inputs_that_do_not_fit_are_refused(
    make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    draft = build(make_shape(), "one_layer")
    with pytest.raises(ValueError, match="do not fit"):
        propose(draft, make_inputs([3]), [1, 2])
    with pytest.raises(ValueError, match="do not fit"):
        propose(draft, make_inputs([3, 0]), [1, 2])
    with pytest.raises(RuntimeError, match="build"):
        propose(Eagle3(), make_inputs([3]), [1])
