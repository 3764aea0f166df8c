"""Block drafters' loss, metrics and every gradient against the formulas of SEMANTICS.md 2, written out in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_spec.draft import DFlash, DraftInputs, DSpark
from lightning_spec.draft.block import BlockDraft
from lightning_spec.loss.draft import DraftLoss, HardCrossEntropy, SoftCrossEntropy, TotalVariation, Weighted
from lightning_spec.loss.position import DPACE, ExponentialPositions
from tests.draft.block_reference import Objective, dense, grads, worst

# Documents: prompt of two rows, a second turn with tool tokens in between, a stop in the middle and at an end, and
# documents too short for any or for all slots.
LENGTHS = [10, 1, 7, 2, 5]
SAMPLED = [0, 0, 1, 1, 1, 0, 1, 1, 1, 1] + [1] + [0, 1, 1, 1, 1, 1, 1] + [0, 1] + [0, 0, 1, 1, 1]
STOP = [0, 0, 0, 0, 1, 0, 0, 0, 0, 1] + [0] + [0] * 7 + [0, 1] + [0, 0, 0, 1, 0]

KIND: dict[str, Any] = {"dflash": DFlash, "dspark": DSpark}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one layer": ("dflash", {"num_layers": 1}),
    "three layers": ("dflash", {"num_layers": 3, "num_kv_heads": 1, "head_dim": 6}),
    "two slots": ("dflash", {"block_size": 2}),
    "causal": ("dflash", {"causal": True}),
    "window": ("dflash", {"sliding_window": 5}),
    "window shorter than a block": ("dflash", {"sliding_window": 2}),
    "causal window": ("dflash", {"sliding_window": 3, "causal": True}),
    "dspark": ("dspark", {"num_layers": 2}),
    "dspark of one slot": ("dspark", {"block_size": 1}),
    "dspark without confidence": ("dspark", {"confidence": False, "confidence_with_markov": False}),
    "dspark, confidence of states alone": ("dspark", {"confidence_with_markov": False}),
    "dspark, causal window": ("dspark", {"causal": True, "sliding_window": 3}),
}
SMALL = {"block_size": 4, "num_layers": 1, "mask_token_id": 20, "aux_layer_ids": [2, 4, 6]}
SPARK = {"markov_rank": 3, "confidence": True, "confidence_with_markov": True, "confidence_weight": 0.7}


def build(kind: str, options: dict[str, Any], shape: Any, dtype: torch.dtype = torch.float64) -> BlockDraft:
    draft: BlockDraft = KIND[kind](**(SMALL | (SPARK if kind == "dspark" else {}) | options))
    draft.build(shape, dtype=dtype, seed=3)
    with torch.no_grad():
        # Norm weights of 1 would hide a norm that is applied twice or not at all, a bias of 0 that it is not.
        g = torch.Generator().manual_seed(5)
        for name, p in draft.named_parameters():
            noise = torch.randn(p.shape, generator=g).to(p.dtype)
            if "norm" in name:
                p.mul_(1 + 0.3 * noise)
            elif "markov" in name or "confidence" in name:
                p.add_(0.5 * noise)
    return draft


def means(metrics: Any) -> dict[str, float]:
    return {name: float(num) / float(den) if float(den) else 0.0 for name, (num, den, _) in metrics.items()}


def check(draft: BlockDraft, x: DraftInputs, loss: DraftLoss, **reference: Any) -> None:
    out = draft(x, loss, draft.counts(x))  # type: ignore[arg-type]
    if isinstance(draft, DSpark):
        reference["confidence_weight"] = draft.confidence_weight
    want, wanted = dense(draft, x, **reference)
    assert abs(float(out.loss) - float(want)) < 1e-10
    assert worst(grads(out.loss, draft), grads(want, draft)) < 1e-10
    assert means(out.metrics) == pytest.approx(wanted, abs=1e-10)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("masked", [False, True], ids=["all_sampled", "turns_and_stops"])
def test_loss_gradients_and_metrics_equal_the_formulas(
    name: str, masked: bool, make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    kind, options = VARIANTS[name]
    draft = build(kind, options, make_shape())
    x = make_inputs(LENGTHS, sampled=SAMPLED if masked else None, stop=STOP if masked else None)
    check(draft, x, SoftCrossEntropy())


def decayed(alpha: Sequence[float], label: Sequence[float]) -> list[float]:
    return [2.718281828459045 ** (-s / 2.0) for s in range(len(alpha))]


def dpace(q: Sequence[float]) -> list[float]:
    """weight_k = sum over m >= k of the product of q_0 .. q_m."""
    reach, product = [], 1.0
    for one in q:
        product *= one
        reach.append(product)
    return [sum(reach[k:]) for k in range(len(q))]


@pytest.mark.parametrize("kind", KIND)
@pytest.mark.parametrize("how", ["exponential", "dpace on labels", "dpace on overlap"])
def test_slot_weights_multiply_each_slots_share(
    kind: str, how: str, make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    weights, weigh = {
        "exponential": (ExponentialPositions(2.0), decayed),
        "dpace on labels": (DPACE("label"), lambda alpha, label: dpace(label)),
        "dpace on overlap": (DPACE("accept"), lambda alpha, label: dpace(alpha)),
    }[how]
    draft = build(kind, {"slot_weights": weights, "block_size": 5}, make_shape())
    check(draft, make_inputs(LENGTHS, sampled=SAMPLED, stop=STOP), SoftCrossEntropy(), weigh=weigh)


@pytest.mark.parametrize("kind", KIND)
def test_the_published_objective_of_hard_labels_and_total_variation(
    kind: str, make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    loss = Weighted([HardCrossEntropy(), TotalVariation()], [0.1, 0.9])
    draft = build(kind, {"num_layers": 2}, make_shape())
    x = make_inputs(LENGTHS, sampled=SAMPLED, stop=STOP)
    check(draft, x, loss, objective=Objective(soft=0.0, hard=0.1, variation=0.9))


@pytest.mark.parametrize("kind", KIND)
def test_drawn_anchors_count_and_carry_the_loss_alone(
    kind: str, make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    draft = build(kind, {"anchors_per_sequence": 2}, make_shape())
    x = replace(make_inputs(LENGTHS), document_seeds=[5, 6, 7, 8, 9])
    chosen = draft._anchors(x).rows.tolist()
    assert len(chosen) == 6
    check(draft, x, SoftCrossEntropy(), anchors=chosen)


@pytest.mark.parametrize("kind", KIND)
@pytest.mark.parametrize("budget", [1, 9, 13])
def test_chunks_of_a_token_budget_change_rounding_alone(
    kind: str, budget: int, make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    x = make_inputs(LENGTHS, sampled=SAMPLED, stop=STOP)
    whole, cut = (
        build(kind, {"num_layers": 2, "slot_weights": DPACE(), "token_budget": n}, make_shape()) for n in (None, budget)
    )
    a, b = (draft(x, SoftCrossEntropy(), draft.counts(x)) for draft in (whole, cut))  # type: ignore[arg-type]
    assert float(a.loss) == pytest.approx(float(b.loss), abs=1e-13)
    assert worst(grads(a.loss, whole), grads(b.loss, cut)) < 1e-12
    assert means(a.metrics) == pytest.approx(means(b.metrics), abs=1e-13)


def test_totals_of_a_whole_step_divide_a_micro_batch(
    make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    draft, x = build("dspark", {}, make_shape()), make_inputs([9, 4])
    totals = {name: count + 10.0 for name, count in draft.counts(x).items()}  # type: ignore[arg-type]
    out = draft(x, SoftCrossEntropy(), totals)
    want, _ = dense(draft, x, [float(n) for n in totals.values()], confidence_weight=0.7)
    assert abs(float(out.loss) - float(want)) < 1e-10


def test_the_upstream_gradient_scales_every_gradient(
    make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    draft, x = build("dspark", {}, make_shape()), make_inputs([9])
    one, three = (grads(f * draft(x, SoftCrossEntropy(), draft.counts(x)).loss, draft) for f in (1.0, 3.0))  # type: ignore[arg-type]
    assert worst({name: 3.0 * g for name, g in one.items()}, three) < 1e-12


@pytest.mark.parametrize("kind", KIND)
def test_float32_is_within_1e_4_of_the_formulas(
    kind: str, make_shape: Callable[..., Any], make_inputs: Callable[..., DraftInputs]
) -> None:
    wide, narrow = (build(kind, {"num_layers": 2}, make_shape(), dtype) for dtype in (torch.float64, torch.float32))
    with torch.no_grad():
        for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
            a.copy_(b)
    x64, x32 = (make_inputs(LENGTHS, sampled=SAMPLED, stop=STOP, dtype=d) for d in (torch.float64, torch.float32))
    out = narrow(x32, SoftCrossEntropy(), narrow.counts(x32))  # type: ignore[arg-type]
    want, _ = dense(wide, x64, confidence_weight=0.7 if kind == "dspark" else 0.0)
    assert abs(float(out.loss) - float(want)) < 1e-4 * float(want)
    assert worst(grads(out.loss, narrow), grads(want, wide)) < 1e-4
