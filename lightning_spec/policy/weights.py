"""Where every Hugging Face tensor of the policy stands in Megatron's parameters, in any parallel layout.

Megatron fuses what transformers keeps apart (q, k and v interleave per query group: [q.. k v] for each kv head; gate
and up lie one after the other) and cuts what transformers keeps whole: tensor-parallel ranks hold rows of the fused
projections, columns of the projections back and rows of the vocabulary; pipeline stages hold layers. `placements` says
all of it by one list of row runs a parameter. `chunk_placements` derives it from sizes alone, without a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from lightning_spec.parallel.placement import Placement, Span
from lightning_spec.policy.moe import expert_placements
from lightning_spec.shapes import PolicyShape

if TYPE_CHECKING:
    from lightning_spec.policy.model import PolicyModel

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
Model = nn.Module | Sequence[nn.Module]
"""A policy as its callers hold it: one chunk, several, bare or inside Megatron's data-parallel wrapper."""


# ---- what a rank holds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holding:
    """What one chunk of the model holds on one rank; enough to say where each of its rows belongs."""

    layers: tuple[int, ...]
    """Decoder layers, counted in the whole model."""
    first: bool
    """It holds the embedding."""
    last: bool
    """It holds the final norm and the head."""
    vocab_rows: int
    """Rows of the vocabulary's parameters on this rank, padding included."""
    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1

    @classmethod
    def everything(cls, shape: PolicyShape) -> Holding:
        return cls(tuple(range(shape.num_layers)), True, True, shape.vocab_size)

    @classmethod
    def of(cls, chunk: PolicyModel) -> Holding:
        groups = chunk.pg_collection
        tensor, expert = groups.tp, groups.ep
        return cls(
            layers=tuple(layer.layer_number - 1 for layer in chunk.decoder.layers),
            first=chunk.pre_process,
            last=chunk.post_process,
            vocab_rows=chunk.vocab_size // tensor.size(),
            tensor_rank=tensor.rank(),
            tensor_size=tensor.size(),
            expert_rank=expert.rank(),
            expert_size=expert.size(),
        )

    @property
    def whole(self) -> bool:
        return self.first and self.last and self.tensor_size == self.expert_size == 1

    def vocabulary(self, shape: PolicyShape) -> tuple[int, int]:
        """First and past-the-last token whose row is here; equal where padding leaves this rank none."""
        first = self.tensor_rank * self.vocab_rows
        return min(first, shape.vocab_size), min(first + self.vocab_rows, shape.vocab_size)


def unwrap(model: nn.Module) -> PolicyModel:
    """The PolicyModel inside Megatron's (or torch's) data-parallel wrapper."""
    while not isinstance(model, GPTModel):
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            raise TypeError(f"{type(model).__name__} holds no PolicyModel")
        model = inner
    return cast("PolicyModel", model)


def chunks(model: Model) -> list[PolicyModel]:
    """The model's chunks on this rank in the order of their virtual stages; a list of one without virtual stages."""
    return [chunk for _, chunk in _named_chunks(model)]


def _named_chunks(model: Model) -> list[tuple[str, PolicyModel]]:
    """Chunks, and what their parameters' names begin with inside `model` without its wrapper."""
    bare = model
    while isinstance(bare, nn.Module) and not isinstance(bare, GPTModel | nn.ModuleList):
        bare = getattr(bare, "module", ())
    if isinstance(bare, GPTModel):
        return [("", cast("PolicyModel", bare))]
    if not bare:
        raise TypeError(f"{type(model).__name__} holds no PolicyModel")
    return [(f"{number}.", unwrap(chunk)) for number, chunk in enumerate(bare)]


# ---- placements ------------------------------------------------------------------------------------------------------


def placements(model: Model) -> dict[str, list[Placement]]:
    """Where this rank's parameters stand, by their names inside the bare model, in checkpoint order.

    In a PolicyChunks or a list the names begin with the chunk's number. A tied head on a pipeline stage of its
    own is a copy of the embedding, and has the embedding's place.
    """
    return {
        prefix + name: places
        for prefix, chunk in _named_chunks(model)
        for name, places in chunk_placements(chunk.shape, Holding.of(chunk)).items()
    }


def named_parameters(model: Model) -> dict[str, nn.Parameter]:
    """This rank's parameters under the names that `placements` uses."""
    return {prefix + name: value for prefix, chunk in _named_chunks(model) for name, value in chunk.named_parameters()}


