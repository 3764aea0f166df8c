"""The stand-in makes the CPU Megatron's device, for one thread, and puts everything back."""

from __future__ import annotations

import threading

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from lightning_spec.parallel.cpu_stand_in import cpu_stand_in, cuda_is_missing, in_stand_in

pytestmark = pytest.mark.skipif(not cuda_is_missing(), reason="the stand-in does nothing where there is CUDA")

WATCHED = [
    (torch.cuda, "current_device"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "current_stream"),
    (megatron_random, "_get_cuda_rng_state"),
    (megatron_random, "_set_cuda_rng_state"),
    (MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream"),
    (MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize"),
]


def originals() -> list[object]:
    return [getattr(owner, name) for owner, name in WATCHED]


def test_what_names_the_gpu_reaches_the_cpu() -> None:
    cpu = torch.device("cpu")
    with cpu_stand_in():
        assert torch.zeros([], device="cuda").device == cpu
        assert torch.ones(2, device=torch.device("cuda", 0)).device == cpu
        assert torch.ones(2, device=torch.cuda.current_device()).device == cpu
        x = torch.arange(3.0)
        assert x.cuda() is x
        assert x.to("cuda:0").device == cpu
        assert torch.equal(x.to("cuda", torch.float64), x.double())
        assert x.to(device="cuda", dtype=torch.int64).dtype is torch.int64
        assert torch.empty(2, pin_memory=True).device == cpu
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.type(torch.float64).dtype is torch.float64
        torch.cuda.synchronize()
    assert x.type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros([], device="cuda")


def test_the_generator_that_recompute_saves_and_restores_is_the_cpus() -> None:
    queued = len(torch.cuda._queued_calls)
    with cpu_stand_in():
        state = megatron_random._get_cuda_rng_state()
        drawn = torch.rand(3)
        megatron_random._set_cuda_rng_state(state)
        assert torch.equal(torch.rand(3), drawn)
    assert len(torch.cuda._queued_calls) == queued


def test_nesting_and_exceptions_restore_everything() -> None:
    before = originals()

    def fail_inside() -> None:
        with cpu_stand_in():
            with cpu_stand_in():
                assert in_stand_in()
            assert in_stand_in()
            assert torch.zeros(1, device="cuda").device.type == "cpu"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert not in_stand_in()
    assert originals() == before


def test_a_nested_context_adds_no_second_interception() -> None:
    def modes() -> int:
        return torch._C._len_torch_function_stack()

    outside = modes()
    with cpu_stand_in():
        assert modes() == outside + 1
        with cpu_stand_in():
            assert modes() == outside + 1
    assert modes() == outside


def test_it_holds_for_the_entering_thread_and_the_last_one_out_restores() -> None:
    before = originals()
    inside, leave = threading.Event(), threading.Event()
    seen: list[bool] = []

    def worker() -> None:
        seen.append(in_stand_in())
        try:
            torch.zeros(1, device="cuda")
        except (AssertionError, RuntimeError):
            seen.append(False)
        with cpu_stand_in():
            seen.append(torch.zeros(1, device="cuda").device.type == "cpu")
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=worker)
    with cpu_stand_in():
        thread.start()
        assert inside.wait(10)
    # This thread has left; the worker still needs the replaced functions.
    assert not in_stand_in()
    assert torch.cuda.current_device() == torch.device("cpu")
    leave.set()
    thread.join(10)
    assert seen == [False, False, True]
    assert originals() == before


def test_it_does_nothing_where_cuda_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = originals()
    with cpu_stand_in():
        assert originals() == before
        assert not in_stand_in()
        assert torch.zeros(1).type() == "torch.FloatTensor"
