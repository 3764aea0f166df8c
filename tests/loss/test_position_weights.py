"""Weights of a block's slots: fixed ones, and those that are the gradient of the expected accepted length."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_spec.errors import ConfigError
from lightning_spec.loss import DPACE, ExponentialPositions, PositionWeights, UniformPositions


def slots(anchors: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """alpha, label_prob, valid: [A, S]; validity is a prefix of every length there is."""
    g = torch.Generator().manual_seed(seed)
    alpha, label = torch.rand(2, anchors, width, generator=g, dtype=torch.float64)
    depth = torch.randint(width + 1, (anchors, 1), generator=g)
    return alpha, label, torch.arange(width) < depth


def test_fixed_weights_are_their_formulas_on_valid_slots() -> None:
    alpha, label, valid = slots(5, 4)
    for weights, formula in (
        (UniformPositions(), [1.0, 1.0, 1.0, 1.0]),
        (ExponentialPositions(4.0), [math.exp(-s / 4) for s in range(4)]),
    ):
        assert not weights.dynamic
        assert weights.static(4) == formula
        want = torch.tensor(formula, dtype=torch.float64).expand(5, 4).clone()
        want[~valid] = 0.0
        assert torch.equal(weights(alpha, label, valid), want)


@pytest.mark.parametrize("probability", ["label", "accept"])
@settings(max_examples=20, deadline=None)
@given(anchors=st.integers(0, 5), width=st.integers(1, 6), seed=st.integers(0, 1 << 16))
def test_dynamic_weights_are_the_gradient_of_the_expected_accepted_length_to_each_log_probability(
    probability: str, anchors: int, width: int, seed: int
) -> None:
    alpha, label, valid = slots(anchors, width, seed)
    logs = (label if probability == "label" else alpha).log().requires_grad_()
    length = torch.zeros((), dtype=torch.float64)
    for a in range(anchors):
        product = torch.ones((), dtype=torch.float64)
        for s in range(int(valid[a].sum())):
            product = product * logs[a, s].exp()
            length = length + product
    (want,) = torch.autograd.grad(length + 0 * logs.sum(), logs)
    weights = DPACE(probability)  # type: ignore[arg-type]
    assert weights.dynamic
    assert weights.static(width) is None
    torch.testing.assert_close(weights(alpha, label, valid), want, rtol=1e-12, atol=1e-12)


def test_dynamic_weights_of_certain_slots_are_the_slots_left_and_end_at_an_impossible_one() -> None:
    chance = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    found = DPACE()(torch.zeros_like(chance), chance, torch.ones(3, 3, dtype=torch.bool))
    assert found.tolist() == [[3.0, 2.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("weights", [UniformPositions(), ExponentialPositions(2.0), DPACE("label"), DPACE("accept")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_have_no_graph_keep_the_dtype_and_read_no_slot_that_is_not_valid(
    weights: PositionWeights, dtype: torch.dtype
) -> None:
    alpha, label, valid = slots(6, 5)
    want = weights(alpha.to(dtype), label.to(dtype), valid)
    poisoned = [t.to(dtype).masked_fill(~valid, torch.nan).requires_grad_() for t in (alpha, label)]
    found = weights(poisoned[0], poisoned[1], valid)
    assert not found.requires_grad
    assert found.dtype == dtype
    assert torch.equal(found, want)
    assert (found[~valid] == 0).all()


def test_rounding_outside_of_0_and_1_does_not_grow_weights() -> None:
    over = torch.tensor([[1.0 + 1e-6, -1e-9, 1.0]])
    assert DPACE("accept")(over, over, torch.ones(1, 3, dtype=torch.bool)).tolist() == [[1.0, 0.0, 0.0]]


def test_options_out_of_range_are_refused() -> None:
    for gamma in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="gamma"):
            ExponentialPositions(gamma)
    with pytest.raises(ConfigError, match="probability"):
        DPACE("teacher")  # type: ignore[arg-type]
