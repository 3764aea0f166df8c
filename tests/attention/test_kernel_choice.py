"""Which attention kernel is chosen, how one is forced, and that the choice is logged once."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from lightning_spec.attention import kernels, packed_attention, reference
from lightning_spec.attention.attend import Work, attend, attend_backward, kernel_of

ITEMS = Work(4, 4, causal=((0, 4, 0, 4),))
INTERVALS = Work.of_intervals(torch.tensor([0, 0, 1, 2]), torch.tensor([1, 2, 3, 4]), 4)


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on CUDA: enough to see what would be chosen there."""

    device = torch.device("cuda")  # type: ignore[assignment]
    is_cuda = True


def on_cuda(dtype: torch.dtype, dim: int = 64) -> torch.Tensor:
    return torch.zeros(4, 2, dim, dtype=dtype).as_subclass(OnCuda)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_on_the_cpu_flash_serves_items_and_plain_matmuls_serve_intervals(dtype: torch.dtype) -> None:
    q = torch.zeros(4, 2, 8, dtype=dtype)
    assert kernel_of(q, ITEMS) == "flash"
    assert kernel_of(q, INTERVALS) == "plain"


def test_on_cuda_flash_serves_16_bit_items_and_triton_the_rest() -> None:
    pytest.importorskip("triton")
    assert kernel_of(on_cuda(torch.bfloat16), ITEMS) == "flash"
    assert kernel_of(on_cuda(torch.bfloat16), INTERVALS) == "triton"
    assert kernel_of(on_cuda(torch.float32), ITEMS) == "triton"
    assert kernel_of(on_cuda(torch.bfloat16, 512), ITEMS) == "plain"
    assert kernel_of(on_cuda(torch.float64), ITEMS) == "plain"


def test_without_triton_plain_matmuls_serve_what_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "triton_launch", lambda: None)
    assert kernel_of(on_cuda(torch.bfloat16), ITEMS) == "flash"
    assert kernel_of(on_cuda(torch.bfloat16), INTERVALS) == "plain"
    with kernels.use_kernel("triton"), pytest.raises(ValueError, match="not installed"):
        kernel_of(on_cuda(torch.bfloat16), ITEMS)


@pytest.mark.parametrize("name", ["plain", "reference"])
def test_a_forced_kernel_serves_everything_until_the_end_of_the_block(name: kernels.Kernel) -> None:
    q = torch.zeros(4, 2, 8)
    with kernels.use_kernel(name):
        assert kernel_of(q, ITEMS) == kernel_of(q, INTERVALS) == name
        with kernels.use_kernel("auto"):
            assert kernel_of(q, ITEMS) == "flash"
        assert kernel_of(q, ITEMS) == name
    assert kernel_of(q, ITEMS) == "flash"


def test_a_kernel_that_does_not_serve_the_tensors_is_refused_when_forced() -> None:
    with kernels.use_kernel("triton"), pytest.raises(ValueError, match="no Triton kernel for torch"):
        kernel_of(torch.zeros(4, 2, 8), ITEMS)
    with kernels.use_kernel("flash"), pytest.raises(ValueError, match="no flash kernel for"):
        kernel_of(on_cuda(torch.float32), ITEMS)
    with pytest.raises(ValueError, match="unknown attention kernel 'fast'"), kernels.use_kernel("fast"):  # type: ignore[arg-type]
        pass


def test_the_kernels_agree_forward_and_backward() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 4, 8, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, 4, 2, 8, dtype=torch.float64, generator=generator)
    results = []
    for name in ("flash", "plain", "reference"):
        with kernels.use_kernel(name):  # type: ignore[arg-type]
            out, lse = attend(q, k, v, ITEMS, scale=0.3)
            results.append((out, lse, *attend_backward(torch.ones_like(q), q, k, v, out, lse, ITEMS, scale=0.3)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_reference_kernel_refuses_sizes_that_are_no_test() -> None:
    q = torch.zeros(4097, 1, 1)
    with kernels.use_kernel("reference"), pytest.raises(ValueError, match="for tests"):
        packed_attention(q, q, q, [4097])
    low, high = torch.zeros(4096, dtype=torch.int64), torch.zeros(4096, dtype=torch.int64)
    with pytest.raises(ValueError, match="for tests"):
        reference.attend(q[1:], q, q, low, high, scale=1.0)


def test_what_a_kernel_remembers_of_a_work_does_not_pass_to_changed_copies_of_it() -> None:
    ITEMS.plans["kernel"] = "plan"
    try:
        assert replace(ITEMS, rows=5).plans == {}
        assert replace(ITEMS) == ITEMS
    finally:
        ITEMS.plans.clear()


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    kernels._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="lightning_spec"):
        for _ in range(3):
            kernel_of(torch.zeros(4, 2, 24), ITEMS)
            kernel_of(torch.zeros(4, 2, 24), INTERVALS)
    assert [record.getMessage() for record in caplog.records] == [
        "attention kernel for torch.float32 with head size 24 on cpu: PyTorch's flash kernel",
        "attention kernel for torch.float32 with head size 24 on cpu: plain matmuls over chunks for intervals",
    ]
