"""The link between two GPUs' processes on one machine: the slots' data lie in the host's GPU memory.

Headers, stamps and doorbells are those of the shared-memory link; only the data's place differs. The source's thread
copies a block into the slot on a stream of its own and stamps it when the GPU has done so; the host gives a credit when
the GPU has copied the block out.

NOT YET RUN ON A GPU: written against PyTorch's documented IPC (torch.multiprocessing), and its choice is tested; the
copies themselves are not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_spec.parallel.transports.base import Header, Inbox, Outbox, RingShape
from lightning_spec.parallel.transports.board import Wait
from lightning_spec.parallel.transports.shared_memory import RingOffer, SharedInbox, SharedOutbox


@dataclass(frozen=True, slots=True)
class GpuOffer:
    """What a source needs to open a ring in the host's GPU memory."""

    ring: RingOffer
    device: str
    """UUID of the GPU: two processes may number it differently."""
    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    """Of `rebuild`: PyTorch's handle of the allocation."""


def device_uuids() -> tuple[str, ...]:
    """Of the GPUs that this process can open, by its own numbers."""
    if not torch.cuda.is_available():
        return ()
    return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))


class GpuInbox(Inbox):
    """Makes the ring on `device`; `offer` goes to the source, `seal` when the source has opened it."""

    def __init__(self, shape: RingShape, device: torch.device) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        self._headers = SharedInbox(shape, data_in_ring=False)
        self._slots = torch.zeros((shape.slots, shape.elements), dtype=shape.dtype, device=device)
        self.memory = self._slots.nbytes
        self.shape = shape
        rebuild, arguments = reduce_tensor(self._slots)
        self.offer = GpuOffer(self._headers.offer, device_uuids()[self._slots.get_device()], rebuild, arguments)
        self._read = 0
        self._copying: deque[torch.cuda.Event] = deque()

    def seal(self) -> None:
        self._headers.seal()

    def arrived(self) -> Header | None:
        self._release()
        # Slots are freed in order, so the next block lies behind those whose copies are still under way.
        return self._headers.peek(len(self._copying))

    def wait(self, wait: Wait) -> Header:
        return self._headers.wait_until(wait, self.arrived)

    def take(self, header: Header) -> Tensor:
        flat = self._slots[self._read % self.shape.slots, : header.rows * header.width]
        block = flat.clone().view(header.rows, header.width)
        done = torch.cuda.Event()
        done.record()
        self._copying.append(done)
        self._read += 1
        return block

    def close(self) -> None:
        self._copying.clear()
        self._headers.close()

    def _release(self) -> None:
        while self._copying and self._copying[0].query():
            self._copying.popleft()
            self._headers.release()


class GpuOutbox(Outbox):
    """Opens the host's ring; `device` is this rank's own GPU."""

    def __init__(self, offer: GpuOffer, device: torch.device) -> None:
        self._headers = SharedOutbox(offer.ring)
        arguments = list(offer.arguments)
        arguments[_DEVICE_ARGUMENT] = device_uuids().index(offer.device)
        self._slots = offer.rebuild(*arguments)
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._made: deque[torch.cuda.Event] = deque()

    def try_write(self, header: Header, parts: Sequence[Tensor]) -> bool:
        return False  # the stamp has to wait for the GPU

    def keep(self, parts: Sequence[Tensor]) -> Tensor:
        block = super().keep(parts)
        made = torch.cuda.Event()
        made.record()
        self._made.append(made)
        return block

    def wait_for_slot(self, wait: Wait) -> None:
        self._headers.wait_for_slot(wait)

    def write(self, header: Header, block: Tensor, wait: Wait) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._made.popleft())
            slot = self._slots[self._headers.slot, : block.numel()]
            slot.copy_(block.reshape(-1), non_blocking=True)
            written = torch.cuda.Event()
            written.record(self._stream)
        # `block` is alive until here, so its memory is not given to another stream before the copy has read it.
        written.synchronize()
        self._headers.publish(header)

    def close(self) -> None:
        self._made.clear()
        self._headers.close()


_DEVICE_ARGUMENT = 6
"""Place of the GPU's number among the arguments of PyTorch's `rebuild_cuda_tensor`."""