def chunk_placements(shape: PolicyShape, held: Holding) -> dict[str, list[Placement]]:
    """`placements` of one chunk from its description alone."""
    found: dict[str, list[Placement]] = {}
    for name, place in _chunk_placements(shape, held):
        found.setdefault(name, []).append(place)
    return found


def tensor_shapes(shape: PolicyShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the whole model's Hugging Face tensors, in checkpoint order."""
    return {place.name: place.shape for _, place in _chunk_placements(shape, Holding.everything(shape))}


def _chunk_placements(shape: PolicyShape, held: Holding) -> Iterator[tuple[str, Placement]]:
    vocab = (shape.vocab_size, shape.hidden_size)
    start, stop = held.vocabulary(shape)
    rows = (Span(0, stop - start, start),) if stop > start else ()
    if held.first:
        yield "embedding.word_embeddings.weight", Placement(EMBEDDING, vocab, rows)
    for local, layer in enumerate(held.layers):
        yield from _layer_placements(shape, held, layer, f"model.layers.{layer}.", f"decoder.layers.{local}.")
    if held.last:
        yield "decoder.final_layernorm.weight", Placement.whole(NORM, (shape.hidden_size,))
        if not shape.tied_embeddings:
            yield "output_layer.weight", Placement(HEAD, vocab, rows)
        elif not held.first:
            yield "output_layer.weight", Placement(EMBEDDING, vocab, rows)


def _layer_placements(
    shape: PolicyShape, held: Holding, layer: int, hf: str, mg: str
) -> Iterator[tuple[str, Placement]]:
    hidden = shape.hidden_size
    yield f"{mg}input_layernorm.weight", Placement.whole(f"{hf}input_layernorm.weight", (hidden,))
    yield from _attention_placements(shape, held, f"{hf}self_attn.", f"{mg}self_attention.")
    yield f"{mg}pre_mlp_layernorm.weight", Placement.whole(f"{hf}post_attention_layernorm.weight", (hidden,))
    if shape.is_sparse(layer):
        ranks = {"expert_rank": held.expert_rank, "expert_size": held.expert_size}
        yield from expert_placements(shape, hf, mg, **ranks)
    else:
        yield from _mlp_placements(shape, held, f"{hf}mlp.", f"{mg}mlp.")


def _attention_placements(shape: PolicyShape, held: Holding, hf: str, mg: str) -> Iterator[tuple[str, Placement]]:
    heads, kv, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    # With fewer kv heads than ranks the cut goes through a group: its projection's output is gathered first.
    low, high = _share((heads + 2 * kv) * dim, held)
    for kind, tail in (("weight", (shape.hidden_size,)), ("bias", ())):
        if kind == "weight" or shape.attention_bias:
            for name, rows in (("q", heads), ("k", kv), ("v", kv)):
                spans = _cut(_runs_in_groups(shape, name), low, high)
                if spans:
                    yield f"{mg}linear_qkv.{kind}", Placement(f"{hf}{name}_proj.{kind}", (rows * dim, *tail), spans)
    yield f"{mg}linear_proj.weight", _columns(f"{hf}o_proj.weight", shape.hidden_size, heads * dim, held)
    if shape.output_bias:
        yield f"{mg}linear_proj.bias", Placement.whole(f"{hf}o_proj.bias", (shape.hidden_size,))
    if shape.qk_norm:
        for name in ("q", "k"):
            yield f"{mg}{name}_layernorm.weight", Placement.whole(f"{hf}{name}_norm.weight", (dim,))


def _mlp_placements(shape: PolicyShape, held: Holding, hf: str, mg: str) -> Iterator[tuple[str, Placement]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    low, high = _share(inner, held)
    for kind, tail in (("weight", (hidden,)), ("bias", ())):
        if kind == "weight" or shape.mlp_bias:
            # Every rank's parameter is [its gate; its up]: the activation multiplies its own two halves.
            for half, name in enumerate(("gate", "up")):
                span = Span(half * (high - low), high - low, low)
                yield f"{mg}linear_fc1.{kind}", Placement(f"{hf}{name}_proj.{kind}", (inner, *tail), (span,))
    yield f"{mg}linear_fc2.weight", _columns(f"{hf}down_proj.weight", hidden, inner, held)
    if shape.mlp_bias:
        yield f"{mg}linear_fc2.bias", Placement.whole(f"{hf}down_proj.bias", (hidden,))


def _runs_in_groups(shape: PolicyShape, name: str) -> Iterator[Span]:
    """Rows of q, k or v in the whole fused projection."""
    dim, group = shape.head_dim, shape.num_heads // shape.num_kv_heads
    first, count = {"q": (0, group), "k": (group, 1), "v": (group + 1, 1)}[name]
    for number in range(shape.num_kv_heads):
        start = (number * (group + 2) + first) * dim
        yield Span(start, count * dim, number * count * dim)


def _cut(runs: Iterable[Span], low: int, high: int) -> tuple[Span, ...]:
    """The part of `runs` in rows [low, high) of a parameter, for the rank that holds just these rows."""
    found = []
    for run in runs:
        start, stop = max(run.start, low), min(run.start + run.count, high)
        if start < stop:
            found.append(Span(start - low, stop - start, run.to + start - run.start))
    return tuple(found)


def _share(size: int, held: Holding) -> tuple[int, int]:
    part = size // held.tensor_size
    return held.tensor_rank * part, (held.tensor_rank + 1) * part


def _columns(name: str, rows: int, columns: int, held: Holding) -> Placement:
    return Placement(name, (rows, columns), (Span(0, rows, 0),), _share(columns, held)[0])


# ---- tensors ---------------------------------------------------------------------------------------------------------


def local_tensors(model: Model) -> Iterator[tuple[Placement, Tensor]]:
    """This rank's part of every tensor: where it stands, and the detached parameter that holds it."""
    parameters = named_parameters(model)
    for name, places in placements(model).items():
        for place in places:
            yield place, parameters[name].detach()


def local_gradients(model: Model) -> Iterator[tuple[Placement, Tensor]]:
    """As local_tensors, for `.grad` (or Megatron's `.main_grad`); a parameter without a gradient is left out."""
    parameters = named_parameters(model)
    for name, places in placements(model).items():
        parameter = parameters[name]
        gradient = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
        if gradient is not None:
            for place in places:
                yield place, gradient.detach()


def hf_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face's (name, tensor) pairs of a rank that holds the whole model, detached and contiguous.

    A tensor may share memory with the model: use or copy it before the next optimiser step.

    Raises:
        RuntimeError: this rank holds a part of the model only.
    """
    _check_whole(model)
    for place, parameter in local_tensors(model):
        yield place.name, _whole(place, parameter)


def hf_gradients(model: Model) -> Iterator[tuple[str, Tensor]]:
    """As hf_tensors, for the gradients."""
    _check_whole(model)
    for place, gradient in local_gradients(model):
        yield place.name, _whole(place, gradient)


def extent(place: Placement, parameter: Tensor) -> tuple[slice, ...]:
    """The smallest rectangle of the named tensor that holds everything of it which stands in `parameter`."""
    rows = slice(min(span.to for span in place.spans), max(span.to + span.count for span in place.spans))
    if len(place.shape) == 1:
        return (rows,)
    return rows, slice(place.column, place.column + parameter.shape[1])


@torch.no_grad()
def fill(place: Placement, parameter: Tensor, tensor: Tensor, origin: Sequence[int] = (0, 0)) -> None:
    """Copy into `parameter` what is its own of the named tensor, converting dtype and device.

    Args:
        tensor: the named tensor, or a rectangle of it that begins at `origin`.
    """
    for piece in place.pieces(parameter):
        sizes = zip(piece.offset, origin, piece.tensor.shape, strict=False)
        piece.tensor.copy_(tensor[tuple(slice(to - first, to - first + size) for to, first, size in sizes)])


def clear_padding(chunk: PolicyModel) -> None:
    """Zero the rows that pad the vocabulary."""
    start, stop = Holding.of(chunk).vocabulary(chunk.shape)
    for name, parameter in chunk.named_parameters():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            parameter.detach()[stop - start :].zero_()


def _check_whole(model: Model) -> None:
    parts = chunks(model)
    if len(parts) > 1 or not Holding.of(parts[0]).whole:
        raise RuntimeError(
            "this rank holds a part of the policy only; whole tensors come from lightning_spec.parallel.assemble, "
            "which puts the ranks' local_tensors together"
        )


def _whole(place: Placement, parameter: Tensor) -> Tensor:
    pieces = sorted(place.pieces(parameter), key=lambda piece: piece.offset)
    return (pieces[0].tensor if len(pieces) == 1 else torch.cat([piece.tensor for piece in pieces])).contiguous()
