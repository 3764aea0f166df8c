"""The ranks' placements together hold every element of every tensor, once a replica, whatever the shape and layout."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spec.parallel.groups import ParallelSizes
from lightning_spec.parallel.placement import Placement
from lightning_spec.policy import check_layout, new_policy_config, stage_layers, tensor_shapes
from lightning_spec.policy.weights import EMBEDDING, Holding, chunk_placements, extent, fill
from lightning_spec.shapes import PolicyShape

FAMILIES: tuple[dict[str, Any], ...] = (
    {"model_type": "llama"},
    {"model_type": "llama", "mlp_bias": True, "attention_bias": True},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "attention_bias": True},
    {"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [0]},
)


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[PolicyShape, ParallelSizes, tuple[int, ...]]:
    """A policy and a layout that it can have."""
    tensor, pipeline = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    virtual = draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    layers = tuple(draw(st.integers(0, 2)) for _ in range(pipeline * virtual))
    kv = draw(st.sampled_from([1, 2, 4]))
    family = dict(draw(st.sampled_from(FAMILIES)))
    biases = {name: family.pop(name) for name in ("mlp_bias", "attention_bias") if name in family}
    raw = new_policy_config(
        **family,
        vocab_size=draw(st.integers(5, 23)),
        hidden_size=6,
        num_layers=max(1, sum(layers)),
        num_heads=kv * draw(st.sampled_from([1, 3])) * tensor,
        num_kv_heads=kv,
        head_dim=draw(st.sampled_from([2, 6])),
        intermediate_size=4 * draw(st.integers(1, 3)),
        tied_embeddings=draw(st.booleans()),
    )
    layers = layers if sum(layers) else (1, *layers[1:])
    shape = PolicyShape.from_hf({**raw, **biases})
    expert = draw(st.sampled_from([1, 2, 4])) if shape.experts is not None else 1
    return shape, ParallelSizes(tensor, pipeline, virtual, 1, expert), layers


def holdings(shape: PolicyShape, sizes: ParallelSizes, layers: tuple[int, ...]) -> list[tuple[Holding, bool]]:
    """Of every chunk on every rank; whether it is the one whose replicated parameters count."""
    rows = -(-shape.vocab_size // sizes.tensor_parallel)
    found, first = [], 0
    for stage, count in enumerate(layers):
        numbers = tuple(range(first, first + count))
        first += count
        ends = (stage == 0, stage == len(layers) - 1)
        for tensor in range(sizes.tensor_parallel):
            for expert in range(sizes.expert_parallel):
                ranks = (tensor, sizes.tensor_parallel, expert, sizes.expert_parallel)
                found.append((Holding(numbers, *ends, rows, *ranks), tensor == 0))
    return found


def local_shape(shape: PolicyShape, held: Holding, name: str, places: list[Placement]) -> tuple[int, ...]:
    """The parameter's shape as Megatron makes it, from the sizes alone."""
    hidden, ways = shape.hidden_size, held.tensor_size
    if "word_embeddings" in name or "output_layer" in name:
        return held.vocab_rows, hidden
    if "linear_qkv" in name:
        rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim // ways
    elif "experts" in name:
        assert shape.experts is not None
        inner = shape.experts.intermediate_size
        return (2 * inner, hidden) if "fc1" in name else (hidden, inner)
    elif "linear_fc1" in name:
        rows = 2 * shape.intermediate_size // ways
    elif name.endswith("linear_proj.weight"):
        return hidden, shape.num_heads * shape.head_dim // ways
    elif name.endswith("linear_fc2.weight"):
        return hidden, shape.intermediate_size // ways
    else:
        return places[0].shape
    return (rows, hidden) if name.endswith("weight") else (rows,)


def is_split(name: str, held: Holding) -> bool:
    """Whether the tensor-parallel ranks hold different parts of it. A mixture's experts are whole on each."""
    whole = ("norm", "proj.bias", "fc2.bias", "router", "experts")
    return held.tensor_size > 1 and not any(part in name for part in whole)


