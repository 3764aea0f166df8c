"""What broke other trainers (CASES.md parts A and B), each as a small input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spec.batch import Completion, Prompt, Rollout, pack_documents
from lightning_spec.draft import Draft, DraftInputs, Eagle3
from lightning_spec.errors import ConfigError
from lightning_spec.loss.draft import LK, SoftCrossEntropy

Shapes = Callable[..., Any]
Inputs = Callable[..., DraftInputs]
LOSS = SoftCrossEntropy()


def run(draft: Eagle3, x: DraftInputs, totals: Any = None) -> tuple[float, dict[str, Tensor]]:
    draft.zero_grad()
    out = draft(x, LOSS, totals or draft.counts(x))  # type: ignore[arg-type]
    out.loss.backward()
    return float(out.loss.detach()), {
        name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None
    }


def built(shape: Any, **args: Any) -> Eagle3:
    draft = Eagle3(**({"num_passes": 3} | args))
    draft.build(shape, dtype=torch.float64)
    return draft


def same(a: tuple[float, dict[str, Tensor]], b: tuple[float, dict[str, Tensor]], tolerance: float = 1e-12) -> bool:
    return abs(a[0] - b[0]) <= tolerance and all(bool(((a[1][n] - b[1][n]).abs() <= tolerance).all()) for n in b[1])


def join(*parts: DraftInputs) -> DraftInputs:
    def cat(name: str) -> Any:
        return torch.cat([getattr(part, name) for part in parts])

    first = parts[0]
    names = ("features", "embeddings", "hidden", "tokens", "positions")
    return DraftInputs(
        *[cat(name) for name in names],
        [n for part in parts for n in part.lengths],
        cat("sampled"),
        cat("stop"),
        first.policy_head,
        first.policy_embedding,
    )


def test_a1_the_last_row_of_a_document_gets_no_gradient_and_gives_none(make_shape: Shapes, make_inputs: Inputs) -> None:
    draft = built(make_shape(), num_layers=2)
    x = make_inputs([6, 4])
    before = run(draft, x)
    x.features[[5, 9]] += 100.0
    assert same(before, run(draft, x), 0.0)


def test_a1_row_t_reads_the_next_token_and_is_taught_one_row_further(make_shape: Shapes, make_inputs: Inputs) -> None:
    draft = built(make_shape(), num_passes=1)
    x = make_inputs([6], sampled=[0, 0, 0, 0, 1, 0])  # only row 3 is scored: it reads x_4, and p_4 teaches it
    base = run(draft, x)
    changed = {"hidden": [], "embeddings": [], "features": []}  # type: dict[str, list[int]]
    for name, rows in changed.items():
        for row in range(6):
            y = copy.deepcopy(x)
            getattr(y, name)[row] += 1.0
            if not same(base, run(draft, y), 0.0):
                rows.append(row)
    assert changed == {"hidden": [4], "embeddings": [1, 2, 3, 4], "features": [0, 1, 2, 3]}


def test_a2_documents_without_supervision_change_nothing(make_shape: Shapes, make_inputs: Inputs) -> None:
    draft = built(make_shape())
    x, masked = make_inputs([7, 5]), make_inputs([8, 4], seed=1)
    masked.sampled[:] = False
    both = join(x, masked)
    assert same(run(draft, x), run(draft, both))
    assert all(int(draft.counts(both)[k]) == int(draft.counts(x)[k]) for k in draft.counts(x))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "sampled"),
    [([], None), ([1], None), ([6, 3], [0] * 9), ([1, 1, 1], [1, 1, 1]), ([2], [1, 0])],
    ids=["no_rows", "one_row", "empty_mask", "rows_without_next", "no_valid_anchor"],
)
@pytest.mark.parametrize("owned", [False, True])
def test_a3_nothing_to_learn_is_a_zero_loss_with_zero_gradients_on_every_parameter(
    lengths: list[int], sampled: list[bool] | None, owned: bool, make_shape: Shapes, make_inputs: Inputs
) -> None:
    draft = built(make_shape(), num_layers=2, own_head=owned, own_embedding=owned)
    with torch.no_grad():
        next(draft.parameters())[0, 0] = float("inf")  # a zero made by multiplication would turn into NaN
    x = make_inputs(lengths, sampled=sampled)
    loss, grads = run(draft, x)
    assert loss == 0.0
    assert set(grads) == {name for name, _ in draft.named_parameters()}
    assert all(bool((g == 0).all()) for g in grads.values())
    out = draft(x, LOSS, draft.counts(x))  # type: ignore[arg-type]
    assert len(out.metrics) == 4 * 3
    assert all(float(num) == float(den) == 0 for num, den, _ in out.metrics.values())


def test_a3_more_passes_than_tokens(make_shape: Shapes, make_inputs: Inputs) -> None:
    deep, shallow = built(make_shape(), num_passes=9), built(make_shape(), num_passes=2)
    x = make_inputs([3])
    assert same(run(deep, x), run(shallow, x))
    assert [int(n) for n in deep.counts(x).values()] == [2, 1, 0, 0, 0, 0, 0, 0, 0]  # type: ignore[arg-type]


def test_a3_a_rank_without_valid_rows_contributes_nothing_to_the_others(
    make_shape: Shapes, make_inputs: Inputs
) -> None:
    draft = built(make_shape())
    x, empty = make_inputs([7]), make_inputs([4], sampled=[0, 0, 0, 0])
    totals = draft.counts(x)  # type: ignore[arg-type]
    loss, grads = run(draft, empty, totals)
    assert loss == 0.0
    assert all(bool((g == 0).all()) for g in grads.values())


def test_a8_nothing_of_the_policy_gets_a_gradient_or_is_written(make_shape: Shapes, make_inputs: Inputs) -> None:
    draft = built(make_shape())
    x = make_inputs([9])
    names = ("features", "embeddings", "hidden", "policy_head", "policy_embedding")
    before = {name: getattr(x, name).clone() for name in names}
    for name in names:
        getattr(x, name).requires_grad_(True)
    for loss in (SoftCrossEntropy(), LK()):
        draft(x, loss, draft.counts(x)).loss.backward()  # type: ignore[arg-type]
    assert all(getattr(x, name).grad is None for name in names)
    assert all(torch.equal(getattr(x, name), before[name]) for name in names)
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in draft.parameters())


@pytest.mark.parametrize("layers", [1, 2, 4, 5, 6])
def test_a9_colliding_default_taps_of_a_shallow_policy_are_refused(layers: int, make_shape: Shapes) -> None:
    with pytest.raises(ConfigError, match=r"too shallow .*aux_layer_ids"):
        Eagle3().build(make_shape(num_hidden_layers=layers))
    draft = Eagle3(aux_layer_ids=[0])
    draft.build(make_shape(num_hidden_layers=layers))
    assert draft.aux_layer_ids == (0,)
    assert draft.fc.weight.shape == (16, 16)


def test_a9_default_taps_are_the_engines_and_explicit_ones_are_sorted_and_checked(make_shape: Shapes) -> None:
    for layers in (7, 8, 32):
        draft = Eagle3()
        draft.build(make_shape(num_hidden_layers=layers))
        assert draft.aux_layer_ids == (2, layers // 2, layers - 3)
    draft = Eagle3(aux_layer_ids=[6, 1])
    draft.build(make_shape())
    assert draft.aux_layer_ids == (1, 6)
    for bad in ([1, 1, 2], [8], [-1, 2], []):
        with pytest.raises(ConfigError, match="aux layers"):
            Eagle3(aux_layer_ids=bad).build(make_shape())


def test_a13_completions_of_every_kind_in_one_batch(make_shape: Shapes, make_inputs: Inputs) -> None:
    def rollout(prompt: int, completion: int, finish: Any = "length") -> Rollout:
        tokens = tuple(i % 23 for i in range(completion))
        return Rollout(Prompt("u", (3,) * prompt, ""), Completion(tokens, (0.0,) * completion, finish), "u")

    kinds = [rollout(4, 0), rollout(4, 1), rollout(4, 1, "stop"), rollout(3, 8, "stop"), rollout(70, 3)]
    batch = pack_documents(kinds, range(5))
    draft = built(make_shape())  # 64 positions: the long prompt's rows are excluded
    x = make_inputs(batch.lengths, sampled=batch.sampled.tolist(), stop=batch.stop.tolist())
    assert [int(n) for n in draft.counts(batch).values()] == [1 + 7, 6, 5]
    loss, grads = run(draft, x)
    assert loss > 0
    assert all(bool(g.isfinite().all()) for g in grads.values())


@pytest.mark.parametrize("layers", [1, 2])
def test_b4_packed_equals_unpacked(layers: int, make_shape: Shapes, make_inputs: Inputs) -> None:
    draft = built(make_shape(), num_passes=4, num_layers=layers)
    parts = [make_inputs([n], seed=n) for n in (7, 1, 4, 9)]
    for part in parts:
        part.policy_head = parts[0].policy_head
    packed = join(*parts)
    totals = draft.counts(packed)  # type: ignore[arg-type]
    alone = [run(draft, part, totals) for part in parts]
    summed = sum(loss for loss, _ in alone), {n: sum(g[n] for _, g in alone) for n in alone[0][1]}
    assert same(run(draft, packed), summed)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [1, 2])
def test_b4_perturbing_one_document_changes_nothing_in_another(
    layers: int, make_shape: Shapes, make_inputs: Inputs
) -> None:
    draft = built(make_shape(), num_passes=4, num_layers=layers)
    x = make_inputs([6, 7, 5])
    x.sampled[:6] = False  # only documents 1 and 2 are scored
    base = run(draft, x)
    y = copy.deepcopy(x)
    for name in ("features", "embeddings", "hidden"):
        getattr(y, name)[:6] += 3.0
    assert same(base, run(draft, y), 1e-14)
    x.sampled[13:] = False  # now only the middle one
    base = run(draft, x)
    for name in ("features", "embeddings", "hidden"):
        getattr(y, name)[13:] -= 2.0
    y.sampled[13:] = False
    assert same(base, run(draft, y), 1e-14)


@pytest.mark.parametrize("mode", ["stream", "ring"])
def test_b1_pass_i_of_row_t_stands_at_position_t_plus_i(mode: Any, make_shape: Shapes, make_inputs: Inputs) -> None:
    draft = built(make_shape(), num_passes=4)
    draft.set_attention(mode)
    x = make_inputs([5, 6])
    asked: list[list[int]] = []
    original = draft.rope.cos_sin
    draft.rope.cos_sin = lambda positions, dtype: (  # type: ignore[method-assign]
        asked.append(positions.tolist()) or original(positions, dtype)  # type: ignore[func-returns-value]
    )
    run(draft, x)
    valid = [0, 1, 2, 3, 0, 1, 2, 3, 4]  # rows with a valid pass
    assert asked[0] == x.positions.tolist()  # the trunk
    for i in (0, 1):
        assert asked[1 + i] == [t + i for t in valid]  # later ones are compacted, dense tests hold them to the formulas


@pytest.mark.parametrize("recycle", ["full", "detach"])
def test_recycling_links_or_cuts_the_passes(recycle: Any, make_shape: Shapes, make_inputs: Inputs) -> None:
    draft = built(make_shape(), num_passes=2, recycle=recycle, pass_weights=[0.0, 1.0], num_layers=1)
    grads = run(draft, make_inputs([8]))[1]
    # Only pass 1 is scored. fc still acts through the trunk's keys; pass 0's MLP acts through the recycled state alone,
    # but it is the same module as pass 1's: compare with the other setting.
    other = built(
        make_shape(), num_passes=2, recycle="detach" if recycle == "full" else "full", pass_weights=[0.0, 1.0]
    )
    assert not torch.allclose(grads["fc.weight"], run(other, make_inputs([8]))[1]["fc.weight"])


def test_micro_batches_add_up_to_the_step(make_shape: Shapes, make_inputs: Inputs) -> None:
    draft = built(make_shape(), draft_vocab_size=None)
    a, b = make_inputs([7, 3], seed=1), make_inputs([9], seed=2)
    b.policy_head = a.policy_head
    whole = join(a, b)
    totals = draft.counts(whole)  # type: ignore[arg-type]
    (la, ga), (lb, gb) = run(draft, a, totals), run(draft, b, totals)
    assert same(run(draft, whole), (la + lb, {n: ga[n] + gb[n] for n in ga}))
    parts = [draft(x, LOSS, totals).metrics for x in (a, b)]
    for name, (num, den, _) in draft(whole, LOSS, totals).metrics.items():
        assert sum(float(part[name][0]) for part in parts) == pytest.approx(float(num), abs=1e-12)
        assert sum(float(part[name][1]) for part in parts) == float(den)


def test_the_global_random_state_is_never_touched(make_shape: Shapes, make_inputs: Inputs) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    draft = built(make_shape(), own_head=True, own_embedding=True)
    x = make_inputs([6])
    draft.init_from_policy(x.policy_head, x.policy_embedding)
    run(draft, x)
    g = torch.Generator().manual_seed(2)
    draft.propose(
        x.features, x.tokens, [6], x.tokens[:1], 3, policy_head=x.policy_head, policy_embedding=x.policy_embedding,
        temperature=1.0, generator=g,
    )  # fmt: skip
    assert torch.equal(before, torch.get_rng_state())


def test_initial_weights_follow_the_seed_alone(make_shape: Shapes) -> None:
    torch.manual_seed(0)
    a = built(make_shape(), seed=4)
    torch.manual_seed(9)
    b, c = built(make_shape(), seed=4), built(make_shape(), seed=5)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.fc.weight, c.fc.weight)


def test_pass_weights_are_one_or_decay_by_four_fifths_or_as_given() -> None:
    assert Eagle3(num_passes=3).pass_weights == (1.0, 1.0, 1.0)
    assert Eagle3(num_passes=3, pass_weights="decay").pass_weights == pytest.approx((1.0, 0.8, 0.64))
    assert Eagle3(num_passes=2, pass_weights=[0.5, 0]).pass_weights == (0.5, 0.0)


def test_acceptance_weights_follow_the_measured_running_product(make_shape: Shapes) -> None:
    draft = built(make_shape(), num_passes=4, pass_weights="acceptance")
    assert draft.pass_weights == (1.0, 1.0, 1.0, 1.0)
    draft.set_acceptance((0.8, 0.4))
    assert draft.pass_weights == pytest.approx((1.0, 0.8, 0.4, 0.2))
    fixed = built(make_shape(), num_passes=2)
    fixed.set_acceptance((0.1,))
    assert fixed.pass_weights == (1.0, 1.0)


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"num_passes": 0}, "num_passes"),
        ({"pass_weights": [1.0]}, "pass_weights"),
        ({"pass_weights": [1.0, -1.0, 1.0]}, "pass_weights"),
        ({"num_layers": 5}, "num_layers"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"hidden_size": 8}, "hidden_size"),
        ({"hidden_size": 8, "own_head": True}, "hidden_size"),
        ({"draft_vocab_size": 5}, "vocab_map"),
        ({"draft_vocab_size": 24}, "draft_vocab_size"),
        ({"max_positions": 0}, "max_positions"),
        ({"head_dim": 5}, "partial_rotary_factor"),
    ],
)
def test_bad_settings_are_refused_with_their_key(args: dict[str, Any], key: str, make_shape: Shapes) -> None:
    with pytest.raises(ConfigError) as error:
        built(make_shape(), **args)
    assert key in str(error.value.key)


def test_b3_fewer_positions_than_a_rollout_is_long_are_refused(make_shape: Shapes) -> None:
    draft = built(make_shape(), max_positions=20)
    draft.check_length(20)
    with pytest.raises(ConfigError, match=r"found 'max_position_embeddings 20', needed at least 21"):
        draft.check_length(21)


def test_yaml_arguments_parse_and_wrong_ones_are_refused() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Draft, "draft")
    config = {
        "class_path": "lightning_spec.draft.Eagle3",
        "init_args": {"num_passes": 4, "pass_weights": [1, 1, 0.5, 0]},
    }
    parsed = parser.parse_object({"draft": config})
    draft = parser.instantiate_classes(parsed).draft
    assert isinstance(draft, Eagle3)
    assert draft.pass_weights == (1.0, 1.0, 0.5, 0.0)
    assert not list(draft.parameters())  # cheap until built
    with pytest.raises(Exception, match="recyle"):
        parser.parse_object({"draft": {"class_path": "lightning_spec.draft.Eagle3", "init_args": {"recyle": "full"}}})


@pytest.mark.slow
def test_a_trained_draft_proposes_what_the_policy_would_say(make_shape: Shapes, make_inputs: Inputs) -> None:
    draft, x = built(make_shape()), make_inputs([12, 9])
    x.hidden *= 3.0  # a peaked teacher
    totals = draft.counts(x)  # type: ignore[arg-type]
    optimiser = torch.optim.Adam(draft.parameters(), lr=2e-2)
    first = last = draft(x, LOSS, totals)
    for _ in range(250):
        optimiser.zero_grad()
        last = draft(x, LOSS, totals)
        last.loss.backward()
        optimiser.step()
    accept = [float(out.metrics["draft/accept_2"][0] / out.metrics["draft/accept_2"][1]) for out in (first, last)]
    assert accept[0] < 0.2
    assert accept[1] > 0.9
    # Serving finds the same: the first proposal after bonus token x_4 is the policy's most likely one after it.
    teacher = (x.hidden @ x.policy_head.T).argmax(-1)
    proposal = draft.propose(
        x.features[:4], x.tokens[:4], [4], x.tokens[4:5], 1, policy_head=x.policy_head,
        policy_embedding=x.policy_embedding,
    )  # fmt: skip
    assert int(proposal.tokens[0, 0]) == int(teacher[4])
