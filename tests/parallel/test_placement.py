"""Placements against plain indexing: random cuts of tensors into fused, split and sharded parameters."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_spec.parallel.placement import Placement, Span
from lightning_spec.parallel.sharded import Piece

SLOW = settings(max_examples=60, deadline=None)


def rectangle(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(piece.offset, piece.tensor.shape, strict=True))


def paint(pieces: list[Piece], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The whole tensor that the pieces make, and how often each element was written."""
    whole, times = torch.full(shape, -1.0), torch.zeros(shape)
    for piece in pieces:
        assert piece.shape == shape
        whole[rectangle(piece)] = piece.tensor
        times[rectangle(piece)] += 1
    return whole, times


@dataclass
class Fused:
    """Two tensors of `rows` rows, cut into runs that alternate in one parameter, which ranks split by rows or columns,
    after `padding` rows that belong to no tensor."""

    tensors: dict[str, Tensor]
    parameters: list[Tensor]
    placements: list[list[Placement]]
    """Of each rank."""


def runs(total: int, cuts: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(sorted({0, total, *(cut % (total + 1) for cut in cuts)})))


@st.composite
def fused(draw: st.DrawFn, one_axis: bool = False) -> Fused:
    width = 1 if one_axis else draw(st.integers(1, 5))
    sizes = {"a": draw(st.integers(1, 9)), "b": draw(st.integers(1, 9))}
    tail = () if one_axis else (width,)
    first = torch.arange(float((sizes["a"] + sizes["b"]) * width))
    tensors = {
        "a": first[: sizes["a"] * width].view(sizes["a"], *tail),
        "b": first[sizes["a"] * width :].view(sizes["b"], *tail),
    }
    pieces = [(name, low, high) for name in "ab" for low, high in runs(sizes[name], draw(st.lists(st.integers(0, 9))))]
    pieces = draw(st.permutations(pieces))
    padding = draw(st.integers(0, 3))
    rows = [tensors[name][low:high] for name, low, high in pieces] + [torch.full((padding, *tail), -5.0)]
    parameter, spans, at = torch.cat(rows), [], 0
    for name, low, high in pieces:
        spans.append((name, Span(at, high - low, low)))
        at += high - low
    if one_axis or draw(st.booleans()):
        return by_rows(tensors, parameter, spans, draw(st.lists(st.integers(0, 20), max_size=3)))
    return by_columns(tensors, parameter, spans, draw(st.lists(st.integers(0, 5), max_size=2)))


def by_rows(tensors: dict[str, Tensor], whole: Tensor, spans: list[tuple[str, Span]], cuts: list[int]) -> Fused:
    parameters, placements = [], []
    for low, high in runs(len(whole), cuts):
        mine: dict[str, list[Span]] = {"a": [], "b": []}
        for name, span in spans:
            start, stop = max(low, span.start), min(high, span.start + span.count)
            if start < stop:
                mine[name].append(Span(start - low, stop - start, span.to + start - span.start))
        parameters.append(whole[low:high].clone())
        placements.append([Placement(n, tuple(tensors[n].shape), tuple(mine[n])) for n in mine if mine[n]])
    return Fused(tensors, parameters, placements)


def by_columns(tensors: dict[str, Tensor], whole: Tensor, spans: list[tuple[str, Span]], cuts: list[int]) -> Fused:
    parameters, placements = [], []
    for low, high in runs(whole.shape[1], cuts):
        parameters.append(whole[:, low:high].contiguous())
        placements.append(
            [
                Placement(name, tuple(tensors[name].shape), tuple(s for n, s in spans if n == name), column=low)
                for name in tensors
            ]
        )
    return Fused(tensors, parameters, placements)


@SLOW
@given(st.booleans().flatmap(lambda one_axis: fused(one_axis=one_axis)))
def test_the_pieces_of_all_ranks_are_the_tensors_each_element_once(case: Fused) -> None:
    for name, tensor in case.tensors.items():
        held = [
            piece
            for parameter, places in zip(case.parameters, case.placements, strict=True)
            for place in places
            if place.name == name
            for piece in place.pieces(parameter)
        ]
        whole, times = paint(held, tuple(tensor.shape))
        assert torch.equal(whole, tensor)
        assert (times == 1).all()


@SLOW
@given(st.booleans().flatmap(lambda one_axis: fused(one_axis=one_axis)), st.lists(st.integers(0, 60), max_size=6))
def test_ranges_of_the_flattened_parameter_hold_what_its_pieces_hold(case: Fused, cuts: list[int]) -> None:
    for parameter, places in zip(case.parameters, case.placements, strict=True):
        flat = parameter.view(-1)
        for place in places:
            wanted = paint(list(place.pieces(parameter)), place.shape)
            held = [
                piece
                for low, high in runs(flat.numel(), cuts)
                for piece in place.pieces_of_range(flat[low:high], low, tuple(parameter.shape))
            ]
            whole, times = paint(held, place.shape)
            assert torch.equal(whole, wanted[0])
            assert torch.equal(times, wanted[1])


@SLOW
@given(fused(), st.lists(st.integers(0, 60), max_size=4))
def test_a_range_is_at_most_three_rectangles_a_run(case: Fused, cuts: list[int]) -> None:
    """Few pieces keep a checkpoint's index small."""
    for parameter, places in zip(case.parameters, case.placements, strict=True):
        for low, high in runs(parameter.numel(), cuts):
            part = parameter.view(-1)[low:high]
            for place in places:
                assert len(list(place.pieces_of_range(part, low, tuple(parameter.shape)))) <= 3 * len(place.spans)


@SLOW
@given(fused(), st.integers(0, 60), st.integers(0, 60))
def test_what_is_written_into_a_piece_is_written_into_the_parameter(case: Fused, low: int, high: int) -> None:
    for parameter, places in zip(case.parameters, case.placements, strict=True):
        by_piece, by_range = parameter.clone(), parameter.clone()
        flat = by_range.view(-1)[min(low, high) : max(low, high)]
        for place in places:
            for piece in place.pieces(by_piece):
                piece.tensor.fill_(7.0)
            for piece in place.pieces_of_range(flat, min(low, high), tuple(parameter.shape)):
                piece.tensor.fill_(7.0)
        padding = parameter == -5.0
        assert torch.equal(by_piece, torch.where(padding, -5.0, 7.0))
        inside = torch.zeros(parameter.numel(), dtype=torch.bool)
        inside[min(low, high) : max(low, high)] = True
        assert torch.equal(by_range, torch.where(inside.view_as(parameter) & ~padding, 7.0, parameter))


@pytest.mark.parametrize("shape", [(), (4,), (3, 2), (2, 3, 2), (1, 1, 1, 1)])
def test_a_whole_parameter_of_any_number_of_axes_is_one_piece(shape: tuple[int, ...]) -> None:
    parameter = torch.randn(shape)
    place = Placement.whole("x", shape)
    (piece,) = place.pieces(parameter)
    (ranged,) = place.pieces_of_range(parameter.reshape(-1), 0, shape)
    assert piece.offset == ranged.offset == (0,) * len(piece.shape)
    assert tuple(piece.tensor.shape) == tuple(ranged.tensor.shape) == piece.shape == ranged.shape == place.shape
    assert torch.equal(piece.tensor.reshape(-1), parameter.reshape(-1))
    assert torch.equal(ranged.tensor.reshape(-1), parameter.reshape(-1))


def test_nothing_held_of_a_scalar_is_no_piece() -> None:
    assert list(Placement.whole("x", ()).pieces_of_range(torch.zeros(0), 0, ())) == []
