"""Draft checkpoints on disk: config.json and model.safetensors, as vLLM loads them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_spec.errors import CheckpointError, ConfigError


def write_checkpoint(folder: str | Path, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write both files beside their final names and swap them in, weights first; a killed run leaves the old ones."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    weights, text = folder / "model.safetensors.part", folder / "config.json.part"
    save_file(plain, weights, metadata={"format": "pt"})
    text.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(weights, folder / "model.safetensors")
    os.replace(text, folder / "config.json")
    return folder


def weight_files(folder: str | Path) -> list[Path]:
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files and (folder / "pytorch_model.bin").is_file():
        files = [folder / "pytorch_model.bin"]
    if not files:
        raise CheckpointError(f"no weights of a draft in {folder}: needs model.safetensors (or pytorch_model.bin)")
    return files


def tensor_names(folder: str | Path) -> list[str]:
    """Names of a checkpoint's tensors, in the engine's spelling, without reading the tensors where possible."""
    names: list[str] = []
    for file in weight_files(folder):
        if file.suffix == ".bin":
            names += torch.load(file, map_location="meta", weights_only=True)
        else:
            with safe_open(file, framework="pt") as opened:
                names += opened.keys()
    return [canonical_name(name) for name in names]


def read_tensors(folder: str | Path, prefix: str = "") -> Iterable[tuple[str, Tensor]]:
    """The tensors whose stored names begin with `prefix`; no others are read where the format allows it."""
    for file in weight_files(folder):
        if file.suffix == ".bin":
            held = torch.load(file, map_location="cpu", weights_only=True)
            yield from ((name, tensor) for name, tensor in held.items() if name.startswith(prefix))
        else:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    if name.startswith(prefix):
                        yield name, opened.get_tensor(name)


def canonical_name(name: str) -> str:
    """The first layer is called `midlayer` or `layers.0`; the engine takes both."""
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def unused_by_engine(name: str) -> bool:
    """Tensors that the engine skips, or holds and never applies: the reverse map, later layers' hidden_norm."""
    return name == "t2d" or (name.startswith("layers.") and name.endswith(".hidden_norm.weight"))


@torch.no_grad()
def assign(expected: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Copy tensors into the expected ones. Nothing is written unless all are there and fit.

    Raises:
        CheckpointError: missing, surplus or repeated tensors, named.
        ConfigError: a tensor of another shape or kind.
    """
    found: dict[str, Tensor] = {}
    surplus: list[str] = []
    for raw, tensor in tensors:
        name = canonical_name(raw)
        if unused_by_engine(name):
            continue
        if name not in expected or name in found:
            surplus.append(raw)
        found[name] = tensor
    missing = sorted(set(expected) - set(found))
    if missing or surplus:
        raise CheckpointError(f"draft tensors of {source} do not fit: missing {missing}, surplus {sorted(surplus)}")
    for name, target in expected.items():
        if found[name].shape != target.shape or found[name].is_floating_point() != target.is_floating_point():
            raise ConfigError(
                f"the draft tensor {name} does not fit",
                found=f"{found[name].dtype} {tuple(found[name].shape)}",
                needed=f"{target.dtype} {tuple(target.shape)}",
                key=source,
            )
    for name, target in expected.items():
        target.copy_(found[name])
