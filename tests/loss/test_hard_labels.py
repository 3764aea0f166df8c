"""The loss on the rollout's own tokens, and a low-rank addition to the logits, against autograd on full matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_spec.errors import ConfigError
from lightning_spec.loss import LK, HardCrossEntropy, LowRank, SoftCrossEntropy, TotalVariation, Weighted
from tests.loss.test_draft_loss import LargestTensor

LOSSES: dict[str, Any] = {
    "hard": HardCrossEntropy,
    "soft": SoftCrossEntropy,
    "tv": TotalVariation,
    "dspark": lambda **kw: Weighted([HardCrossEntropy(), TotalVariation()], [0.1, 0.9], **kw),
}
OUTPUTS = ("loss", "each", "alpha", "label_prob", "agree", "valid")


def example(R: int = 9, V: int = 7, Vd: int | None = None, r: int = 2, seed: int = 0) -> dict[str, Any]:
    """All in float64; a third of the rows weighs 0, a quarter has no label. With `Vd` the vocabulary is reduced."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    labels = torch.randint(V, (R,), generator=g)
    return {
        "hidden": randn(R, 4),
        "head": randn(Vd or V, 4),
        "bias": (randn(R, r), randn(Vd or V, r)),
        "teacher_hidden": randn(R, 6),
        "teacher_head": randn(V, 6),
        "weight": torch.rand(R, generator=g, dtype=torch.float64) * (torch.rand(R, generator=g) < 0.7),
        # Not sorted: the map need not be.
        "d2t_target_ids": None if Vd is None else torch.randperm(V, generator=g)[:Vd],
        "labels": labels.masked_fill(torch.rand(R, generator=g) < 0.25, -1),
    }


def trained(x: dict[str, Any]) -> list[Tensor]:
    return [x["hidden"], x["head"], *(x["bias"] or ())]


