"""What the chunked losses share: which rows to visit, how many at a time, and in which precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_MIB = 1 << 20


def math_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any input is float64, else float32: logits rounded to bfloat16 make near-converged gradients wrong."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def rows_per_chunk(vocabulary: int, dtype: torch.dtype, device: torch.device, *, mebibytes: float = 8) -> int:
    """Rows whose [rows, vocabulary] logits fill `mebibytes` (16 times that off the CPU), at least 16 rows.

    The floor keeps the matrix products, and the read-modify-write of the weight's gradient per chunk, efficient.
    """
    scale = 1 if device.type == "cpu" else 16
    size = torch.empty((), dtype=dtype).element_size()
    return max(16, int(mebibytes * scale * _MIB) // max(1, vocabulary * size))


class RowChunks:
    """The rows of a mask, in order, cut into chunks. With every row present the chunks are slices: nothing is copied.

    Args:
        keep: [T] bool.
        chunk: rows in a chunk, at least 1.
    """

    def __init__(self, keep: Tensor, chunk: int) -> None:
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 row, got {chunk}")
        index = keep.nonzero().squeeze(1)
        self.count = index.numel()
        self.all = self.count == keep.numel()
        self._index = index
        self._chunk = chunk

    def __iter__(self) -> Iterator[Tensor | slice]:
        for start in range(0, self.count, self._chunk):
            stop = min(start + self._chunk, self.count)
            yield slice(start, stop) if self.all else self._index[start:stop]


@contextlib.contextmanager
def exact_math(device: torch.device) -> Iterator[None]:
    """Without autocast: it would round the logits to bfloat16 inside the very functions that exist to avoid that."""
    with torch.autocast(device.type, enabled=False):
        yield
