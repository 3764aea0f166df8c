"""The weights that a policy starts with: drawn anew, the same in every layout, or a checkpoint's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from lightning_spec.errors import CheckpointError
from lightning_spec.policy.checkpoint import has_weights
from lightning_spec.policy.tensor_folder import TensorFolder
from lightning_spec.policy.weights import (
    EMBEDDING,
    HEAD,
    Model,
    chunks,
    clear_padding,
    fill,
    local_tensors,
    tensor_shapes,
)
from lightning_spec.shapes import PolicyShape


def drawn_weight(
    shape: PolicyShape, name: str, size: tuple[int, ...], seed: int, *, scaled_output_init: bool = False
) -> Tensor:
    """The whole named tensor [size], float32 on the CPU, as transformers draws it: normal(0, initializer_range), norms
    1, biases 0.

    Each tensor has its own generator, seeded by `seed` and its Hugging Face name: it is the same in every layout, on
    every device and (rounded) in every dtype.
    """
    if name.endswith("norm.weight"):
        return torch.ones(size)
    if name.endswith(".bias"):
        return torch.zeros(size)
    back = name.endswith(("o_proj.weight", "down_proj.weight"))
    scale = (2 * shape.num_layers) ** -0.5 if scaled_output_init and back else 1.0
    std = float(shape.raw.get("initializer_range", 0.02))
    return torch.randn(size, generator=_generator(seed, name)) * (std * scale)


def initialize(model: Model, seed: int, *, scaled_output_init: bool = False) -> None:
    """Give this rank its part of random weights (`drawn_weight`), one tensor at a time."""
    parts = chunks(model)
    for place, parameter in local_tensors(model):
        if place.spans:
            whole = drawn_weight(parts[0].shape, place.name, place.shape, seed, scaled_output_init=scaled_output_init)
            fill(place, parameter, whole)
    for chunk in parts:
        clear_padding(chunk)


def initial_weight(
    folder: str | Path, shape: PolicyShape, name: str, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The whole tensor `name` that `policy_from_folder(folder, seed=seed)` starts with, on the CPU. Reads or draws it
    without talking to other ranks: a stage that does not hold the embedding can have its first value all the same.

    Raises CheckpointError where the policy has no such tensor, or the folder's is missing or of another shape.
    """
    if name == HEAD and shape.tied_embeddings:
        name = EMBEDDING
    sizes = tensor_shapes(shape)
    if name not in sizes:
        raise CheckpointError(f"the policy of {folder} has no tensor {name}")
    if not has_weights(folder):
        return drawn_weight(shape, name, sizes[name], seed).to(dtype)
    source = TensorFolder(folder)
    if name not in source.entries or source.entries[name].shape != sizes[name]:
        found = source.entries[name].shape if name in source.entries else "nothing"
        raise CheckpointError(f"{folder}: {name} should be {list(sizes[name])}, found {found}")
    ((_, tensor),) = source.read([name])
    return tensor.to(dtype)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
