"""The streamed engine against the plain one (all rows of a pass at once), and the sampling of rows (CASES.md A3)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_spec.draft import DraftInputs, Eagle3, VocabMap, plan
from lightning_spec.draft import mode as modes
from lightning_spec.draft import stream as streaming
from lightning_spec.errors import ConfigError
from lightning_spec.loss import prepare_heads
from lightning_spec.loss.draft import LK, SoftCrossEntropy, TotalVariation

Shapes = Callable[..., Any]
Inputs = Callable[..., DraftInputs]


def built(shape: Any, dtype: torch.dtype = torch.float64, mode: Any = "stream", **options: Any) -> Eagle3:
    draft = Eagle3(**options)
    if "draft_vocab_size" in options:
        draft.use_vocab_map(VocabMap(torch.tensor([1, 4, 5, 11, 22]), 23))
    draft.build(shape, dtype=dtype, seed=1)
    draft.set_attention(mode)
    return draft


def measure(draft: Eagle3, x: DraftInputs, loss: Any = None, totals: Any = None) -> dict[str, Tensor]:
    """Loss, metric sums and gradients, by name."""
    draft.zero_grad(set_to_none=True)
    out = draft(x, loss or SoftCrossEntropy(), totals or draft.counts(x))  # type: ignore[arg-type]
    out.loss.backward()
    found = {"loss": out.loss.detach()}
    for name, (num, den, _) in out.metrics.items():
        found[name] = torch.stack([num, den])
    for name, p in draft.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, name
            found[name] = p.grad
    return found


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert got.keys() == want.keys()
    for name in want:
        error = float((got[name].double() - want[name].double()).abs().max()) if want[name].numel() else 0.0
        assert error <= tolerance * max(1.0, float(want[name].abs().max())), (name, error)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_streaming_equals_the_plain_engine(
    dtype: torch.dtype, make_shape: Shapes, make_inputs: Inputs, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    total = sum(lengths)
    bits = st.lists(st.integers(0, 9), min_size=total, max_size=total)
    share = data.draw(st.integers(0, 10))  # from nothing sampled to everything
    sampled = [bit < share for bit in data.draw(bits)]
    stop = [bit == 0 for bit in data.draw(bits)]
    options: dict[str, Any] = {
        "num_passes": data.draw(st.integers(1, 7)),
        "num_layers": data.draw(st.sampled_from([1, 1, 2, 3])),
        "own_head": data.draw(st.booleans()),
        "own_embedding": data.draw(st.booleans()),
        "norm_output": data.draw(st.booleans()),
        "recycle": data.draw(st.sampled_from(["full", "detach"])),
        "num_kv_heads": data.draw(st.sampled_from([1, 2, 4])),
    }
    if data.draw(st.booleans()):
        options |= {"draft_vocab_size": 5, "own_head": True}
    chunk = data.draw(st.sampled_from([1, 3, 8]))
    loss = data.draw(st.sampled_from([SoftCrossEntropy(), LK(chunk=4), TotalVariation(out_of_vocab="drop")]))
    x = make_inputs(lengths, sampled=sampled, stop=stop, dtype=torch.float64)
    narrow = replace(
        x, **{n: getattr(x, n).to(dtype) for n in ("features", "embeddings", "hidden", "policy_head")}
    )  # fmt: skip
    stream, plain = built(make_shape(), dtype, chunk_rows=chunk, **options), built(make_shape(), mode="ring", **options)
    with torch.no_grad():
        for a, b in zip(plain.parameters(), stream.parameters(), strict=True):
            a.copy_(b)
    got, want = measure(stream, narrow, loss), measure(plain, x, loss)
    if dtype == torch.float32:  # ties and near ties may fall otherwise, where p and q cross as well
        got, want = (
            {n: v for n, v in found.items() if "agree" not in n and "accept" not in n} for found in (got, want)
        )
        if not isinstance(loss, SoftCrossEntropy):
            return
    assert_same(got, want, 1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("frozen", ["all but head", "all but value", "all but embedding", "head", "everything"])
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(
    layers: int, frozen: str, make_shape: Shapes, make_inputs: Inputs
) -> None:
    x = make_inputs([9, 4])
    found = []
    for mode in ("stream", "ring"):
        draft = built(
            make_shape(), mode=mode, num_layers=layers, own_head=True, own_embedding=True, chunk_rows=3, num_passes=3
        )
        for name, p in draft.named_parameters():
            keep = {
                "all but head": "lm_head" in name,
                "all but value": name == "midlayer.self_attn.v_proj.weight",
                "all but embedding": "embed_tokens" in name,
                "head": "lm_head" not in name,
                "everything": False,
            }
            p.requires_grad_(keep[frozen])
        if frozen == "everything":
            assert not draft(x, SoftCrossEntropy(), draft.counts(x)).loss.requires_grad  # type: ignore[arg-type]
            continue
        found.append(measure(draft, x))
    if found:
        assert_same(*found)


def test_without_grad_mode_loss_and_metrics_are_the_same_and_nothing_is_kept(
    make_shape: Shapes, make_inputs: Inputs
) -> None:
    draft, x = built(make_shape(), num_layers=2, chunk_rows=3), make_inputs([9, 4])
    want = measure(draft, x)
    with torch.no_grad():
        out = draft(x, SoftCrossEntropy(), draft.counts(x))  # type: ignore[arg-type]
    assert not out.loss.requires_grad
    assert torch.equal(out.loss, want["loss"])
    assert all(torch.equal(torch.stack([num, den]), want[name]) for name, (num, den, _) in out.metrics.items())


def test_backward_scales_by_what_comes_from_above_and_may_run_twice(make_shape: Shapes, make_inputs: Inputs) -> None:
    draft, x = built(make_shape(), own_head=True, own_embedding=True), make_inputs([7])
    loss = draft(x, SoftCrossEntropy(), draft.counts(x)).loss  # type: ignore[arg-type]
    once = torch.autograd.grad(loss, list(draft.parameters()), retain_graph=True)
    half = torch.autograd.grad(loss * 0.5, list(draft.parameters()))
    assert all(torch.allclose(a * 0.5, b, rtol=1e-14, atol=0) for a, b in zip(once, half, strict=True))


def test_gradient_hooks_of_parameters_see_one_gradient_a_backward(make_shape: Shapes, make_inputs: Inputs) -> None:
    draft, x = built(make_shape(), chunk_rows=2), make_inputs([9])
    seen: list[str] = []
    for name, p in draft.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))  # type: ignore[misc]
    draft(x, SoftCrossEntropy(), draft.counts(x)).loss.backward()  # type: ignore[arg-type]
    assert sorted(seen) == sorted(name for name, _ in draft.named_parameters())


def test_bfloat16_streams_like_the_plain_engine_with_sums_in_float32(make_shape: Shapes, make_inputs: Inputs) -> None:
    x = make_inputs([40], dtype=torch.bfloat16)
    options: dict[str, Any] = {"num_passes": 4, "own_head": True, "own_embedding": True}
    exact = built(make_shape(), mode="ring", **options)
    errors = []
    for mode, chunk in (("stream", 2), ("ring", 1)):
        draft = built(make_shape(), torch.bfloat16, mode, chunk_rows=chunk, **options)
        with torch.no_grad():
            for a, b in zip(exact.parameters(), draft.parameters(), strict=True):
                a.copy_(b)
        wide = replace(
            x, **{n: getattr(x, n).double() for n in ("features", "embeddings", "hidden", "policy_head")}
        )  # fmt: skip
        got, want = measure(draft, x), measure(exact, wide)
        assert all(got[name].dtype == torch.bfloat16 for name, _ in draft.named_parameters())
        errors.append(
            sum(float((got[n].double() - want[n]).norm() / want[n].norm()) for n, _ in draft.named_parameters())
        )
    assert errors[0] <= 1.1 * errors[1] < 1.1 * 0.05 * len(list(exact.parameters()))


def test_the_heads_are_converted_once_a_micro_batch(
    make_shape: Shapes, make_inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        streaming, "prepare_heads", lambda *args, **kw: calls.append(args) or prepare_heads(*args, **kw)
    )
    # What a sweep that is not given prepared heads would call.
    monkeypatch.setattr("lightning_spec.loss.draft_base.prepare_heads", None)
    draft, x = built(make_shape(), torch.bfloat16, chunk_rows=2), make_inputs([9], dtype=torch.bfloat16)
    measure(draft, x)
    assert len(calls) == 1


@settings(max_examples=60, deadline=None)
@given(
    positions=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=60),
    fixed=st.floats(0, 5000),
    passes=st.integers(1, 8),
    data=st.data(),
)
def test_sums_of_work_are_exact_in_any_order(
    positions: list[int], fixed: float, passes: int, data: st.DataObject
) -> None:
    work = plan.work_of(torch.full((len(positions),), passes), torch.tensor(positions), fixed)
    order = data.draw(st.permutations(range(len(positions))))
    assert float(work.cumsum(0)[-1]) == float(work[order].cumsum(0)[-1]) == float(work.sum())


def test_chunks_shrink_as_passes_grow_unless_they_are_given() -> None:
    assert [Eagle3(num_passes=n).chunk_rows for n in (1, 4, 7)] == [7168, 1792, 1024]
    assert Eagle3(num_passes=7, chunk_rows=9).chunk_rows == 9


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_no_tensor_holds_all_rows_of_all_passes(make_shape: Shapes, make_inputs: Inputs) -> None:
    sizes = []
    for mode in ("stream", "ring"):
        draft = built(make_shape(), mode=mode, num_passes=5, chunk_rows=16)
        x = make_inputs([40] * 4)
        with LargestTensor() as seen:
            draft(x, SoftCrossEntropy(chunk=8), draft.counts(x)).loss.backward()  # type: ignore[arg-type]
        sizes.append(seen.largest)
    # The plain engine makes the normed rows of all passes; nothing of the streamed one is larger than the taps.
    assert sizes[0] == 160 * 48
    assert sizes[1] >= (39 + 38 + 37 + 36 + 35) * 4 * 16


# ---- sampling rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["stream", "ring"])
def test_the_mean_over_all_samples_is_the_full_gradient(
    mode: str, make_shape: Shapes, make_inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = make_inputs([5, 3], sampled=[0, 1, 1, 0, 1, 0, 1, 1])
    full = built(make_shape(), num_passes=3, mode=mode)
    counts = full.counts(x)  # type: ignore[arg-type]
    rows = int(counts["draft_pass_0"])
    assert [int(n) for n in counts.values()] == [5, 2, 0]
    totals = {name: 2 * value for name, value in counts.items()}  # this is one of two micro-batches of the step
    want = measure(full, x, totals=totals)
    sampling = built(make_shape(), num_passes=3, mode=mode, rows_per_step=6)  # 3 rows of this micro-batch
    found = []
    for subset in itertools.combinations(range(rows), 3):
        monkeypatch.setattr(plan, "choose", lambda n, count, seed, s=subset: _asked(n, count, rows) or torch.tensor(s))
        found.append(measure(sampling, x, totals=totals))
    assert len(found) == 10
    assert_same({name: torch.stack([one[name] for one in found]).mean(0) for name in want}, want)
    assert not torch.allclose(found[0]["fc.weight"], want["fc.weight"])


def _asked(rows: int, count: int, expected: int) -> None:
    assert (rows, count) == (expected, 3)


def test_samples_follow_the_seed_alone_and_differ_with_it(make_shape: Shapes, make_inputs: Inputs) -> None:
    draft = built(make_shape(), num_passes=2, rows_per_step=4)
    x = make_inputs([20])
    state = torch.get_rng_state()
    a, b, c = (measure(draft, replace(x, seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(a["fc.weight"], b["fc.weight"])
    assert not torch.equal(a["fc.weight"], c["fc.weight"])
    assert torch.equal(state, torch.get_rng_state())
    chosen = torch.stack([plan.choose(5, 2, seed) for seed in range(2000)])
    assert bool((chosen[:, 0] < chosen[:, 1]).all())
    pairs = torch.bincount(chosen[:, 0] * 5 + chosen[:, 1], minlength=25)
    expected = 2000 / 10
    assert float(((pairs[pairs > 0] - expected) ** 2 / expected).sum()) < 27.9  # chi-square, 9 dof, p = 0.001
    assert int((pairs > 0).sum()) == 10


def test_every_micro_batch_samples_its_share_and_at_least_one_row() -> None:
    assert [plan.share(rows, 100.0, 10) for rows in (0, 1, 50, 49, 100)] == [0, 1, 5, 5, 10]
    assert plan.share(4, 4.0, 10) == 4


def test_as_many_rows_as_there_are_is_no_sampling(make_shape: Shapes, make_inputs: Inputs) -> None:
    x = make_inputs([9, 4])
    all_rows, sampled = (built(make_shape(), rows_per_step=rows) for rows in (None, 99))
    assert_same(measure(sampled, x), measure(all_rows, x), 0.0)


# ---- dealing rows to ranks ------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    first=st.floats(0, 1),
    size=st.integers(1, 8),
    fixed=st.floats(0, 500),
)
def test_rows_are_dealt_once_in_order_and_in_equal_work(
    lengths: list[int], first: float, size: int, fixed: float
) -> None:
    positions = torch.cat([torch.arange(n) for n in lengths])
    depth = (torch.arange(positions.numel()) >= first * positions.numel()).long() * 3
    parts = plan.deal(depth, positions, size, fixed)
    assert len(parts) == size
    assert torch.equal(torch.cat(parts), (depth > 0).nonzero().flatten())
    work = (positions + 1 + fixed).double() * depth
    shares = [float(work[part].sum()) for part in parts]
    assert max(shares) - min(shares) <= 2 * float(work.max()) + 1e-6 * float(work.sum())


def test_bad_settings_are_refused_with_their_key() -> None:
    for options in ({"rows_per_step": 0}, {"chunk_rows": 0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            Eagle3(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="draft_attention"):
        Eagle3().set_attention("rings")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="memory"):
        Eagle3().set_attention("auto", 0)


def test_auto_streams_where_it_fits_and_never_stops_a_run(
    make_shape: Shapes, make_inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot fit is refused at the start (tests/strategies/test_estimate.py), not at some later micro-batch."""
    x = make_inputs([30])
    draft = built(make_shape(), mode="auto")
    want = measure(draft, x)
    draft.set_attention("auto", 1 << 30)
    assert_same(measure(draft, x), want, 0.0)
    draft.set_attention("auto", 1 << 10)
    assert_same(measure(draft, x), want, 1e-10)
    monkeypatch.setattr(modes, "prefer", lambda work, limit: "ring" if limit == 7 else "stream")
    for limit, chosen in ((7, "ring"), (8, "stream")):
        draft.set_attention("auto", limit)
        totals = {f"draft_pass_{i}": 30.0 for i in range(4)}
        made = plan.make_plan(torch.ones(30, dtype=torch.int64), [1.0] * 4, totals, None, 0)
        assert modes.resolve_mode(draft, x, made) == chosen