def evaluated(loss: Any, x: dict[str, Any], **more: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """Output and gradients of everything that is trained."""
    for tensor in trained(x):
        tensor.requires_grad_()
    out = loss(**x, **more)
    return out, torch.autograd.grad(out.loss, trained(x))


def dense(name: str, x: dict[str, Any], drop: bool) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Everything spelled out, row by row."""
    for tensor in trained(x):
        tensor.requires_grad_()
    logits = x["hidden"] @ x["head"].T
    if x["bias"] is not None:
        logits = logits + x["bias"][0] @ x["bias"][1].T
    ids = torch.arange(len(x["head"])) if x["d2t_target_ids"] is None else x["d2t_target_ids"]
    found: dict[str, list[Tensor]] = {name: [] for name in OUTPUTS}
    for row, label in enumerate(x["labels"].tolist()):
        full = torch.softmax(x["teacher_head"] @ x["teacher_hidden"][row], 0)
        logq = torch.log_softmax(logits[row], 0)
        scored = bool(x["weight"][row] != 0)
        valid = scored and not (drop and int(full.argmax()) not in ids.tolist())
        p = full[ids] / full[ids].sum()
        at = ids.tolist().index(label) if label in ids.tolist() else None
        hard = 0 * logq.sum() if at is None else -logq[at]
        tv = 1 - torch.minimum(p, logq.exp()).sum()
        each = {"hard": hard, "soft": -(p * logq).sum(), "tv": tv, "dspark": 0.1 * hard + 0.9 * tv}[name] * valid
        values = (
            each * x["weight"][row],
            each.detach(),
            torch.minimum(full[ids], logq.detach().exp()).sum() * scored,
            torch.zeros((), dtype=torch.float64) if at is None else logq.detach()[at].exp() * scored,
            torch.tensor(scored and int(ids[logq.argmax()]) == int(full.argmax())),
            torch.tensor(valid),
        )
        for key, value in zip(OUTPUTS, values, strict=True):
            found[key].append(value)
    out = {key: torch.stack(values) for key, values in found.items()}
    out["loss"] = out["loss"].sum()
    grads = torch.autograd.grad(out["loss"], trained(x), allow_unused=True, materialize_grads=True)
    return out, grads


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=12, deadline=None)
@given(
    R=st.integers(1, 9),
    V=st.integers(2, 8),
    reduced=st.booleans(),
    r=st.sampled_from([0, 1, 3]),
    chunk=st.integers(1, 10),
    drop=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_losses_on_labels_and_with_a_low_rank_bias_equal_full_matrices(
    name: str, R: int, V: int, reduced: bool, r: int, chunk: int, drop: bool, seed: int
) -> None:
    x = example(R, V, (V + 1) // 2 if reduced else None, max(r, 1), seed)
    if r == 0:
        x["bias"] = None
    out, grads = evaluated(LOSSES[name](chunk=chunk, out_of_vocab="drop" if drop else "renormalise"), x)
    want, wanted = dense(name, x, drop and reduced)
    for key in OUTPUTS:
        torch.testing.assert_close(getattr(out, key).detach(), want[key].detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(grads, wanted, rtol=1e-10, atol=1e-10)


def test_a_row_without_label_or_with_one_that_the_draft_lacks_counts_0_and_gets_no_gradient() -> None:
    x = example(R=3, V=5, Vd=2)
    x["weight"] = torch.ones(3, dtype=torch.float64)
    x["d2t_target_ids"] = torch.tensor([1, 3])
    x["labels"] = torch.tensor([-1, 4, 3])
    out, (d_hidden, d_head, d_rows, d_table) = evaluated(HardCrossEntropy(), x)
    assert out.each[:2].tolist() == out.label_prob[:2].tolist() == [0.0, 0.0]
    assert out.each[2] > 0
    assert out.label_prob[2] > 0
    assert out.valid.all()
    for gradient in (d_hidden, d_rows):
        assert (gradient[:2] == 0).all()
        assert (gradient[2] != 0).all()
    q = torch.softmax(x["head"] @ x["hidden"][2] + x["bias"][1] @ x["bias"][0][2], 0).detach()
    slope = q - torch.tensor([0.0, 1.0])
    torch.testing.assert_close(d_head, torch.outer(slope, x["hidden"][2]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(d_table, torch.outer(slope, x["bias"][0][2]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_label_whose_probability_underflows_has_its_exact_loss_and_finite_gradients(
    dtype: torch.dtype, reduced: bool
) -> None:
    hidden = torch.tensor([[2000.0], [-3e4]], dtype=dtype, requires_grad=True)
    head = torch.tensor([[1.0], [-1.0]], dtype=dtype, requires_grad=True)
    teacher_head = torch.tensor([[-1.0], [1.0], [0.0]], dtype=dtype)
    teacher = hidden.detach()
    out = HardCrossEntropy()(
        hidden, head, teacher, teacher_head if reduced else teacher_head[:2], torch.ones(2, dtype=dtype),
        torch.tensor([0, 1]) if reduced else None, labels=torch.tensor([1, 0]),
    )  # fmt: skip
    out.loss.backward()
    assert out.each.tolist() == [4000.0, 6e4]
    assert out.label_prob.tolist() == [0.0, 0.0]
    assert hidden.grad is not None
    assert hidden.grad.flatten().tolist() == [2.0, -2.0]
    assert head.grad is not None
    assert head.grad.flatten().tolist() == [32000.0, -32000.0]


def test_a_certain_label_has_loss_0_and_probability_1() -> None:
    one = torch.tensor([[1e4]])
    head = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    out = HardCrossEntropy()(one, head, one, head, torch.ones(1), labels=torch.tensor([0]))
    out.loss.backward()
    assert (out.loss.item(), out.label_prob.item()) == (0.0, 1.0)
    assert head.grad is not None
    assert (head.grad == 0).all()


def test_rows_that_are_not_scored_may_hold_anything_also_as_label_and_bias() -> None:
    x = example(R=4)
    x["weight"] = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    x["labels"] = torch.tensor([0, 1 << 40, 2, -7])
    x["hidden"][1::2] = torch.nan
    x["bias"][0][1::2] = torch.inf
    out, grads = evaluated(LOSSES["dspark"](chunk=3), x)
    assert torch.isfinite(out.loss)
    assert out.label_prob[1::2].tolist() == [0.0, 0.0]
    for gradient in grads:
        assert torch.isfinite(gradient).all()
    assert (grads[2][1::2] == 0).all()


def test_no_row_has_loss_0_and_gradients_0() -> None:
    for rows in (0, 3):
        x = example(R=rows)
        x["weight"] = torch.zeros(rows, dtype=torch.float64)
        out, grads = evaluated(HardCrossEntropy(), x)
        assert out.loss.item() == 0.0
        assert out.label_prob.tolist() == [0.0] * rows
        assert all((gradient == 0).all() for gradient in grads)


def test_label_probabilities_come_with_every_loss_and_change_nothing_else() -> None:
    x = example()
    plain = LK()(**(x | {"labels": None}))
    out = LK()(**x)
    assert plain.label_prob.tolist() == [0.0] * 9
    assert (out.label_prob > 0).any()
    for key in ("loss", "each", "alpha", "agree", "valid"):
        assert torch.equal(getattr(out, key), getattr(plain, key))


def test_losses_say_whether_they_need_labels() -> None:
    assert HardCrossEntropy().needs_labels
    assert LOSSES["dspark"]().needs_labels
    assert Weighted([LOSSES["dspark"](), LK()], [1.0, 1.0]).needs_labels
    for loss in (SoftCrossEntropy(), LK(), Weighted([LK(), TotalVariation()], [1.0, 1.0])):
        assert not loss.needs_labels


def test_frozen_factors_of_the_bias_get_no_gradient_and_the_others_still_do() -> None:
    x = example()
    _, (d_hidden, d_head, d_rows, d_table) = evaluated(LOSSES["dspark"](), x)
    rows, table = x["bias"]
    for frozen, kept, want in (((rows.detach(), table), table, d_table), ((rows, table.detach()), rows, d_rows)):
        out = LOSSES["dspark"]()(**(x | {"bias": frozen}))
        got = torch.autograd.grad(out.loss, (x["hidden"], x["head"], kept))
        for a, b in zip(got, (d_hidden, d_head, want), strict=True):
            assert torch.equal(a, b)
    # The bias alone, as where head and states are frozen.
    alone = LOSSES["dspark"]()(**(x | {"hidden": x["hidden"].detach(), "head": x["head"].detach()}))
    got = torch.autograd.grad(alone.loss, (rows, table))
    assert torch.equal(got[0], d_rows)
    assert torch.equal(got[1], d_table)


def test_low_precision_factors_are_summed_in_float32_and_their_gradients_come_back_as_they_are() -> None:
    x = example(R=40, V=30)
    low = {k: v.to(torch.bfloat16) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in x.items()}
    low["bias"] = tuple(t.to(torch.bfloat16) for t in x["bias"])
    exact = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in low.items()}
    exact["bias"] = tuple(t.double() for t in low["bias"])
    want, wanted = evaluated(LOSSES["dspark"](), exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, grads = evaluated(LOSSES["dspark"](), low)
    torch.testing.assert_close(out.loss.double(), want.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.label_prob.double(), want.label_prob, rtol=1e-5, atol=1e-5)
    for gradient, wish in zip(grads, wanted, strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.double(), wish, rtol=1e-2, atol=1e-3)


def test_sweeps_without_a_graph_add_to_the_buffers_and_have_the_gradients_of_a_call() -> None:
    x = example()
    out, grads = evaluated(LOSSES["dspark"](chunk=2), x)
    rows, table = (t.detach() for t in x["bias"])
    d_rows, d_table = torch.ones_like(rows), torch.ones_like(table)
    given = [x[key].detach() for key in ("hidden", "head", "teacher_hidden", "teacher_head", "weight")]
    d_head = torch.ones_like(given[1])
    swept = LOSSES["dspark"](chunk=2).sweep(
        *given, None, torch.arange(9), need_hidden=True, d_head=d_head, labels=x["labels"],
        bias=LowRank(rows, table, d_rows, d_table),
    )  # fmt: skip
    assert swept.d_hidden is not None
    torch.testing.assert_close(swept.total, out.loss.detach(), rtol=1e-12, atol=1e-12)
    found = (swept.d_hidden, d_head - 1, d_rows - 1, d_table - 1)
    torch.testing.assert_close(found, grads, rtol=1e-12, atol=1e-12)
    scored = x["weight"] != 0
    assert torch.equal(swept.label_prob[scored], out.label_prob[scored])


def test_rows_times_vocabulary_elements_are_never_made() -> None:
    x = example(R=600, V=400)
    with LargestTensor() as seen:
        evaluated(LOSSES["dspark"](chunk=32), x)
    assert 16 * 400 <= seen.largest < 600 * 400 // 10


def test_wrong_labels_and_biases_are_refused() -> None:
    x = example()
    with pytest.raises(ConfigError, match="draft_loss"):
        HardCrossEntropy()(**(x | {"labels": None}))
    wrong: dict[str, dict[str, Any]] = {
        "outside the vocabulary of 7": {"labels": torch.full((9,), 7)},
        "need labels": {"labels": x["labels"][1:]},
        "int64": {"labels": x["labels"].int()},
        r"need bias \(\[9, r\], \[7, r\]\)": {"bias": (x["bias"][0], x["bias"][1][1:])},
        "need bias": {"bias": (x["bias"][0][:, :1], x["bias"][1])},
    }
    for words, change in wrong.items():
        with pytest.raises(ValueError, match=words):
            HardCrossEntropy()(**(x | change))
