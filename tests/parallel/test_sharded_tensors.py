from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_spec.errors import CheckpointError
from lightning_spec.parallel.sharded import Piece, load_pieces, save_pieces


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    tensors = {
        "matrix": torch.arange(35, dtype=torch.float64).view(5, 7),
        "flat": torch.arange(11, dtype=torch.float32),
        "half": torch.arange(6, dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0),
    }
    folder = tmp_path_factory.mktemp("tensors") / "t"
    save_pieces(folder, [(name, Piece.whole(tensor)) for name, tensor in tensors.items()])
    return folder, tensors


def test_whole_tensors_come_back_bit_for_bit_in_place(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, tensors = saved
    live = {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}
    load_pieces(folder, [(name, Piece.whole(tensor)) for name, tensor in live.items()])
    for name, tensor in tensors.items():
        assert torch.equal(live[name], tensor)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 4), st.integers(1, 5), st.integers(0, 6), st.integers(1, 7), st.integers(0, 10), st.integers(1, 11)
)
def test_any_rectangle_is_read_from_whole_tensors(
    saved: tuple[Path, dict[str, Tensor]], row: int, rows: int, column: int, columns: int, start: int, count: int
) -> None:
    folder, tensors = saved
    rows, columns, count = min(rows, 5 - row), min(columns, 7 - column), min(count, 11 - start)
    part = torch.zeros(rows, columns, dtype=torch.float64)
    flat = torch.zeros(count)
    pieces = [("matrix", Piece(part, (row, column), (5, 7))), ("flat", Piece(flat, (start,), (11,)))]
    load_pieces(folder, pieces, partial=True)
    assert torch.equal(part, tensors["matrix"][row : row + rows, column : column + columns])
    assert torch.equal(flat, tensors["flat"][start : start + count])


def test_a_slice_of_a_larger_live_tensor_is_filled_in_place(saved: tuple[Path, dict[str, Tensor]]) -> None:
    buffer = torch.zeros(20)
    load_pieces(saved[0], [("flat", Piece(buffer[4:15], (0,), (11,)))], partial=True)
    assert torch.equal(buffer[4:15], torch.arange(11.0))
    assert buffer[:4].abs().sum() + buffer[15:].abs().sum() == 0


def test_pieces_that_leave_a_hole_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the ranks hold 3 of 5 elements"):
        save_pieces(tmp_path / "t", [("x", Piece(torch.zeros(3), (0,), (5,)))])


def rectangles(tensor: Tensor, rows: list[int], columns: list[int]) -> list[Piece]:
    """The tensor cut at these rows and columns."""
    height, width = tensor.shape
    return [
        Piece(tensor[top:bottom, left:right], (top, left), (height, width))
        for top, bottom in pairwise([0, *rows, height])
        for left, right in pairwise([0, *columns, width])
    ]


def test_pieces_of_one_tensor_are_read_by_other_pieces(tmp_path: Path) -> None:
    matrix = torch.randn(6, 8)
    save_pieces(tmp_path / "t", [("x", piece) for piece in rectangles(matrix, [1, 4], [3])])
    live = torch.zeros(6, 8)
    load_pieces(tmp_path / "t", [("x", piece) for piece in rectangles(live, [2, 3, 5], [1, 7])])
    assert torch.equal(live, matrix)


def test_a_piece_held_twice_is_written_once_and_filled_twice(tmp_path: Path) -> None:
    matrix = torch.randn(300, 100)
    save_pieces(tmp_path / "t", [("x", Piece.whole(matrix)), ("x", Piece.whole(matrix.clone()))])
    assert sum(path.stat().st_size for path in (tmp_path / "t").glob("*.distcp")) < 1.2 * matrix.numel() * 4
    live = [torch.zeros(300, 100), torch.zeros(300, 100)]
    load_pieces(tmp_path / "t", [("x", Piece.whole(tensor)) for tensor in live])
    assert all(torch.equal(tensor, matrix) for tensor in live)


def test_only_a_view_s_own_bytes_are_written(tmp_path: Path) -> None:
    matrix = torch.randn(300, 100)
    save_pieces(tmp_path / "t", [("x", Piece(matrix[:3], (0, 0), (3, 100)))])
    assert sum(path.stat().st_size for path in (tmp_path / "t").glob("*.distcp")) < 10_000


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Piece(torch.zeros(3, 2), (0, 0), (4, 2)), r"pieces of \(4, 2\) and of \(3, 2\) overlap at \(0, 0\)"),
        (Piece(torch.zeros(3, 2), (1, 0), (4, 2)), "overlapping chunks"),
        (Piece(torch.zeros(1, 2), (4, 0), (5, 2)), r"\(4, 2\), torch.float32\) on one rank, \(\(5, 2\)"),
        (Piece(torch.zeros(4, 2).double(), (0, 0), (4, 2)), "torch.float64"),
        (Piece(torch.zeros(1, 2), (4, 0), (4, 2)), "out of bounds"),
    ],
)
def test_cuts_that_contradict_each_other_are_not_saved(other: Piece, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_pieces(tmp_path / "t", [("x", Piece.whole(torch.zeros(4, 2))), ("x", other)])


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([("flat", Piece.whole(torch.zeros(12)))], r"flat: saved \(11,\), needed \(12,\)"),
        ([("other", Piece.whole(torch.zeros(1)))], r"missing other"),
        ([("flat", Piece.whole(torch.zeros(11)))], r"surplus"),
    ],
)
def test_other_names_and_shapes_are_refused(
    pieces: list[tuple[str, Piece]], message: str, saved: tuple[Path, dict[str, Tensor]]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_pieces(saved[0], pieces)
