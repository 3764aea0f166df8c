from __future__ import annotations

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
    save_pieces(folder, {name: Piece.whole(tensor) for name, tensor in tensors.items()})
    return folder, tensors


def test_whole_tensors_come_back_bit_for_bit_in_place(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, tensors = saved
    live = {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}
    load_pieces(folder, {name: Piece.whole(tensor) for name, tensor in live.items()})
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
    pieces = {"matrix": Piece(part, (row, column), (5, 7)), "flat": Piece(flat, (start,), (11,))}
    load_pieces(folder, pieces, partial=True)
    assert torch.equal(part, tensors["matrix"][row : row + rows, column : column + columns])
    assert torch.equal(flat, tensors["flat"][start : start + count])


def test_a_slice_of_a_larger_live_tensor_is_filled_in_place(saved: tuple[Path, dict[str, Tensor]]) -> None:
    buffer = torch.zeros(20)
    load_pieces(saved[0], {"flat": Piece(buffer[4:15], (0,), (11,))}, partial=True)
    assert torch.equal(buffer[4:15], torch.arange(11.0))
    assert buffer[:4].abs().sum() + buffer[15:].abs().sum() == 0


def test_pieces_that_leave_a_hole_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the ranks hold 3 of 5 elements"):
        save_pieces(tmp_path / "t", {"x": Piece(torch.zeros(3), (0,), (5,))})


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ({"flat": Piece.whole(torch.zeros(12))}, r"flat: saved \(11,\), needed \(12,\)"),
        ({"other": Piece.whole(torch.zeros(1))}, r"missing other"),
        ({"flat": Piece.whole(torch.zeros(11))}, r"surplus"),
    ],
)
def test_other_names_and_shapes_are_refused(
    pieces: dict[str, Piece], message: str, saved: tuple[Path, dict[str, Tensor]]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_pieces(saved[0], pieces)
