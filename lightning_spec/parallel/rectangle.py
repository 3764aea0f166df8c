"""Rectangles of a matrix: which of those that ranks hold make up the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from lightning_spec.parallel.placement import Placement


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows [row, row + rows) and columns [column, column + columns) of a matrix."""

    row: int
    column: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def of(self, matrix: Tensor) -> Tensor:
        """The view of a matrix [R, W] that the rectangle is."""
        return matrix[self.row : self.row + self.rows, self.column : self.column + self.columns]

    def meets(self, other: Rectangle) -> bool:
        """Whether they share an element."""
        return (
            max(self.row, other.row) < min(self.row + self.rows, other.row + other.rows)
            and max(self.column, other.column) < min(self.column + self.columns, other.column + other.columns)
        )  # fmt: skip

    def without(self, other: Rectangle) -> list[Rectangle]:
        """What of this one is outside the other, as rectangles that do not overlap."""
        if not self.meets(other):
            return [self]
        top, bottom = max(self.row, other.row), min(self.row + self.rows, other.row + other.rows)
        left, right = max(self.column, other.column), min(self.column + self.columns, other.column + other.columns)
        parts = [
            Rectangle(self.row, self.column, top - self.row, self.columns),
            Rectangle(bottom, self.column, self.row + self.rows - bottom, self.columns),
            Rectangle(top, self.column, bottom - top, left - self.column),
            Rectangle(top, right, bottom - top, self.column + self.columns - right),
        ]
        return [part for part in parts if part.elements]


@dataclass(frozen=True, slots=True)
class Strip:
    """One rectangle of a named tensor and the runs of a parameter's rows that it is made of."""

    rectangle: Rectangle
    runs: tuple[tuple[int, int, int], ...]
    """(first row in the parameter, number of rows, first row inside the rectangle)."""


def strips(placement: Placement, shape: Sequence[int]) -> list[Strip]:
    """A placement as few rectangles: runs that are neighbours in the tensor are one, wherever the parameter has them.

    Args:
        shape: of the rank's parameter.
    """
    width = prod(shape[1:])
    found: list[tuple[int, list[tuple[int, int, int]]]] = []
    end = -1
    for span in sorted((span for span in placement.spans if span.count), key=lambda span: span.to):
        if span.to != end:
            found.append((span.to, []))
        first, runs = found[-1]
        if runs and sum(runs[-1][:2]) == span.start:
            start, count, to = runs.pop()
            runs.append((start, count + span.count, to))
        else:
            runs.append((span.start, span.count, span.to - first))
        end = span.to + span.count
    return [
        Strip(Rectangle(first, placement.column, sum(count for _, count, _ in runs), width), tuple(runs))
        for first, runs in found
    ]


def cover(rectangles: Sequence[Rectangle], rows: int, columns: int) -> tuple[list[int], list[Rectangle]]:
    """Which rectangles, taken in order, make up the matrix [rows, columns]; those that add nothing are left out.

    Returns:
        (numbers of those taken, what none of them covers).
    """
    whole = Rectangle(0, 0, rows, columns)
    holes = [whole] if whole.elements else []
    taken: list[int] = []
    for number, rectangle in enumerate(rectangles):
        if not holes:
            break
        if any(rectangle.meets(hole) for hole in holes):
            taken.append(number)
            holes = [part for hole in holes for part in hole.without(rectangle)]
    return taken, holes
