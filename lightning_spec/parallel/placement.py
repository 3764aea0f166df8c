"""Where what a rank holds of a parameter stands in a named tensor of the whole model.

Megatron fuses and splits: q, k and v interleave per query group, gate and up lie one after the other, tensor-parallel
ranks hold rows or columns, pipeline stages hold layers, expert ranks hold experts. In every case a rank's parameter is
made of runs of rows, and each run stands somewhere in one named tensor. So one description serves loading, export,
refit, checkpoints and optimiser states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from lightning_spec.parallel.sharded import Piece


@dataclass(frozen=True, slots=True)
class Span:
    """`count` rows that start at row `start` of the rank's parameter and at row `to` of the named tensor."""

    start: int
    count: int
    to: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The rows of one parameter of this rank that belong to the named tensor. Rows are of axis 0.

    Where axis 1 is split (row-parallel projections), the parameter holds the columns that start at `column`.
    """

    name: str
    """Of the tensor: Hugging Face's, for a policy."""
    shape: tuple[int, ...]
    """Of the whole tensor, at most two axes."""
    spans: tuple[Span, ...]
    column: int = 0

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> Placement:
        """The parameter is the tensor. Axes after the first are described as one."""
        shape = tuple(shape) if len(shape) <= 2 else (shape[0], prod(shape[1:]))
        return cls(name, shape, (Span(0, shape[0] if shape else 1, 0),))

    def pieces(self, parameter: Tensor) -> Iterator[Piece]:
        """The rank's part as rectangles of the named tensor.

        Args:
            parameter: the rank's parameter, contiguous, or anything of its shape: its gradient, an optimiser state.

        Returns:
            Views of `parameter`: what is written into them is written into it.
        """
        parameter = parameter.detach()
        if not self.shape:
            yield Piece(parameter, (), ())
            return
        if len(self.shape) == 2:
            parameter = parameter.view(parameter.shape[0], -1)
        for span in self.spans:
            rows = parameter.narrow(0, span.start, span.count)
            yield Piece(rows, (span.to, self.column)[: len(self.shape)], self.shape)

    def pieces_of_range(self, flat: Tensor, first: int, shape: tuple[int, ...]) -> Iterator[Piece]:
        """The same for a rank that holds only a range of the flattened parameter (Megatron's distributed optimiser).

        A run of rows that begins or ends inside a row is up to three rectangles: the row's end, whole rows, the row's
        beginning.

        Args:
            flat: [n], elements first .. first + n of the flattened parameter.
            first: where the range begins.
            shape: of the rank's parameter.

        Returns:
            Views of `flat`.
        """
        flat = flat.detach().view(-1)
        if not self.shape:
            if flat.numel():
                yield Piece(flat.view(()), (), ())
            return
        width = prod(shape[1:])
        for span in self.spans:
            low, high = span.start * width, (span.start + span.count) * width
            low, high = max(first, low), min(first + flat.numel(), high)
            while low < high:
                row, column = divmod(low, width)
                whole_rows = 0 if column else (high - low) // width
                end = low + whole_rows * width if whole_rows else min(high, (row + 1) * width)
                part = flat[low - first : end - first]
                to = span.to + row - span.start
                if len(self.shape) == 2:
                    yield Piece(part.view(max(whole_rows, 1), -1), (to, self.column + column), self.shape)
                else:
                    yield Piece(part, (to,), self.shape)
                low = end
