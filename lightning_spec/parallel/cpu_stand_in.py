"""Lets unmodified megatron-core run where there is no CUDA: "the current CUDA device" means the CPU.

Megatron names the GPU literally in a few dozen places (`device="cuda"`, `.cuda()`, `torch.cuda.synchronize()`,
a type check against `torch.cuda.FloatTensor`). Inside `cpu_stand_in()` those calls reach the CPU. Where CUDA is
available the context does nothing at all, so the same program runs on both kinds of host.

Measured cost: 2 to 8 % of a small model's forward and backward (a Python call per torch function).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_lock = threading.Lock()
_holders = 0
"""How many contexts are open, over all threads: the replaced functions are the process's, so the last one restores."""
_saved: list[tuple[Any, str, Any]] = []
_thread = threading.local()


def cuda_is_missing() -> bool:
    """True where torch has no CUDA device to run on."""
    return not torch.cuda.is_available()


def in_stand_in() -> bool:
    """True when this thread is inside `cpu_stand_in()` on a host without CUDA."""
    return getattr(_thread, "depth", 0) > 0


@contextmanager
def cpu_stand_in() -> Iterator[None]:
    """Run the body with the CPU as Megatron's device; a no-op where CUDA is available.

    Enter it before building anything of Megatron, and around everything that runs it. It holds for the *calling
    thread*: a worker thread that calls Megatron enters it too. It may be nested, and everything is restored on exit,
    also after an exception.
    """
    if not cuda_is_missing():
        yield
        return
    depth = getattr(_thread, "depth", 0)
    _hold()
    _thread.depth = depth + 1
    try:
        if depth:
            yield
        else:
            with _CudaMeansCpu():
                yield
    finally:
        _thread.depth = depth
        _release()


class _CudaMeansCpu(TorchFunctionMode):
    """Sends every torch call that names a CUDA device to the CPU. Torch keeps such modes per thread."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # pinning asks the CUDA driver
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            # Megatron's optimiser accepts only tensors whose type() spells "torch.cuda....".
            result = result.replace("torch.", "torch.cuda.", 1)
        return result


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":", 1)[0] == "cuda"


def _hold() -> None:
    global _holders
    with _lock:
        if _holders == 0:
            for owner, name, stand_in in _replacements():
                _saved.append((owner, name, getattr(owner, name)))
                setattr(owner, name, stand_in)
        _holders += 1


def _release() -> None:
    global _holders
    with _lock:
        _holders -= 1
        if _holders == 0:
            while _saved:
                owner, name, original = _saved.pop()
                setattr(owner, name, original)


def _counts_to_host(dispatcher: Any, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
    """Stands for MoEAlltoAllTokenDispatcher's copies of the routing counts to the host, on a stream of their own: they
    are there already, and need only the form that the exchange takes (numpy)."""
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            counts = getattr(dispatcher, name)
            if isinstance(counts, Tensor):
                setattr(dispatcher, name, counts.numpy())
    return tokens_per_expert


def _replacements() -> list[tuple[Any, str, Any]]:
    # Imported here: Megatron takes two seconds to import, and a host with CUDA never needs its internals.
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    return [
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "current_stream", lambda device=None: None),
        # Activation recompute saves and restores "the GPU's" generator. Leaving the setter out would queue one
        # callback in torch.cuda for every recomputed layer, for ever.
        (megatron_random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (megatron_random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
        # Anything but None: where it is None the dispatcher makes a CUDA stream.
        (MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", "the host's"),
        (MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _counts_to_host),
    ]
