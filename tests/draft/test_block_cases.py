"""What broke other trainers of block drafters (CASES.md parts A and B), each as a small input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_spec.draft import DraftInputs
from lightning_spec.draft.block import BlockDraft
from lightning_spec.errors import ConfigError
from lightning_spec.loss.draft import HardCrossEntropy, SoftCrossEntropy
from lightning_spec.loss.position import DPACE
from tests.draft.block_reference import grads, worst
from tests.draft.test_block_dense import KIND, build

Shape = Callable[..., Any]
Inputs = Callable[..., DraftInputs]
both = pytest.mark.parametrize("kind", KIND)


def run(draft: BlockDraft, x: DraftInputs, loss: Any = None, totals: Any = None) -> Any:
    return draft(x, loss or SoftCrossEntropy(), draft.counts(x) if totals is None else totals)  # type: ignore[arg-type]


def only(anchor: int, label: int, total: int) -> list[bool]:
    """Masks under which `anchor` is the first anchor, and its labels end at `label`."""
    return [anchor <= n <= label for n in range(total)]


@both
@pytest.mark.parametrize("lengths", [[], [1], [1, 1], [6]])
def test_without_a_valid_anchor_loss_and_gradients_are_zero(
    kind: str, lengths: list[int], make_shape: Shape, make_inputs: Inputs
) -> None:
    """CASES A3: an empty batch, T = 1, nothing sampled."""
    draft = build(kind, {"slot_weights": DPACE()}, make_shape())
    x = make_inputs(lengths, sampled=[False] * sum(lengths) if lengths == [6] else None)
    out = run(draft, x)
    assert float(out.loss) == 0.0
    assert all(float(count) == 0.0 for count in draft.counts(x).values())  # type: ignore[arg-type]
    out.loss.backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().sum()) == 0.0, name
    full = run(draft, make_inputs([9]))
    assert out.metrics.keys() == full.metrics.keys()
    assert all(float(num) == float(den) == 0.0 for num, den, _ in out.metrics.values())


@both
def test_the_end_of_a_turn_ends_the_scored_slots(kind: str, make_shape: Shape, make_inputs: Inputs) -> None:
    """CASES A5: two turns of sampled tokens, 3 .. 6 and 9 .. 10; a slot counts the anchors with that many labels."""
    draft = build(kind, {"block_size": 5}, make_shape())
    x = make_inputs([12], sampled=[n in (3, 4, 5, 6, 9, 10) for n in range(12)])
    counts = [int(n) for n in draft.counts(x).values()]  # type: ignore[arg-type]
    # Anchors 3, 4, 5 have 3, 2, 1 labels, anchor 9 has one.
    assert counts == [4, 2, 1, 0, 0][: len(counts)]
    out = run(draft, x)
    assert [int(out.metrics[f"draft/loss_{s}"][1]) for s in range(len(counts))] == counts


@both
def test_each_slot_reads_its_own_teacher_and_label_and_no_others(
    kind: str, make_shape: Shape, make_inputs: Inputs
) -> None:
    """CASES A6: at anchor a slot s is taught by row a + s and labelled x_{a+1+s}, in training as in serving."""
    draft = build(kind, {"block_size": 4}, make_shape())
    slots = draft.built().proposals
    x = make_inputs([12], sampled=only(4, 4 + slots, 12))
    hidden = torch.full_like(x.hidden, torch.nan)
    rows = slice(4, 4 + slots)
    hidden[rows] = x.hidden[rows]
    for loss in (SoftCrossEntropy(), HardCrossEntropy()):
        want, got = run(draft, x, loss), run(draft, replace(x, hidden=hidden), loss)
        assert torch.isfinite(got.loss)
        assert float(got.loss) == float(want.loss)
    for row in range(12):
        tokens = x.tokens.clone()
        tokens[row] = (tokens[row] + 1) % 23
        changed = abs(float(run(draft, replace(x, tokens=tokens), HardCrossEntropy()).loss) - float(want.loss)) > 1e-9
        # Labels; and with the Markov bias the token before the first label, the anchor's.
        assert changed == (row in range(5, 5 + slots) or (kind == "dspark" and row == 4)), row


@both
def test_a_block_sees_the_trunk_before_its_anchor_alone(kind: str, make_shape: Shape, make_inputs: Inputs) -> None:
    draft = build(kind, {"num_layers": 2}, make_shape())
    x = make_inputs([10], sampled=only(5, 6, 10))
    want = run(draft, x)
    for row in range(10):
        features, embeddings = x.features.clone(), x.embeddings.clone()
        features[row] += 1.0
        embeddings[row] += 1.0
        by_tap = float(run(draft, replace(x, features=features)).loss) != float(want.loss)
        by_embedding = float(run(draft, replace(x, embeddings=embeddings)).loss) != float(want.loss)
        assert (by_tap, by_embedding) == (row < 5, row == 5), row


@both
def test_no_gradient_reaches_the_policy_and_nothing_of_it_is_written(
    kind: str, make_shape: Shape, make_inputs: Inputs
) -> None:
    """CASES A8, also where teacher and draft share one head."""
    draft = build(kind, {"slot_weights": DPACE()}, make_shape())
    x = make_inputs([9, 5])
    names = ("features", "embeddings", "hidden", "policy_head", "policy_embedding")
    given = {name: getattr(x, name).clone().requires_grad_() for name in names}
    x = replace(x, special=given["policy_embedding"][20:21], **given)
    run(draft, x).loss.backward()
    for name, tensor in given.items():
        assert tensor.grad is None, name
    fresh = make_inputs([9, 5])
    for name, tensor in given.items():
        assert torch.equal(tensor.detach(), getattr(fresh, name)), name


@both
def test_metrics_have_every_slot_that_is_sampled(kind: str, make_shape: Shape, make_inputs: Inputs) -> None:
    """CASES A11."""
    draft = build(kind, {"block_size": 5}, make_shape())
    out = run(draft, make_inputs([9]))
    for metric in ("loss", "agree", "alpha", "accept"):
        found = {name for name in out.metrics if name.startswith(f"draft/{metric}_")}
        assert found == {f"draft/{metric}_{s}" for s in range(5 if kind == "dspark" else 4)}


@both
def test_perturbing_document_0_changes_nothing_of_document_1(kind: str, make_shape: Shape, make_inputs: Inputs) -> None:
    """CASES B4: loss, metrics and gradients of document 1 alone."""
    draft = build(kind, {"num_layers": 2, "causal": False}, make_shape())
    x = make_inputs([7, 8], sampled=[False] * 7 + [False] + [True] * 7)
    other = make_inputs([7, 8], seed=9)
    mixed: dict[str, Any] = {
        name: torch.cat([getattr(other, name)[:7], getattr(x, name)[7:]])
        for name in ("features", "embeddings", "hidden", "tokens")
    }
    a, b = run(draft, x), run(draft, replace(x, **mixed))
    assert float(a.loss) == float(b.loss)
    assert worst(grads(a.loss, draft), grads(b.loss, draft)) < 1e-14
    assert {n: (float(u), float(v)) for n, (u, v, _) in a.metrics.items()} == {
        n: (float(u), float(v)) for n, (u, v, _) in b.metrics.items()
    }


@both
def test_packed_documents_sum_to_what_each_gives_alone(kind: str, make_shape: Shape, make_inputs: Inputs) -> None:
    draft = build(kind, {"anchors_per_sequence": 3, "slot_weights": DPACE()}, make_shape())
    x = replace(make_inputs([9, 1, 6]), document_seeds=[3, 4, 5])
    totals = draft.counts(x)  # type: ignore[arg-type]
    packed, parts, start = run(draft, x), [], 0
    for length, seed in zip(x.lengths, [3, 4, 5], strict=True):
        rows = slice(start, start + length)
        start += length
        names = ("features", "embeddings", "hidden", "tokens", "positions", "sampled", "stop")
        alone = replace(x, lengths=[length], document_seeds=[seed], **{name: getattr(x, name)[rows] for name in names})
        parts.append(run(draft, alone, totals=totals))
    assert float(packed.loss) == pytest.approx(sum(float(part.loss) for part in parts), abs=1e-12)
    apart = [grads(part.loss, draft) for part in parts]
    assert worst(grads(packed.loss, draft), {n: sum(g[n] for g in apart) for n in apart[0]}) < 1e-11  # type: ignore[misc]


@both
def test_seeds_decide_the_anchors_and_nothing_is_drawn_from_the_global_state(
    kind: str, make_shape: Shape, make_inputs: Inputs
) -> None:
    """CASES B10."""
    state = torch.get_rng_state()
    draft = build(kind, {"anchors_per_sequence": 2}, make_shape())
    x = make_inputs([20, 20])
    one, again, other = (float(run(draft, replace(x, document_seeds=seeds)).loss) for seeds in ([1, 2], [1, 2], [3, 4]))
    assert one == again != other
    run(draft, x).loss.backward()
    assert torch.equal(state, torch.get_rng_state())


@both
def test_no_more_slots_than_the_budget_are_computed_at_a_time(
    kind: str, make_shape: Shape, make_inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = build(kind, {"token_budget": 11, "block_size": 4}, make_shape())
    sizes, blocks = [], draft.blocks

    def watched(embedded: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(embedded.shape[0] * embedded.shape[1])
        return blocks(embedded, *rest)

    monkeypatch.setattr(draft, "blocks", watched)
    run(draft, make_inputs([30]))
    assert max(sizes) == 8
    assert sum(sizes) == 4 * 28


@both
def test_frozen_parameters_get_no_gradient_and_change_no_other(
    kind: str, make_shape: Shape, make_inputs: Inputs
) -> None:
    draft, x = build(kind, {"token_budget": 9}, make_shape()), make_inputs([9, 4])
    whole = grads(run(draft, x).loss, draft)
    for frozen in ("fc", "layers", "norm", "markov_head", "confidence_head"):
        for name, parameter in draft.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
            parameter.grad = None
        run(draft, x).loss.backward()
        for name, parameter in draft.named_parameters():
            if name.startswith(frozen):
                assert parameter.grad is None
            else:
                assert parameter.grad is not None
                assert worst({name: parameter.grad}, {name: whole[name]}) < 1e-12, (frozen, name)
    draft.requires_grad_(False)
    assert not run(draft, x).loss.requires_grad


@both
def test_loss_and_metrics_are_the_same_without_grad_mode(kind: str, make_shape: Shape, make_inputs: Inputs) -> None:
    draft, x = build(kind, {}, make_shape()), make_inputs([9, 4])
    want = run(draft, x)
    with torch.no_grad():
        got = run(draft, x)
    assert not got.loss.requires_grad
    assert float(got.loss) == float(want.loss)
    assert all(float(got.metrics[n][0]) == float(want.metrics[n][0]) for n in want.metrics)


@both
def test_training_lowers_the_loss(kind: str, make_shape: Shape, make_inputs: Inputs) -> None:
    draft, x = build(kind, {}, make_shape(), torch.float32), make_inputs([24], dtype=torch.float32)
    optimiser = torch.optim.Adam(draft.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        out = run(draft, x)
        out.loss.backward()
        optimiser.step()
        losses.append(float(out.loss))
    assert losses[-1] < 0.7 * losses[0]


@both
def test_the_mask_embedding_is_the_policys_live_one(kind: str, make_shape: Shape, make_inputs: Inputs) -> None:
    draft, x = build(kind, {}, make_shape()), make_inputs([9])
    assert draft.embedding_ids == (20,)
    assert x.policy_embedding is not None
    want = float(run(draft, x).loss)
    special = replace(x, special=x.policy_embedding[20:21], policy_embedding=None)
    assert float(run(draft, special).loss) == want
    assert float(run(draft, replace(special, special=x.policy_embedding[3:4])).loss) != want
    with pytest.raises(ValueError, match="mask token's embedding"):
        run(draft, replace(special, special=None))


@both
def test_what_the_draft_cannot_do_is_refused(kind: str, make_shape: Shape, make_inputs: Inputs) -> None:
    draft, x = build(kind, {}, make_shape()), make_inputs([9])
    with pytest.raises(ConfigError, match="draft_attention"):
        draft.set_attention("ulysses")
    draft.check_length(64)
    with pytest.raises(ConfigError, match="max_positions"):
        draft.check_length(65)
    with pytest.raises(ValueError, match="policy_head has 22 rows"):
        run(draft, replace(x, policy_head=x.policy_head[:22]))
    for name in ("anchors_per_sequence", "token_budget"):
        with pytest.raises(ConfigError, match=name):
            build(kind, {name: 0}, make_shape())


def test_confidence_options_are_checked(make_shape: Shape) -> None:
    for name, value in (("confidence_weight", -1.0),):
        with pytest.raises(ConfigError, match=name):
            build("dspark", {name: value}, make_shape())


def test_the_confidence_target_is_a_constant(make_shape: Shape, make_inputs: Inputs) -> None:
    """With weight 0 the confidence head gets no gradient and the rest the same as without a head."""
    x = make_inputs([9, 5])
    none, bare = (
        build("dspark", {"confidence_weight": 0.0}, make_shape()),
        build("dspark", {"confidence": False, "confidence_with_markov": False}, make_shape()),
    )
    with torch.no_grad():
        for name, parameter in bare.named_parameters():
            parameter.copy_(dict(none.named_parameters())[name])
    a, b = run(none, x), run(bare, x)
    assert float(a.loss) == float(b.loss)
    found = grads(a.loss, none)
    assert worst({n: g for n, g in found.items() if "confidence" not in n}, grads(b.loss, bare)) < 1e-14
    assert all(float(g.abs().sum()) == 0.0 for n, g in found.items() if "confidence" in n)
