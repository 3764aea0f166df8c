"""The map between Hugging Face's tensors and Megatron's parameters, in both directions.

Megatron fuses what transformers keeps apart: q, k and v interleave per query group ([q.. k v] for each kv head), gate
and up lie one after the other. Every Hugging Face tensor is a *region* of one parameter, given as a view, so the same
map copies in (`region.copy_(tensor)`), copies out (`region.reshape(shape)`) and carries gradients across.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from lightning_spec.errors import ConfigError
from lightning_spec.shapes import PolicyShape

if TYPE_CHECKING:
    from lightning_spec.policy.model import PolicyModel

Region = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """One Hugging Face tensor and the region of the Megatron parameter that holds it."""

    hf_name: str
    parameter: str
    """Name inside this rank's PolicyModel."""
    shape: tuple[int, ...]
    """Of the Hugging Face tensor."""
    region: Region
    """View of the parameter (or of its gradient) that holds the tensor, same element order as the tensor."""

    def read(self, parameter: Tensor) -> Tensor:
        """The tensor in Hugging Face's shape; it may share memory with `parameter`."""
        return self.region(parameter).reshape(self.shape)

    def write(self, parameter: Tensor, tensor: Tensor) -> None:
        """Copy a tensor of Hugging Face's shape into `parameter`, converting dtype and device."""
        region = self.region(parameter)
        region.copy_(tensor.reshape(region.shape))


def unwrap(model: nn.Module) -> PolicyModel:
    """The PolicyModel inside Megatron's (or torch's) data-parallel wrapper."""
    while not isinstance(model, GPTModel):
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            raise TypeError(f"{type(model).__name__} holds no PolicyModel")
        model = inner
    return cast("PolicyModel", model)


def pieces(model: PolicyModel) -> Iterator[Piece]:
    """Every tensor of this rank's part, in checkpoint order; the members of a fused parameter are neighbours.

    A tied head has no piece of its own: it *is* the embedding.
    """
    if model.config.tensor_model_parallel_size > 1:
        raise ConfigError(
            "weights of a tensor-parallel policy cannot be mapped yet",
            found=model.config.tensor_model_parallel_size,
            needed=1,
            key="strategy.tensor_parallel",
        )
    shape = model.shape
    vocab = (shape.vocab_size, shape.hidden_size)
    if model.pre_process:
        yield Piece("model.embed_tokens.weight", "embedding.word_embeddings.weight", vocab, _rows(0, vocab[0]))
    for local, layer in enumerate(model.decoder.layers):
        yield from _layer_pieces(shape, f"model.layers.{layer.layer_number - 1}.", f"decoder.layers.{local}.")
    if model.post_process:
        yield Piece("model.norm.weight", "decoder.final_layernorm.weight", (shape.hidden_size,), _whole)
        if not shape.tied_embeddings:
            yield Piece("lm_head.weight", "output_layer.weight", vocab, _rows(0, vocab[0]))


def hf_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face's (name, tensor) pairs, one at a time, detached and contiguous.

    A tensor may share memory with the model: use or copy it before the next optimiser step.
    """
    policy = unwrap(model)
    parameters = dict(policy.named_parameters())
    for piece in pieces(policy):
        yield piece.hf_name, piece.read(parameters[piece.parameter].detach()).contiguous()


def hf_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As hf_tensors, for `.grad` (or Megatron's `.main_grad`); a parameter without a gradient is left out."""
    policy = unwrap(model)
    parameters = dict(policy.named_parameters())
    for piece in pieces(policy):
        parameter = parameters[piece.parameter]
        gradient = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
        if gradient is not None:
            yield piece.hf_name, piece.read(gradient.detach()).contiguous()


@torch.no_grad()
def initialize(model: PolicyModel, seed: int, *, scaled_output_init: bool = False) -> None:
    """Random weights as transformers draws them: normal(0, initializer_range), norms 1, biases 0.

    Each tensor has its own generator, seeded by `seed` and its Hugging Face name, and is drawn whole in float32 on the
    CPU: the weights are the same in every layout, on every device and (rounded) in every dtype.
    """
    shape = model.shape
    std = float(shape.raw.get("initializer_range", 0.02))
    parameters = dict(model.named_parameters())
    for piece in pieces(model):
        if piece.hf_name.endswith("norm.weight"):
            value = torch.ones(piece.shape)
        elif piece.hf_name.endswith(".bias"):
            value = torch.zeros(piece.shape)
        else:
            back = piece.hf_name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = (2 * shape.num_layers) ** -0.5 if scaled_output_init and back else 1.0
            value = torch.randn(piece.shape, generator=_generator(seed, piece.hf_name)) * (std * scale)
        piece.write(parameters[piece.parameter], value)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _layer_pieces(shape: PolicyShape, hf: str, mg: str) -> Iterator[Piece]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    heads, kv, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    yield Piece(f"{hf}input_layernorm.weight", f"{mg}input_layernorm.weight", (hidden,), _whole)
    for kind, tail in (("weight", (hidden,)), ("bias", ())):
        if kind == "bias" and not shape.attention_bias:
            continue
        fused = f"{mg}self_attention.linear_qkv.{kind}"
        group = heads // kv
        for name, rows, first, count in (("q", heads, 0, group), ("k", kv, group, 1), ("v", kv, group + 1, 1)):
            region = _grouped(kv, group + 2, dim, first, count)
            yield Piece(f"{hf}self_attn.{name}_proj.{kind}", fused, (rows * dim, *tail), region)
    yield Piece(f"{hf}self_attn.o_proj.weight", f"{mg}self_attention.linear_proj.weight", (hidden, heads * dim), _whole)
    if shape.output_bias:
        yield Piece(f"{hf}self_attn.o_proj.bias", f"{mg}self_attention.linear_proj.bias", (hidden,), _whole)
    if shape.qk_norm:
        for name in ("q", "k"):
            yield Piece(
                f"{hf}self_attn.{name}_norm.weight", f"{mg}self_attention.{name}_layernorm.weight", (dim,), _whole
            )
    yield Piece(f"{hf}post_attention_layernorm.weight", f"{mg}pre_mlp_layernorm.weight", (hidden,), _whole)
    for kind, tail in (("weight", (hidden,)), ("bias", ())):
        if kind == "bias" and not shape.mlp_bias:
            continue
        for name, start in (("gate", 0), ("up", inner)):
            region = _rows(start, start + inner)
            yield Piece(f"{hf}mlp.{name}_proj.{kind}", f"{mg}mlp.linear_fc1.{kind}", (inner, *tail), region)
    yield Piece(f"{hf}mlp.down_proj.weight", f"{mg}mlp.linear_fc2.weight", (hidden, inner), _whole)
    if shape.mlp_bias:
        yield Piece(f"{hf}mlp.down_proj.bias", f"{mg}mlp.linear_fc2.bias", (hidden,), _whole)


def _whole(parameter: Tensor) -> Tensor:
    return parameter


def _rows(start: int, stop: int) -> Region:
    return lambda parameter: parameter[start:stop]


def _grouped(groups: int, per_group: int, dim: int, first: int, count: int) -> Region:
    """Heads [first, first + count) of every query group of the fused qkv parameter [groups * per_group * dim, ...]."""
    return lambda parameter: parameter.view(groups, per_group, dim, *parameter.shape[1:])[:, first : first + count]