@settings(max_examples=30, deadline=None)
@given(laid_out())
def test_every_element_of_every_tensor_is_held_exactly_once_a_replica(
    case: tuple[PolicyShape, ParallelSizes, tuple[int, ...]],
) -> None:
    shape, sizes, layers = case
    check_layout(shape, sizes, sequence_parallel=sizes.tensor_parallel > 1, layout=layers)
    assert stage_layers(shape.num_layers, sizes, layers) == layers
    counts = {name: torch.zeros(size) for name, size in tensor_shapes(shape).items()}
    for held, counted in holdings(shape, sizes, layers):
        for name, places in chunk_placements(shape, held).items():
            local = torch.zeros(local_shape(shape, held, name, places))
            copy = name == "output_layer.weight" and shape.tied_embeddings
            for place in places:
                for piece in place.pieces(local):
                    piece.tensor.add_(1)
                    there = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True))
                    assert counts[place.name][there].shape == piece.tensor.shape
                    once_a_stage = is_split(name, held) or counted
                    experts_apart = "local_experts" in name or held.expert_rank == 0
                    if once_a_stage and experts_apart and not copy:
                        counts[place.name][there] += 1
                if copy:
                    assert place.name == EMBEDDING
            # Every row of the parameter belongs to one tensor; only the vocabulary has rows that belong to none.
            vocabulary = name.startswith(("embedding", "output"))
            covered = sum(span.count for span in places[0].spans) if vocabulary else local.shape[0]
            assert bool((local[:covered] == 1).all())
            assert not local[covered:].any()
    assert all(bool((count == 1).all()) for count in counts.values())


@settings(max_examples=30, deadline=None)
@given(laid_out())
def test_ranks_that_fill_their_parts_from_rectangles_hold_the_whole_tensors(
    case: tuple[PolicyShape, ParallelSizes, tuple[int, ...]],
) -> None:
    shape, sizes, layers = case
    whole = {name: torch.randn(size) for name, size in tensor_shapes(shape).items()}
    again = {name: torch.full(size, torch.nan) for name, size in tensor_shapes(shape).items()}
    for held, _ in holdings(shape, sizes, layers):
        for name, places in chunk_placements(shape, held).items():
            local = torch.full(local_shape(shape, held, name, places), torch.nan)
            for place in places:
                if place.spans:
                    rectangle = extent(place, local)
                    origin = [axis.start for axis in rectangle]
                    fill(place, local, whole[place.name][rectangle], origin)
                for piece in place.pieces(local):
                    there = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True))
                    again[place.name][there] = piece.tensor
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_rows_come_in_the_order_in_which_megatron_fuses_them() -> None:
    """Two kv heads over four ranks: each rank has half a group [q q q k v], and rank 1 neither q0 nor k1."""
    raw = new_policy_config(vocab_size=8, hidden_size=4, num_layers=1, num_heads=8, num_kv_heads=2, head_dim=2)
    shape = PolicyShape.from_hf(raw)
    fused = torch.cat([torch.arange(8), 100 + torch.arange(2), 200 + torch.arange(2)])
    fused = torch.cat([fused, fused + torch.cat([torch.full((8,), 8), torch.full((4,), 2)])])  # the second group
    found = []
    for rank in range(4):
        held = Holding((0,), True, True, 2, rank, 4)
        local = torch.full((6, 4), -1)
        for place in chunk_placements(shape, held)["decoder.layers.0.self_attention.linear_qkv.weight"]:
            base = {"q": 0, "k": 100, "v": 200}[place.name.split(".")[4][0]]
            values = (base + torch.arange(place.shape[0])).unsqueeze(1).expand(place.shape)
            fill(place, local, values)
        found.append(local[:, 0])
    assert torch.equal(torch.cat(found), fused)


def test_neighbouring_runs_of_a_tensor_never_overlap() -> None:
    shape = PolicyShape.from_hf(
        new_policy_config(vocab_size=8, hidden_size=4, num_layers=1, num_heads=4, num_kv_heads=2)
    )
    held = Holding((0,), True, True, 8)
    counted = Counter(place.name for places in chunk_placements(shape, held).values() for place in places)
    assert set(counted.values()) == {1}
    for places in chunk_placements(shape, held).values():
        spans = sorted(span.start for place in places for span in place.spans)
        assert all(low < high for low, high in pairwise(spans))


def test_a_vocabulary_rank_may_hold_padding_alone() -> None:
    shape = PolicyShape.from_hf(new_policy_config(vocab_size=5, hidden_size=4, num_layers=1, num_heads=4))
    spans = [
        chunk_placements(shape, Holding((0,), True, True, 2, rank, 4))["embedding.word_embeddings.weight"][0].spans
        for rank in range(4)
    ]
    assert [[(s.start, s.count, s.to) for s in one] for one in spans] == [[(0, 2, 0)], [(0, 2, 2)], [(0, 1, 4)], []]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family["model_type"])
def test_the_whole_models_names_are_in_checkpoint_order(family: dict[str, Any]) -> None:
    raw = new_policy_config(
        **{key: value for key, value in family.items() if not key.endswith("_bias")},
        vocab_size=8,
        hidden_size=8,
        num_layers=3,
        num_heads=2,
        tied_embeddings=False,
    )
    names = list(tensor_shapes(PolicyShape.from_hf(raw)))
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    layers = [int(name.split(".")[2]) for name in names[1:-2]]
    assert layers == sorted(layers)
