"""Branch and packed attention against one explicit dense softmax in float64 (SEMANTICS 3; CASES B1, B4, B6, B12)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_spec.attention import branch_attention, cuda, kernels, packed, packed_attention
from lightning_spec.attention.attend import Work, attend


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch_k: Sequence[Tensor],
    branch_v: Sequence[Tensor],
    lengths: Sequence[int],
    scale: float | None = None,
    window: int | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """The whole [R, T + i] score matrix, kv heads expanded, one softmax, autograd."""
    total, passes, group = k.shape[0], len(branch_k), q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    t = (torch.arange(total) if rows is None else rows)[:, None]
    s = torch.arange(total)
    seen = (document[t] == document) & (s <= t)
    if window is not None:
        seen &= (t + passes) - s < window

    def wide(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, dim=1)

    scores = [(torch.einsum("rhd,shd->rhs", q, wide(k)) * scale).masked_fill(~seen[:, None], -torch.inf)]
    for j, key in enumerate(branch_k, start=1):
        score = (q * wide(key)).sum(-1, keepdim=True) * scale
        scores.append(score if window is None or passes - j < window else torch.full_like(score, -torch.inf))
    weights = torch.cat(scores, dim=-1).softmax(dim=-1)
    out = torch.einsum("rhs,shd->rhd", weights[..., :total], wide(v))
    for j, value in enumerate(branch_v):
        out = out + weights[..., total + j : total + j + 1] * wide(value)
    return out


def make_inputs(
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    passes: int,
    dtype: torch.dtype = torch.float64,
    rows: int | None = None,
    dim: int = 8,
    seed: int = 0,
) -> list[Tensor]:
    """q, trunk k, trunk v, branch k 1..i, branch v 1..i."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    count = total if rows is None else rows
    shapes = [(count, heads, dim)] + 2 * [(total, kv_heads, dim)] + 2 * passes * [(count, kv_heads, dim)]
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes]


def split(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]]:
    half = (len(inputs) - 3) // 2
    return inputs[0], inputs[1], inputs[2], inputs[3 : 3 + half], inputs[3 + half :]


def out_and_grads(out: Tensor, inputs: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    upstream = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    grads = torch.autograd.grad(out, inputs, upstream, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True))]


def assert_equal(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> None:
    names = ["out", "dq", "dk", "dv", *(f"branch {n}" for n in range(len(found)))]
    for name, a, b in zip(names, found, wanted, strict=False):
        assert a.dtype == found[0].dtype
        torch.testing.assert_close(
            a.double(), b.double(), rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def compare(
    lengths: Sequence[int],
    heads: int = 4,
    kv_heads: int = 2,
    passes: int = 0,
    window: int | None = None,
    rows: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
    scale: float | None = None,
) -> None:
    inputs = make_inputs(lengths, heads, kv_heads, passes, dtype, None if rows is None else rows.numel())
    found = branch_attention(*split(inputs), lengths, window=window, rows=rows, scale=scale)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = dense_attention(*split(exact), lengths, window=window, rows=rows, scale=scale)
    assert_equal(out_and_grads(found, inputs), out_and_grads(wanted, exact), tolerance)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("passes", range(7))
def test_every_pass_equals_one_dense_softmax(passes: int, heads: int, kv_heads: int) -> None:
    compare([7, 1, 0, 12, 12, 5], heads, kv_heads, passes)


@pytest.mark.parametrize("passes", [0, 1, 3, 6])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 16, 17, 18, 40])
def test_a_sliding_window_hides_keys_at_distance_window_or_more(window: int, passes: int) -> None:
    compare([17, 1, 3], passes=passes, window=window)


@given(
    lengths=st.lists(st.one_of(st.just(1), st.integers(0, 24)), min_size=1, max_size=9).filter(any),
    grouping=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    passes=st.integers(0, 6),
    window=st.one_of(st.none(), st.integers(1, 30)),
    seed=st.one_of(st.none(), st.integers(0, 10**6)),
)
@settings(max_examples=60, deadline=None)
def test_random_packings_equal_the_dense_softmax(
    lengths: list[int], grouping: tuple[int, int], passes: int, window: int | None, seed: int | None
) -> None:
    rows = None
    if seed is not None:
        draw, total = random.Random(seed), sum(lengths)
        rows = torch.tensor(sorted(draw.sample(range(total), draw.randint(1, total))))
    compare(lengths, *grouping, passes, window, rows)


@pytest.mark.parametrize("passes", [0, 2])
def test_rows_may_be_runs_inside_documents(passes: int) -> None:
    rows = torch.tensor([3, 4, 5, 6, 9, 10, 30, 31, 45])  # two turns, a tail, a whole document of one row
    compare([20, 16, 9, 1], passes=passes, rows=rows)
    compare([20, 16, 9, 1], passes=passes, rows=rows, window=6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 8])
