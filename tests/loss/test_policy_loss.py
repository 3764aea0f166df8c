"""Policy objectives: values by hand, and the same gradient for every way to cut a step."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given as arbitrary
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_spec.errors import ConfigError
from lightning_spec.loss import GRPO, PolicyLoss, SupervisedLoss, kl_estimate
from lightning_spec.metrics import MetricBag

F64 = torch.float64


@dataclass
class Doc:
    """One document: its rows' values. `mask` may be all False."""

    logp: Tensor
    old: Tensor
    engine: Tensor
    ref: Tensor
    entropy: Tensor
    mask: Tensor
    advantage: float


def documents(seed: int, count: int = 5) -> list[Doc]:
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        n = int(torch.randint(1, 7, (), generator=g))
        logp = -torch.rand(n, generator=g, dtype=F64) * 3
        noise = torch.randn(4, n, generator=g, dtype=F64)
        mask = torch.rand(n, generator=g) < torch.rand((), generator=g) * 1.4
        out.append(
            Doc(
                logp.requires_grad_(),
                logp.detach() + 0.4 * noise[0],
                logp.detach() + 0.6 * noise[1],
                logp.detach() + 0.5 * noise[2],
                (noise[3].abs()).requires_grad_(),
                mask,
                float(torch.randn((), generator=g)),
            )
        )
    return out


def micro_batch(docs: list[Doc]) -> dict[str, Tensor]:
    def cat(name: str) -> Tensor:
        return torch.cat([getattr(d, name) for d in docs]) if docs else torch.zeros(0, dtype=F64, requires_grad=True)

    document = [torch.full((len(d.logp),), i) for i, d in enumerate(docs)]
    adv = [torch.full((len(d.logp),), d.advantage, dtype=F64) for d in docs]
    return {
        "logprobs": cat("logp"),
        "mask": torch.cat([d.mask for d in docs]) if docs else torch.zeros(0, dtype=torch.bool),
        "document": torch.cat(document) if docs else torch.zeros(0, dtype=torch.int64),
        "advantages": torch.cat(adv) if docs else torch.zeros(0, dtype=F64),
        "engine_logprobs": cat("engine"),
        "old_logprobs": cat("old"),
        "ref_logprobs": cat("ref"),
        "entropy": cat("entropy"),
    }


def run(loss: PolicyLoss, micros: list[list[Doc]]) -> tuple[Tensor, MetricBag]:
    """Objective and metrics of a step cut into these micro-batches."""
    batches = [micro_batch(m) for m in micros]
    counts = [loss.counts(b["mask"], b["document"]) for b in batches]
    totals = {name: sum((c[name] for c in counts), torch.zeros((), dtype=F64)) for name in counts[0]}
    outs = [loss(b.pop("logprobs"), **b, totals=totals) for b in batches]
    bag = MetricBag()
    for out in outs:
        for name, (num, den, reduction) in out.metrics.items():
            bag.add(name, num, den, reduction)  # type: ignore[arg-type]
    return sum((o.loss for o in outs), torch.zeros((), dtype=F64)), bag


def gradients(loss: Tensor, docs: list[Doc]) -> list[Tensor]:
    leaves = [d.logp for d in docs] + [d.entropy for d in docs]
    got = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(got, leaves, strict=True)]


def by_hand(docs: list[Doc], o: dict) -> Tensor:
    """The objective in scalar loops, from the papers' formulas."""
    tokens = sum(int(d.mask.sum()) for d in docs)
    sequences = sum(bool(d.mask.any()) for d in docs)
    total = torch.zeros((), dtype=F64)
    for d in docs:
        rows = [t for t in range(len(d.logp)) if d.mask[t]]
        if not rows:
            continue
        seq_ratio = sum(d.logp[t] - d.old[t] for t in rows) / len(rows)
        seq_weight = sum(d.old[t] - d.engine[t] for t in rows)
        for t in rows:
            rho = (seq_ratio if o.get("ratio_level") == "sequence" else d.logp[t] - d.old[t]).exp()
            low, high = 1 - o.get("clip_low", 0.2), 1 + o.get("clip_high", 0.2)
            a = d.advantage
            value = torch.minimum(rho * a, rho.clamp(low, high) * a)
            if o.get("dual_clip") and a < 0:
                value = torch.maximum(value, torch.tensor(o["dual_clip"] * a, dtype=F64))
            cap = o.get("importance_cap", 2.0)
            if cap is not None:
                w = seq_weight if o.get("importance_level") == "sequence" else d.old[t] - d.engine[t]
                value = value * min(math.exp(w), cap)
            log_ratio = d.ref[t] - d.logp[t]
            kl = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": log_ratio.exp() - 1 - log_ratio}
            each = -value + o.get("kl_coef", 0.0) * kl[o.get("kl_estimator", "k3")]
            each = each - o.get("entropy_coef", 0.0) * d.entropy[t]
            scale = {
                "token_mean": tokens,
                "sequence_mean": len(rows) * sequences,
                "constant": sequences * (o.get("constant_length") or 1),
            }[o.get("aggregation", "token_mean")]
            total = total + each / scale
    return total


