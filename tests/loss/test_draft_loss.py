"""Draft losses against plain autograd on full distributions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_spec.errors import ConfigError
from lightning_spec.loss import LK, DraftLoss, SoftCrossEntropy, TotalVariation, Weighted

LOSSES = {
    "ce": SoftCrossEntropy,
    "tv": TotalVariation,
    "lk": LK,
    "mix": lambda **kw: Weighted([SoftCrossEntropy(), TotalVariation(), LK()], [0.5, 0.3, 2.0], **kw),
}


def dense(name, hidden, head, t_hidden, t_head, weight, ids=None, temperature=1.0, drop=False):
    """Everything spelled out: (loss, agree, alpha, valid)."""
    full = torch.softmax(t_hidden.detach() @ t_head.detach().T / temperature, -1)
    z = hidden @ head.T
    q = torch.softmax(z, -1)
    ids = torch.arange(head.shape[0]) if ids is None else ids
    p_true = full[:, ids]
    p = p_true / p_true.sum(1, keepdim=True)
    valid = weight != 0
    if drop:
        valid &= torch.isin(full.argmax(1), ids)
    overlap = torch.minimum(p, q).sum(1)
    each = {"ce": -(p * torch.log_softmax(z, -1)).sum(1), "tv": 1 - overlap, "lk": -overlap.log()}
    each["mix"] = 0.5 * each["ce"] + 0.3 * each["tv"] + 2.0 * each["lk"]
    loss = (each[name] * weight * valid).sum()
    scored = weight != 0
    return loss, (ids[q.argmax(1)] == full.argmax(1)) & scored, torch.minimum(p_true, q).sum(1) * scored, valid


def example(R=9, C=4, Ct=6, Vd=7, V=7, seed=0, dtype=torch.float64, holes=True, reduced=False):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    hidden, head, t_hidden, t_head = randn(R, C), randn(Vd, C), randn(R, Ct), randn(V, Ct)
    weight = torch.rand(R, generator=g).to(dtype)
    if holes:
        weight = weight * (torch.rand(R, generator=g) < 0.7)
    ids = torch.randperm(V, generator=g)[:Vd].sort()[0] if reduced else None
    return hidden.requires_grad_(), head.requires_grad_(), t_hidden, t_head, weight, ids


def check(name, args, ids, loss: DraftLoss, tol=1e-10, **kw) -> None:
    hidden, head = args[:2]
    out = loss(*args, ids)
    got = torch.autograd.grad(out.loss, (hidden, head))
    want_loss, agree, alpha, valid = dense(name, *args, ids, **kw)
    want = torch.autograd.grad(want_loss, (hidden, head))
    torch.testing.assert_close(out.loss, want_loss, rtol=tol, atol=tol)
    torch.testing.assert_close(out.alpha, alpha, rtol=tol, atol=tol)
    assert torch.equal(out.agree, agree)
    assert torch.equal(out.valid, valid)
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=25, deadline=None)
@given(
    R=st.integers(0, 11),
    V=st.integers(2, 9),
    chunk=st.integers(1, 12),
    seed=st.integers(0, 1 << 16),
    temperature=st.sampled_from([0.6, 1.0]),
)
def test_loss_gradients_agreement_and_alpha_equal_full_distributions(name, R, V, chunk, seed, temperature) -> None:
    *args, _ = example(R=R, Vd=V, V=V, seed=seed)
    loss = LOSSES[name](chunk=chunk, teacher_temperature=temperature)
    check(name, args, None, loss, temperature=temperature)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=25, deadline=None)
@given(R=st.integers(0, 11), chunk=st.integers(1, 12), seed=st.integers(0, 1 << 16), drop=st.booleans())
def test_reduced_vocabulary_renormalises_or_drops_and_alpha_is_the_true_acceptance(name, R, chunk, seed, drop) -> None:
    *args, ids = example(R=R, Vd=4, V=9, seed=seed, reduced=True)
    loss = LOSSES[name](chunk=chunk, out_of_vocab="drop" if drop else "renormalise")
    check(name, args, ids, loss, drop=drop)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduced", [False, True])
def test_float32_agrees_with_float64_to_1e5(name, reduced) -> None:
    *args, ids = example(R=200, C=16, Ct=16, Vd=30, V=60 if reduced else 30, seed=4, reduced=reduced)
    loss = LOSSES[name]()
    want = loss(*args, ids)
    want_grads = torch.autograd.grad(want.loss, args[:2])
    low = [t.detach().float().requires_grad_(t.requires_grad) for t in args]
    got = loss(*low, ids)
    grads = torch.autograd.grad(got.loss, low[:2])
    torch.testing.assert_close(got.loss.double(), want.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.alpha.double(), want.alpha, rtol=1e-5, atol=1e-5)
    for a, b in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_upstream_scale_scales_the_gradients_and_backward_may_run_twice(name) -> None:
    *args, _ = example()
    out = LOSSES[name]()(*args).loss
    once = torch.autograd.grad(out, args[:2], retain_graph=True)
    thrice = torch.autograd.grad(out * 3, args[:2])
    for a, b in zip(once, thrice, strict=True):
        torch.testing.assert_close(a * 3, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_no_rows_or_only_zero_weights_give_zero_loss_and_zero_gradients(name) -> None:
    for R in (0, 5):
        *args, _ = example(R=R)
        args[4] = torch.zeros(R, dtype=torch.float64)
        with torch.no_grad():
            args[0].fill_(torch.nan)  # never read
        out = LOSSES[name]()(*args)
        out.loss.backward()
        assert out.loss.item() == 0.0
        assert not out.valid.any()
        assert (args[0].grad == 0).all()
        assert (args[1].grad == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_poisoned_rows_of_weight_zero_do_not_leak(name) -> None:
    *args, _ = example(holes=False)
    args[4][::2] = 0
    with torch.no_grad():
        args[0][::2] = torch.nan
        args[2][::2] = torch.inf
    out = LOSSES[name](chunk=3)(*args)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(args[0].grad).all()
    assert torch.isfinite(args[1].grad).all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_head_and_hidden_shared_with_the_teacher_get_the_draft_roles_gradient_only(name) -> None:
    hidden, head, _, _, weight, _ = example(C=5)
    shared = LOSSES[name]()(hidden, head, hidden, head, weight).loss
    apart = LOSSES[name]()(hidden, head, hidden.detach().clone(), head.detach().clone(), weight).loss
    got = torch.autograd.grad(shared, (hidden, head))
    want = torch.autograd.grad(apart, (hidden, head))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    if name == "ce":  # q = p exactly: the minimum over q, not over both
        torch.testing.assert_close(got[1], torch.zeros_like(head), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_no_gradient_reaches_the_teacher_or_the_row_weights(name) -> None:
    hidden, head, t_hidden, t_head, weight, _ = example()
    for t in (t_hidden, t_head, weight):
        t.requires_grad_()
    LOSSES[name]()(hidden, head, t_hidden, t_head, weight).loss.backward()
    assert t_hidden.grad is None
    assert t_head.grad is None
    assert weight.grad is None


def test_a_frozen_head_gets_no_gradient_and_the_hidden_still_does() -> None:
    hidden, head, *rest, _ = example()
    want = torch.autograd.grad(SoftCrossEntropy()(hidden, head, *rest).loss, hidden)[0]
    out = SoftCrossEntropy()(hidden, head.detach(), *rest)
    assert torch.equal(torch.autograd.grad(out.loss, hidden)[0], want)
    assert not SoftCrossEntropy()(hidden.detach(), head.detach(), *rest).loss.requires_grad


def test_without_grad_mode_the_values_are_the_same_and_nothing_hangs_on_a_graph() -> None:
    *args, _ = example()
    want = LK()(*args)
    with torch.no_grad():
        got = LK()(*args)
    assert not got.loss.requires_grad
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(got.alpha, want.alpha)


@pytest.mark.parametrize("name", LOSSES)
def test_disjoint_distributions_give_finite_loss_and_gradients(name) -> None:
    hidden = torch.tensor([[400.0]], requires_grad=True)
    head = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    out = LOSSES[name]()(hidden, head, torch.tensor([[400.0]]), torch.tensor([[-1.0], [1.0]]), torch.ones(1))
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(head.grad).all()
    assert out.alpha.item() == 0.0
    assert not out.agree.item()


@pytest.mark.parametrize("name", LOSSES)
def test_a_draft_vocabulary_that_holds_none_of_the_policys_mass_stays_finite(name) -> None:
    head = torch.randn(2, 1, requires_grad=True)
    hidden = torch.randn(1, 1, requires_grad=True)
    t_head = torch.tensor([[1.0], [-1.0], [-0.9]])  # ids 1 and 2 have e^-200 and less: 0 in float32
    out = LOSSES[name]()(hidden, head, torch.tensor([[100.0]]), t_head, torch.ones(1), torch.tensor([1, 2]))
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(hidden.grad).all()
    assert out.alpha.item() == 0.0


def test_bfloat16_is_computed_in_float32_even_under_autocast_and_gradients_come_back_in_bfloat16() -> None:
    *args, _ = example(R=50, C=16, Ct=16, Vd=20, V=20, dtype=torch.bfloat16)
    want = SoftCrossEntropy()(*[t.detach().float() for t in args]).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = SoftCrossEntropy()(*args).loss
        got.backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert args[0].grad.dtype == args[1].grad.dtype == torch.bfloat16


def test_inputs_are_not_altered() -> None:
    *args, ids = example(Vd=4, V=9, reduced=True)
    before = [t.detach().clone() for t in (*args, ids)]
    LOSSES["mix"](teacher_temperature=0.5, out_of_vocab="drop")(*args, ids).loss.backward()
    for a, b in zip((*args, ids), before, strict=True):
        assert torch.equal(a.detach(), b)


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduced", [False, True])
def test_no_tensor_of_rows_times_vocabulary_elements_is_ever_made(name, reduced) -> None:
    R, V, Vd = 600, 400, 300 if reduced else 400
    *args, ids = example(R=R, Vd=Vd, V=V, dtype=torch.float32, reduced=reduced)
    with LargestTensor() as seen:
        LOSSES[name](chunk=32)(*args, ids).loss.backward()
    assert 16 * V <= seen.largest < R * Vd // 10  # the lower bound shows that the probe sees inside


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=25, deadline=None)
@given(
    R=st.integers(0, 13),
    teachers=st.integers(1, 6),
    chunk=st.integers(1, 7),
    seed=st.integers(0, 1 << 16),
    reduced=st.booleans(),
    drop=st.booleans(),
)
def test_rows_that_share_a_teacher_equal_rows_with_a_copy_of_it_each(
    name, R, teachers, chunk, seed, reduced, drop
) -> None:
    hidden, head, _, t_head, weight, ids = example(R=R, Vd=4 if reduced else 7, seed=seed, reduced=reduced)
    g = torch.Generator().manual_seed(seed)
    t_hidden = torch.randn(teachers, 6, generator=g, dtype=torch.float64)
    rows = torch.randint(teachers, (R,), generator=g)
    loss = LOSSES[name](chunk=chunk, out_of_vocab="drop" if drop and reduced else "renormalise")
    want = loss(hidden, head, t_hidden[rows], t_head, weight, ids)
    got = loss(hidden, head, t_hidden, t_head, weight, ids, rows)
    for field in ("loss", "alpha", "each"):
        torch.testing.assert_close(getattr(got, field), getattr(want, field), rtol=1e-12, atol=1e-12)
    assert torch.equal(got.agree, want.agree)
    assert torch.equal(got.valid, want.valid)
    torch.testing.assert_close(torch.dot(got.each, weight), got.loss, rtol=1e-12, atol=1e-12)
    a, b = (torch.autograd.grad(out.loss, (hidden, head)) for out in (got, want))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_teacher_row_is_formed_once_for_all_passes() -> None:
    T, N, V, C = 40, 5, 30, 8
    *args, _ = example(R=T * N, Vd=V, V=V, C=C, Ct=C + 1, holes=False)
    hidden, head, t_hidden, t_head, weight = args
    rows = torch.cat([torch.arange(T) + 1 + i for i in range(N)])  # row t of pass i is taught by t + 1 + i
    made: list[int] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.out and args[0].shape[1] == C + 1:
                made.append(args[0].shape[0])
            return func(*args, **(kwargs or {}))

    with Products():
        SoftCrossEntropy(chunk=8)(hidden, head, t_hidden, t_head, weight, None, rows)
    assert sum(made) == T + N - 1
    assert max(made) <= 8


def test_scored_rows_of_weight_0_are_reported_and_give_no_gradient() -> None:
    hidden, head, t_hidden, t_head, weight, _ = example(R=6, holes=False)
    full = SoftCrossEntropy()(hidden, head, t_hidden, t_head, weight)
    weight = weight.clone()
    weight[2:4] = 0.0
    skipped = SoftCrossEntropy()(hidden, head, t_hidden, t_head, weight)
    scored = SoftCrossEntropy()(
        hidden, head, t_hidden, t_head, weight, scored=torch.tensor([True, True, True, False, True, True])
    )
    assert torch.equal(scored.loss, skipped.loss)
    assert torch.equal(scored.each[:3], full.each[:3])
    assert scored.each[3] == scored.alpha[3] == 0.0
    assert scored.valid.tolist() == [True, True, True, False, True, True]
    for a, b in zip(
        torch.autograd.grad(scored.loss, (hidden, head)), torch.autograd.grad(skipped.loss, (hidden, head)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_any_split_of_the_rows_sums_to_the_same_loss_and_gradients() -> None:
    *args, _ = example(R=12)
    hidden, head, t_hidden, t_head, weight = args
    whole = torch.autograd.grad(LK()(*args).loss, (hidden, head))
    parts = sum(
        LK()(hidden[s], head, t_hidden[s], t_head, weight[s]).loss for s in (slice(0, 1), slice(1, 1), slice(1, 12))
    )
    for a, b in zip(torch.autograd.grad(parts, (hidden, head)), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_vocabularies_and_options_that_do_not_match_are_refused() -> None:
    hidden, head, t_hidden, t_head, weight, ids = example(Vd=4, V=9, reduced=True)
    with pytest.raises(ConfigError, match="vocabulary"):
        SoftCrossEntropy()(hidden, head, t_hidden, t_head, weight)
    with pytest.raises(ConfigError, match="d2t"):
        SoftCrossEntropy()(hidden, head, t_hidden, t_head, weight, ids[:-1])
    with pytest.raises(ValueError, match="hidden"):
        SoftCrossEntropy()(hidden[1:], head, t_hidden, t_head, weight, ids)
    for bad in ({"teacher_temperature": 0.0}, {"out_of_vocab": "ignore"}, {"chunk": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            SoftCrossEntropy(**bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weights"):
        Weighted([SoftCrossEntropy()], [1.0, 2.0])