def test_other_types_are_as_right_as_their_rounding(dtype: torch.dtype, window: int | None) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}[dtype]
    rows = torch.tensor([2, 3, 10, 11, 12, 20])
    compare([9, 30, 1, 30, 11], passes=3, window=window, dtype=dtype, tolerance=tolerance)
    compare([9, 30, 1, 30, 11], passes=3, window=window, rows=rows, dtype=dtype, tolerance=tolerance)


def test_the_plain_kernel_equals_the_flash_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "choose", lambda x: "plain")
    compare([7, 1, 0, 12, 12, 5], passes=2)
    compare([7, 1, 0, 12, 12, 5], passes=2, rows=torch.tensor([0, 5, 6, 7, 30]))


def test_the_plain_kernel_is_right_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_CHUNK_ELEMENTS", 512)
    compare([150, 3, 40], passes=2, window=12)
    compare([150, 3, 40], passes=2, window=100)


def test_the_scale_may_be_given() -> None:
    compare([5, 9], passes=2, scale=0.7)


def test_large_logits_do_not_overflow() -> None:
    inputs = make_inputs([6, 40], 4, 2, 2, torch.float32)
    inputs = [(x.detach() * 100).requires_grad_() for x in inputs]
    for result in out_and_grads(branch_attention(*split(inputs), [6, 40]), inputs):
        assert result.isfinite().all()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_packed_attention_equals_the_dense_softmax(kv_heads: int) -> None:
    lengths = [3, 3, 1, 0, 20, 18]
    inputs = make_inputs(lengths, 4, kv_heads, 0)
    found, wanted = packed_attention(*inputs, lengths), dense_attention(*inputs, [], [], lengths)
    assert_equal(out_and_grads(found, inputs), out_and_grads(wanted, inputs), 1e-10)
    found, wanted = packed_attention(*inputs, lengths, window=4), dense_attention(*inputs, [], [], lengths, window=4)
    assert_equal(out_and_grads(found, inputs), out_and_grads(wanted, inputs), 1e-10)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1], [1, 1, 1]])
def test_empty_and_one_row_documents_work(lengths: list[int]) -> None:
    inputs = make_inputs(lengths, 4, 2, 2)
    for result in out_and_grads(branch_attention(*split(inputs), lengths), inputs):
        assert result.isfinite().all()
    inputs = make_inputs([5, *lengths], 4, 2, 2, rows=0)
    none = branch_attention(*split(inputs), [5, *lengths], rows=torch.zeros(0, dtype=torch.int64))
    assert none.shape == (0, 4, 8)
    assert not any(g.abs().sum() for g in out_and_grads(none, inputs)[1:])


@pytest.mark.parametrize("passes", [0, 1, 4])
@pytest.mark.parametrize("window", [None, 6])
def test_perturbing_document_0_changes_nothing_in_document_1(passes: int, window: int | None) -> None:
    lengths, first = [13, 11], 13
    for poison in (1e3, float("nan")) if window is None else (1e3,):
        results = []
        for value in (0.0, poison):
            inputs = make_inputs(lengths, 4, 2, passes)
            inputs = [torch.cat((x[:first] + value, x[first:])).detach().requires_grad_() for x in inputs]
            out = branch_attention(*split(inputs), lengths, window=window)
            results.append([x[first:] for x in out_and_grads(out, inputs)])
        for before, after in zip(*results, strict=True):
            assert torch.equal(before, after)


def test_dropping_the_gradient_of_the_log_sum_exp_would_be_seen() -> None:
    """The classic fault: merging parts outside of the attention function. Forward exact, dq wrong by far."""
    lengths = [24]
    inputs = make_inputs(lengths, 4, 2, 3)
    q, k, v, branch_k, branch_v = split(inputs)

    trunk = packed_attention(q, k, v, lengths)
    with torch.no_grad():
        _, lse = attend(q, k, v, Work.of_runs(packed.layout.whole_documents((24,)), 24), scale=8**-0.5)
    logits = [lse] + [(q * key.repeat_interleave(2, 1)).sum(-1) * 8**-0.5 for key in branch_k]
    weights = torch.stack(logits).softmax(0)[..., None]
    values = [trunk, *(value.repeat_interleave(2, 1) for value in branch_v)]
    merged = sum(w * x for w, x in zip(weights, values, strict=True))

    wrong = out_and_grads(merged, inputs)
    right = out_and_grads(branch_attention(q, k, v, branch_k, branch_v, lengths), inputs)
    torch.testing.assert_close(wrong[0], right[0])
    assert (wrong[1] - right[1]).norm() / right[1].norm() > 0.05
    wanted = out_and_grads(dense_attention(q, k, v, branch_k, branch_v, lengths), inputs)
    assert_equal(right, wanted, 1e-10)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("use_rows", [False, True])
def test_nothing_of_size_rows_by_rows_is_ever_made(window: int | None, use_rows: bool) -> None:
    total, lengths = 2048, [1000, 1048]
    rows = torch.arange(200, total) if use_rows else None
    inputs = make_inputs(lengths, 2, 1, 2, torch.float32, None if rows is None else rows.numel())
    with LargestTensor() as mode:
        out_and_grads(branch_attention(*split(inputs), lengths, window=window, rows=rows), inputs)
    assert mode.largest < total * total / 3


