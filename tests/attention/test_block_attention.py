"""Block drafters' attention on one device against one explicit softmax (SEMANTICS 2; CASES B)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_spec.attention import kernels
from lightning_spec.attention.block import block_attention, moved_block_attention, ring_block_attention
from lightning_spec.attention.context import Context
from lightning_spec.attention.zigzag import Shard, Zigzag
from tests.attention.block_reference import block_inputs, dense_block_attention
from tests.attention.test_branch_attention import LargestTensor

NAMES = ("out", "dq", "trunk dk", "trunk dv", "block dk", "block dv")


def out_and_grads(out: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    upstream = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def compare(
    anchors: Sequence[int],
    lengths: Sequence[int],
    slots: int = 4,
    causal: bool = False,
    window: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
    seed: int = 0,
    scale: float | None = None,
) -> None:
    rows = torch.tensor(anchors, dtype=torch.int64)
    inputs = block_inputs(len(anchors), slots, sum(lengths), heads, kv_heads, 8, dtype, seed)
    exact = [x.double().requires_grad_() for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    wanted = out_and_grads(dense_block_attention(*exact, rows, lengths, causal, window, scale), exact)
    found = out_and_grads(block_attention(*inputs, rows, lengths, causal=causal, window=window, scale=scale), inputs)
    for name, a, b in zip(NAMES, found, wanted, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(
            a.double(), b, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 9, 40])
def test_blocks_equal_one_dense_softmax(window: int | None, causal: bool) -> None:
    compare([0, 1, 5, 6, 7, 19, 20], [6, 1, 0, 14], causal=causal, window=window)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_query_heads_share_kv_heads(heads: int, kv_heads: int) -> None:
    compare([3, 8, 9, 12], [9, 4], heads=heads, kv_heads=kv_heads, causal=True)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_packings_and_anchors_equal_the_dense_softmax(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.one_of(st.just(1), st.integers(0, 20)), min_size=1, max_size=6).filter(any))
    anchors = data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=10))
    compare(
        anchors,
        lengths,
        slots=data.draw(st.integers(1, 8)),
        causal=data.draw(st.booleans()),
        window=data.draw(st.one_of(st.none(), st.integers(1, 24))),
        seed=data.draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_at_the_start_of_its_document_sees_itself_only(causal: bool) -> None:
    q, trunk_k, trunk_v, block_k, block_v = block_inputs(1, 3, 10, 2, 2, 8, torch.float64, 0)
    out = block_attention(q, trunk_k, trunk_v, block_k, block_v, torch.tensor([4]), [4, 6], causal=causal)
    other = block_attention(q, trunk_k + 1, -trunk_v, block_k, block_v, torch.tensor([4]), [4, 6], causal=causal)
    assert torch.equal(out, other)
    if causal:  # and its first slot sees one key
        torch.testing.assert_close(out[:, 0], block_v[:, 0])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-2), (torch.float16, 8e-3)])
def test_other_types_are_as_right_as_their_rounding(dtype: torch.dtype, tolerance: float) -> None:
    compare([2, 9, 15, 29], [12, 18], dtype=dtype, tolerance=tolerance)
    compare([2, 9, 15, 29], [12, 18], dtype=dtype, tolerance=tolerance, causal=True, window=6)


@pytest.mark.parametrize("kernel", ["plain", "reference", "flash"])
def test_every_kernel_gives_the_same(kernel: kernels.Kernel) -> None:
    with kernels.use_kernel(kernel):
        compare([2, 9, 15, 29], [12, 18], causal=True)
        compare([2, 9, 15, 29], [12, 18], window=3)


def test_the_scale_may_be_given() -> None:
    compare([2, 9], [12], scale=0.7)


def test_no_anchors_give_an_empty_result_and_zero_gradients() -> None:
    compare([], [5, 3])


def test_a_group_of_one_rank_needs_no_processes() -> None:
    lengths, anchors = [6, 9], torch.tensor([3, 6, 11])
    inputs = [x.requires_grad_() for x in block_inputs(3, 4, 15, 4, 2, 8, torch.float64, 0)]
    wanted = out_and_grads(block_attention(*inputs, anchors, lengths, causal=True, window=7), inputs)
    shard = Shard(Zigzag(lengths, 1), Context.single())
    for function in (ring_block_attention, moved_block_attention):
        found = out_and_grads(function(*inputs, anchors, shard, causal=True, window=7), inputs)
        for name, a, b in zip(NAMES, found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def test_trunk_keys_are_not_copied_for_each_anchor() -> None:
    """Nothing of size A x T x K x D (64 copies of the keys), nor of all scores A x B x H x T."""
    lengths, anchors = [4096, 4096], torch.arange(60, 8192, 128)
    inputs = [x.requires_grad_() for x in block_inputs(64, 4, 8192, 4, 2, 32, torch.float32, 0)]
    with LargestTensor() as mode:
        out_and_grads(block_attention(*inputs, anchors, lengths, causal=False), inputs)
    assert mode.largest < 4 * inputs[1].numel()
    assert mode.largest < 64 * 4 * 4 * 8192 / 4


def test_the_saved_tensors_are_the_inputs_the_output_and_the_log_sum_exp() -> None:
    inputs = [x.requires_grad_() for x in block_inputs(3, 4, 15, 4, 2, 8, torch.float64, 0)]
    out = block_attention(*inputs, torch.tensor([3, 6, 11]), [6, 9], causal=True)
    saved = [x for x in out.grad_fn.saved_tensors if x is not None]  # type: ignore[union-attr]
    pointers = {x.data_ptr() for x in (*inputs, out)}
    assert [x.shape for x in saved if x.data_ptr() not in pointers] == [(12, 4)]


def test_bad_arguments_are_refused() -> None:
    q, trunk_k, trunk_v, block_k, block_v = block_inputs(2, 4, 9, 4, 2, 8, torch.float32, 0)
    anchors = torch.tensor([1, 5])

    def call(
        q: Tensor = q, block_k: Tensor = block_k, anchors: Tensor = anchors, lengths: Sequence[int] = (9,)
    ) -> None:
        block_attention(q, trunk_k, trunk_v, block_k, block_v, anchors, lengths, causal=False)

    with pytest.raises(ValueError, match="do not fit"):
        call(block_k=block_k[:, :3])
    with pytest.raises(ValueError, match="do not divide"):
        call(q=q[:, :, :3])
    with pytest.raises(ValueError, match="expected 8"):
        call(lengths=[8])
    with pytest.raises(ValueError, match="trunk rows"):
        call(anchors=torch.tensor([1, 9]))
    with pytest.raises(ValueError, match="anchors must be int64"):
        call(anchors=torch.tensor([1]))
    with pytest.raises(ValueError, match="window"):
        block_attention(q, trunk_k, trunk_v, block_k, block_v, anchors, [9], causal=False, window=0)
