"""linear_logprobs against plain autograd on full logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_spec.errors import ConfigError
from lightning_spec.loss import linear_logprobs


def dense(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(hidden @ weight.T / temperature, -1)
    keep = labels >= 0
    picked = logp.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(keep, picked, 0.0), torch.where(keep, -(logp.exp() * logp).sum(1), 0.0)


def example(T: int = 13, C: int = 5, V: int = 11, seed: int = 0, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, C, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, C, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(-1, V, (T,), generator=g)
    return hidden, weight, labels, torch.randn(2, T, generator=g, dtype=torch.float64).to(dtype)


def compare(hidden, weight, labels, upstream, temperature, chunk, tol) -> None:
    lp, ent = linear_logprobs(hidden, weight, labels, temperature=temperature, chunk=chunk, entropy=True)
    got = torch.autograd.grad((lp * upstream[0] + ent * upstream[1]).sum(), (hidden, weight))
    ref_lp, ref_ent = dense(hidden, weight, labels, temperature)
    want = torch.autograd.grad((ref_lp * upstream[0] + ref_ent * upstream[1]).sum(), (hidden, weight))
    for a, b in zip((lp, ent, *got), (ref_lp, ref_ent, *want), strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@settings(max_examples=60, deadline=None)
@given(
    T=st.integers(0, 17),
    V=st.integers(1, 9),
    chunk=st.integers(1, 20),
    seed=st.integers(0, 1 << 16),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
)
def test_values_and_both_gradients_equal_full_logits_for_any_mask_and_chunk(T, V, chunk, seed, temperature) -> None:
    hidden, weight, labels, upstream = example(T, 3, V, seed)
    compare(hidden, weight, labels, upstream, temperature, chunk, 1e-10)


def test_float32_agrees_to_1e5_and_default_chunk_works() -> None:
    compare(*example(300, 16, 50, 1, torch.float32), temperature=0.7, chunk=None, tol=1e-5)


def test_gradcheck_of_both_outputs() -> None:
    hidden, weight, labels, _ = example(6, 3, 5)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprobs(h, w, labels, temperature=0.7, chunk=4, entropy=True), (hidden, weight)
    )


@pytest.mark.parametrize("output", [0, 1])
def test_gradient_is_right_when_only_one_output_is_used(output: int) -> None:
    hidden, weight, labels, upstream = example()
    got = torch.autograd.grad(
        (linear_logprobs(hidden, weight, labels, chunk=4, entropy=True)[output] * upstream[0]).sum(), (hidden, weight)
    )
    want = torch.autograd.grad((dense(hidden, weight, labels, 1.0)[output] * upstream[0]).sum(), (hidden, weight))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_rows_that_get_gradient_from_one_output_only_are_not_skipped() -> None:
    hidden, weight, labels, upstream = example()
    upstream[0, ::2] = 0.0
    upstream[1, 1::2] = 0.0
    compare(hidden, weight, labels, upstream, 1.0, 4, 1e-10)


def test_without_entropy_the_second_output_is_none_and_gradients_hold() -> None:
    hidden, weight, labels, upstream = example()
    lp, ent = linear_logprobs(hidden, weight, labels, temperature=0.5, chunk=3)
    assert ent is None
    got = torch.autograd.grad((lp * upstream[0]).sum(), (hidden, weight))
    want = torch.autograd.grad((dense(hidden, weight, labels, 0.5)[0] * upstream[0]).sum(), (hidden, weight))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_rows_without_label_are_never_read_so_nan_there_cannot_leak() -> None:
    hidden, weight, labels, _ = example()
    labels[::3] = -1
    poisoned = hidden.detach().clone()
    poisoned[::3] = torch.nan
    poisoned.requires_grad_()
    lp, ent = linear_logprobs(poisoned, weight, labels, chunk=4, entropy=True)
    assert (lp[::3] == 0).all()
    assert (ent[::3] == 0).all()
    (lp.sum() + ent.sum()).backward()
    assert (poisoned.grad[::3] == 0).all()
    assert torch.isfinite(poisoned.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_extreme_logits_stay_finite_and_exact() -> None:
    hidden = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.tensor([[3.0], [-3.0]], requires_grad=True)
    lp, ent = linear_logprobs(hidden, weight, torch.tensor([0, 0]), entropy=True)
    assert lp.tolist() == [0.0, -6000.0]
    assert ent.tolist() == [0.0, 0.0]
    (lp.sum() + ent.sum()).backward()
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_bfloat16_input_is_computed_in_float32_even_under_autocast() -> None:
    hidden, weight, labels, _ = example(40, 16, 30, 2, torch.bfloat16)
    want = dense(hidden.float(), weight.float(), labels, 1.0)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lp = linear_logprobs(hidden, weight, labels)[0]
        torch.testing.assert_close(lp, want, rtol=1e-5, atol=1e-5)
        lp.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_inputs_are_not_altered() -> None:
    hidden, weight, labels, _ = example()
    before = [t.detach().clone() for t in (hidden, weight, labels)]
    sum(o.sum() for o in linear_logprobs(hidden, weight, labels, temperature=0.7, entropy=True)).backward()
    for a, b in zip((hidden, weight, labels), before, strict=True):
        assert torch.equal(a.detach(), b)


def test_frozen_head_or_frozen_hidden_gets_no_gradient_and_costs_no_error() -> None:
    hidden, weight, labels, _ = example()
    linear_logprobs(hidden, weight.detach(), labels)[0].sum().backward()
    want = torch.autograd.grad(dense(hidden, weight, labels, 1.0)[0].sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, want)
    linear_logprobs(hidden.detach(), weight, labels)[0].sum().backward()
    assert weight.grad is not None


class LargestTensor(TorchDispatchMode):
    """The most elements any operation gave out (views of larger storage count as what they show)."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_no_tensor_of_t_times_v_elements_is_ever_made() -> None:
    T, C, V = 600, 8, 500
    hidden, weight, labels, _ = example(T, C, V, 3, torch.float32)
    with LargestTensor() as seen:
        lp, ent = linear_logprobs(hidden, weight, labels, chunk=32, entropy=True)
        (lp.sum() + ent.sum()).backward()
    assert 32 * V <= seen.largest < T * V // 10  # the lower bound shows that the probe sees inside


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_temperature_is_refused(temperature: float) -> None:
    hidden, weight, labels, _ = example()
    with pytest.raises(ConfigError, match="temperature"):
        linear_logprobs(hidden, weight, labels, temperature=temperature)


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight, labels, _ = example()
    with pytest.raises(ValueError, match="hidden"):
        linear_logprobs(hidden, weight[:, :-1], labels)