def test_the_saved_tensors_are_the_inputs_the_output_and_the_log_sum_exp() -> None:
    lengths = [10, 7]
    inputs = make_inputs(lengths, 4, 2, 2)
    out = branch_attention(*split(inputs), lengths)
    saved = out.grad_fn.saved_tensors  # type: ignore[union-attr]
    pointers = {x.data_ptr() for x in (*inputs, out)}
    assert [x.shape for x in saved if x.data_ptr() not in pointers] == [(17, 4)]


@pytest.mark.parametrize("skip", range(5))
def test_inputs_without_gradient_do_not_disturb_the_others(skip: int) -> None:
    lengths = [9, 4]
    inputs = make_inputs(lengths, 4, 2, 1)
    wanted = out_and_grads(branch_attention(*split(inputs), lengths), inputs)
    inputs[skip].requires_grad_(False)
    kept = [n for n in range(5) if n != skip]
    found = out_and_grads(branch_attention(*split(inputs), lengths), [inputs[n] for n in kept])
    assert_equal(found, [wanted[0], *(wanted[n + 1] for n in kept)], 0.0)


def test_bad_shapes_are_refused() -> None:
    q, k, v = make_inputs([4, 4], 4, 2, 0)
    branch = torch.zeros(8, 2, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="lengths sum to 9"):
        packed_attention(q, k, v, [4, 5])
    with pytest.raises(ValueError, match="do not divide"):
        packed_attention(q[:, :3], k, v, [8])
    with pytest.raises(ValueError, match="window"):
        packed_attention(q, k, v, [8], window=0)
    with pytest.raises(ValueError, match="equally many"):
        branch_attention(q, k, v, [branch], [], [8])
    with pytest.raises(ValueError, match="equally many"):
        branch_attention(q, k, v, [branch[:7]], [branch], [8])
    with pytest.raises(ValueError, match="expected 2"):
        branch_attention(q, k, v, [], [], [8], rows=torch.tensor([1, 2]))
    for bad in ([2, 1], [1, 1], [-1, 3], [7, 8]):
        with pytest.raises(ValueError, match="ascending"):
            branch_attention(q[:2], k, v, [], [], [8], rows=torch.tensor(bad))


def test_many_short_documents_need_few_kernel_calls() -> None:
    lengths = tuple(random.Random(0).randint(20, 100) for _ in range(128))
    work = Work.of_runs(packed.layout.whole_documents(lengths), sum(lengths))
    calls = packed.layout.buckets(work.causal, work.full)
    assert len(calls) < 16
    needed = sum(n * n for n in lengths)
    padded = sum(len(b.q_count) * max(b.q_count) * max(b.k_count) for b in calls)
    assert padded < 1.35 * needed
    rows = sorted(
        itertools.chain.from_iterable(range(f, f + n) for b in calls for f, n in zip(b.q_first, b.q_count, strict=True))
    )
    assert rows == list(range(sum(lengths)))


class FakeFlashAttn:
    """The two calls of flash-attn 2.7 with its names, order and layouts [B, L, H, D], computed by the CPU kernel."""

    @staticmethod
    def _flash_attn_forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
    ):  # type: ignore[no-untyped-def]
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = kernels.flash_attend(q, k, v, scale=softmax_scale, causal=causal)
        return out.transpose(1, 2), lse, None, None

    @staticmethod
    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
    ):  # type: ignore[no-untyped-def]
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
        assert all(x.is_contiguous() for x in (dout, q, k, v, out, softmax_lse))
        args = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        grads = kernels.flash_attend_backward(*args, softmax_lse, scale=softmax_scale, causal=causal)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad.transpose(1, 2))


def test_the_flash_attn_calls_have_its_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "flash_attn", lambda: FakeFlashAttn)
    q, k, v = (torch.randn(2, 7, h, 8).transpose(1, 2) for h in (4, 2, 2))
    out, lse = kernels.flash_attend(q, k, v, scale=0.3, causal=True)
    grad = torch.randn_like(out)
    found = cuda.forward(q, k, v, scale=0.3, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(found, (out, lse), strict=True))
    wanted = kernels.flash_attend_backward(grad, q, k, v, out, lse, scale=0.3, causal=True)
    found = cuda.backward(grad, q, k, v, out, lse, scale=0.3, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_kernels_without_key_masks_get_full_items_of_equal_length_only() -> None:
    runs = packed.layout.selected_runs([20, 20, 20, 20], torch.tensor([5, 6, 25, 26, 47, 48, 70]))
    work = Work.of_runs(runs, 80)
    calls = [b for b in packed.layout.buckets(work.causal, work.full, mask_keys=False) if not b.causal]
    assert sorted(b.k_count for b in calls) == [(5, 5), (7,), (10,)]
    assert len([b for b in packed.layout.buckets(work.causal, work.full) if not b.causal]) == 1