OPTIONS = [
    {},
    {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5},
    {"aggregation": "sequence_mean", "kl_coef": 0.1, "entropy_coef": 0.05},
    {"aggregation": "constant", "constant_length": 6, "kl_coef": 0.1, "kl_estimator": "k1"},
    {"importance_cap": None, "kl_coef": 0.2, "kl_estimator": "k2"},
    {"importance_level": "sequence", "importance_cap": 1.5, "aggregation": "sequence_mean"},
    {"ratio_level": "sequence", "aggregation": "sequence_mean", "clip_low": 0.05, "clip_high": 0.05},
    {"ratio_level": "sequence", "importance_level": "sequence", "dual_clip": 1.05, "entropy_coef": -0.1},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_objective_and_gradient_equal_the_formula_in_scalar_loops(options, seed) -> None:
    docs = documents(seed)
    got, want = run(GRPO(**options), [docs])[0], by_hand(docs, options)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    for a, b in zip(gradients(got, docs), gradients(want, docs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS)
@settings(max_examples=15, deadline=None)
@arbitrary(seed=st.integers(0, 1 << 16), cuts=st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_any_micro_batch_split_and_packing_order_gives_the_same_gradient_and_metrics(options, seed, cuts) -> None:
    docs = documents(seed)
    whole, metrics = run(GRPO(**options), [docs])
    order = list(range(5))
    random.Random(seed).shuffle(order)
    micros = [[docs[i] for i in order if cuts[i] == m] for m in range(4)]  # some may be empty
    split, split_metrics = run(GRPO(**options), micros)
    torch.testing.assert_close(split, whole, rtol=1e-10, atol=1e-12)
    for a, b in zip(gradients(split, docs), gradients(whole, docs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert split_metrics.values() == pytest.approx(metrics.values(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_supervised_loss_is_the_aggregated_negative_log_likelihood_for_any_split(aggregation) -> None:
    docs = documents(3)
    loss = SupervisedLoss(aggregation, constant_length=4)
    nll = [-d.logp[d.mask] for d in docs if d.mask.any()]
    want = {
        "token_mean": torch.cat(nll).mean(),
        "sequence_mean": torch.stack([x.mean() for x in nll]).mean(),
        "constant": torch.cat(nll).sum() / (4 * len(nll)),
    }[aggregation]
    for micros in ([docs], [docs[:2], docs[2:]], [[d] for d in docs]):
        got, metrics = run(loss, micros)
        torch.testing.assert_close(got, want)
        assert metrics.values()["policy/nll"] == pytest.approx(float(torch.cat(nll).detach().mean()))


def test_masked_padding_does_not_change_the_loss() -> None:
    docs = documents(5)
    pads = documents(6)
    for d in pads:
        d.mask[:] = False
    for options in OPTIONS:
        torch.testing.assert_close(run(GRPO(**options), [docs + pads])[0], run(GRPO(**options), [docs])[0])


@pytest.mark.parametrize("options", OPTIONS)
def test_an_empty_mask_gives_zero_loss_zero_gradient_and_finite_metrics_even_from_nan_rows(options) -> None:
    loss = GRPO(**options)
    for T in (0, 3):
        logp = torch.full((T,), torch.nan, requires_grad=True)
        mask, document = torch.zeros(T, dtype=torch.bool), torch.zeros(T, dtype=torch.int64)
        out = loss(
            logp,
            mask=mask,
            document=document,
            advantages=torch.zeros(T),
            engine_logprobs=torch.full((T,), -torch.inf),
            totals=loss.counts(mask, document),
        )
        out.loss.backward()
        assert out.loss.item() == 0.0
        assert (logp.grad == 0).all()
        assert all(torch.isfinite(n) and torch.isfinite(d) for n, d, _ in out.metrics.values())
        # Ranks without supervised rows must log what the others log.
        assert set(out.metrics) == set(run(loss, [documents(0)])[1].values())


@pytest.mark.parametrize("options", OPTIONS)
def test_nan_outside_the_mask_never_leaks(options) -> None:
    docs = documents(7)
    clean, clean_metrics = run(GRPO(**options), [docs])
    want = gradients(clean, docs)
    for d in docs:
        for name in ("old", "engine", "ref"):
            getattr(d, name)[~d.mask] = torch.nan
    got, metrics = run(GRPO(**options), [docs])
    assert torch.equal(got, clean)
    assert metrics.values() == clean_metrics.values()
    for a, b in zip(gradients(got, docs), want, strict=True):
        assert torch.equal(a, b)


def call(loss: GRPO, logp: Tensor, advantage: float, **given: Tensor):
    """One document, all rows supervised."""
    T = logp.numel()
    mask, document = torch.ones(T, dtype=torch.bool), torch.zeros(T, dtype=torch.int64)
    given.setdefault("engine_logprobs", given.get("old_logprobs", logp.detach()))
    given.setdefault("entropy", torch.zeros(T))
    advantages = torch.full((T,), advantage, dtype=logp.dtype)
    return loss(logp, mask=mask, document=document, advantages=advantages, totals=loss.counts(mask, document), **given)


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_the_policy_gradient() -> None:
    logp = torch.tensor([-1.0, -2.0], dtype=F64, requires_grad=True)
    out = call(GRPO(), logp, 3.0)
    out.loss.backward()
    assert logp.grad.tolist() == [-1.5, -1.5]
    assert out.metrics["policy/ratio_max"][0] == 1.0


def test_the_second_update_uses_the_behaviour_policys_logprobs_not_its_own() -> None:
    logp = torch.tensor([-1.0, -1.0], dtype=F64, requires_grad=True)
    old = torch.tensor([-2.0, -1.0], dtype=F64)
    call(GRPO(clip_high=0.2), logp, 1.0, old_logprobs=old).loss.backward()
    assert logp.grad.tolist() == [0.0, -0.5]  # the first token has left the trust region
    logp.grad = None
    call(GRPO(clip_high=5.0), logp, 1.0, old_logprobs=old).loss.backward()
    assert logp.grad.tolist() == pytest.approx([-math.e / 2, -0.5])


def test_clip_fractions_count_the_side_where_the_gradient_was_cut() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=F64)
    logp = torch.tensor([-0.5, -1.5, -1.0, -1.1], dtype=F64, requires_grad=True)
    up, down = (call(GRPO(), logp, a, old_logprobs=old).metrics for a in (1.0, -1.0))
    assert [float(up[f"policy/clip_{s}"][0]) for s in ("low", "high")] == [0.0, 1.0]
    assert [float(down[f"policy/clip_{s}"][0]) for s in ("low", "high")] == [1.0, 0.0]


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    logp = torch.tensor([2.0], dtype=F64, requires_grad=True)
    old = torch.zeros(1, dtype=F64)
    loss = GRPO(dual_clip=3.0, importance_cap=None)
    bounded = call(loss, logp, -1.0, old_logprobs=old).loss
    assert bounded.item() == 3.0
    assert torch.autograd.grad(bounded, logp)[0].item() == 0.0
    assert call(GRPO(importance_cap=None), logp, -1.0, old_logprobs=old).loss.item() == pytest.approx(math.exp(2.0))


def test_importance_weight_truncates_and_reports_the_engine_gap() -> None:
    old = torch.tensor([-1.0, -1.0], dtype=F64)
    engine = torch.tensor([-1.5, -9.0], dtype=F64)
    logp = old.clone().requires_grad_()
    out = call(GRPO(importance_cap=2.0), logp, 1.0, old_logprobs=old, engine_logprobs=engine)
    out.loss.backward()
    assert logp.grad.tolist() == pytest.approx([-math.exp(0.5) / 2, -1.0])
    assert float(out.metrics["policy/importance_capped"][0]) == 1.0
    assert float(out.metrics["policy/engine_gap"][0]) == pytest.approx(8.5)
    assert float(out.metrics["policy/engine_gap_max"][0]) == pytest.approx(8.0)


@pytest.mark.parametrize("far", [100.0, -100.0, 1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_far_log_ratios_give_finite_value_gradient_and_metrics(far, advantage, level, estimator) -> None:
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = GRPO(kl_coef=0.1, kl_estimator=estimator, ratio_level=level, importance_level=level)
    out = call(
        loss,
        logp,
        advantage,
        old_logprobs=logp.detach() - far,
        engine_logprobs=logp.detach() - 2 * far,
        ref_logprobs=logp.detach() + far,
    )
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(logp.grad).all()
    assert all(torch.isfinite(n) for n, _, _ in out.metrics.values())


def test_k3_of_log_ratio_100_is_finite_with_finite_gradient() -> None:
    logp = torch.tensor([-101.0, -0.1], requires_grad=True)
    kl = kl_estimate(logp, torch.tensor([-1.0, -100.1]), "k3")
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert torch.isfinite(logp.grad).all()
    assert kl[1].item() == pytest.approx(99.0)
    assert logp.grad[1].item() == pytest.approx(1.0)  # far below the reference: nothing is clamped


def test_kl_estimators_average_to_the_kl_and_have_the_right_gradients() -> None:
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=F64, requires_grad=True)
    logp = torch.log_softmax(logits, 0)
    ref = torch.log_softmax(torch.tensor([0.1, 0.2, -0.4], dtype=F64), 0)
    exact = (logp.exp() * (logp - ref)).sum()
    p = logp.exp().detach()
    for name in ("k1", "k3"):
        torch.testing.assert_close((p * kl_estimate(logp, ref, name)).sum(), exact)
    want = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    got = torch.autograd.grad((p * kl_estimate(logp, ref, "k2")).sum(), logits)[0]
    torch.testing.assert_close(got, want)


def test_k3_is_never_negative_and_exact_near_zero_in_float32() -> None:
    small = torch.tensor([1e-4, -1e-4, 0.0])
    got = kl_estimate(torch.zeros(3), small, "k3")
    assert (got >= 0).all()
    torch.testing.assert_close(got, small.square() / 2, rtol=2e-3, atol=0)


def test_reference_and_entropy_are_asked_for_only_when_used() -> None:
    assert not GRPO().needs_reference
    assert GRPO(kl_coef=0.1).needs_reference
    assert GRPO().needs_entropy
    assert not GRPO(log_entropy=False).needs_entropy
    assert GRPO(log_entropy=False, entropy_coef=0.1).needs_entropy
    with pytest.raises(ValueError, match="ref_logprobs"):
        call(GRPO(kl_coef=0.1), torch.zeros(2, requires_grad=True), 1.0)


def test_the_sampling_temperature_reaches_grpo_and_leaves_supervised_at_one() -> None:
    for loss, want in ((GRPO(), 0.7), (SupervisedLoss(), 1.0)):
        assert loss.temperature == 1.0
        loss.set_sampling_temperature(0.7)
        assert loss.temperature == want


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"clip_high": float("nan")}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"aggregation": "mean"}, "aggregation"),
        ({"aggregation": "constant"}, "constant_length"),
        ({"aggregation": "constant", "constant_length": 0}, "constant_length"),
        ({"kl_coef": -1.0}, "kl_coef"),
        ({"kl_estimator": "k4"}, "kl_estimator"),
        ({"kl_clamp": 100.0}, "kl_clamp"),
        ({"entropy_coef": float("inf")}, "entropy_coef"),
        ({"importance_cap": 0.0}, "importance_cap"),
        ({"importance_level": "group"}, "importance_level"),
        ({"ratio_level": "batch"}, "ratio_level"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, key) -> None:
    with pytest.raises(ConfigError, match=key):
        GRPO(**options)
