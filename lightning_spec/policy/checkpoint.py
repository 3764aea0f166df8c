"""Policies from and to Hugging Face folders (config.json + safetensors), which transformers and vLLM read."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from lightning_spec.errors import CheckpointError
from lightning_spec.policy.config import ARCHITECTURES
from lightning_spec.policy.tensor_folder import INDEX, SINGLE, TensorFolder, replace_folder, some, write_tensors
from lightning_spec.policy.weights import (
    EMBEDDING,
    HEAD,
    Model,
    chunks,
    clear_padding,
    extent,
    fill,
    hf_tensors,
    local_tensors,
    tensor_shapes,
)
from lightning_spec.shapes import PolicyShape

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_FLOATS = ("F64", "F32", "F16", "BF16")
_OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5")


def has_weights(folder: str | Path) -> bool:
    """Whether a policy's folder holds weights, or describes a policy that starts from nothing (config.json alone).

    Raises CheckpointError when it holds weights in a form that is not read: they must not be taken for "no weights",
    which would train a random policy without a word.
    """
    folder = Path(folder)
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        return True
    strange = sorted(path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern))
    if strange:
        raise CheckpointError(f"{folder} holds {some(strange)}, but neither {SINGLE} nor {INDEX}")
    return False


@torch.no_grad()
def load_policy(model: Model, folder: str | Path) -> None:
    """Read this rank's part of the weights from a Hugging Face folder, one tensor at a time, into the model's dtype
    and device. Reads no more of the files than the rank holds.

    Every name, shape and dtype of the whole policy is checked before the first weight changes, by every rank alike.
    Raises CheckpointError that names the tensors which are missing, surplus, of another shape, or lost in a truncated
    file. A tied policy accepts an `lm_head.weight` that equals the embedding, as some checkpoints carry one.

    Optimisers that keep their own copy of the weights have to reload it after this call.
    """
    parts = chunks(model)
    source = TensorFolder(folder)
    _check_names(parts[0].shape, source)
    wanted = {place.name: (place, parameter) for place, parameter in local_tensors(parts) if place.spans}
    rectangles = {name: extent(place, parameter) for name, (place, parameter) in wanted.items()}
    # By file, so that each is opened once.
    order = sorted(wanted, key=lambda name: (str(source.entries[name].file), name))
    for name, tensor in source.read(order, rectangles):
        place, parameter = wanted[name]
        fill(place, parameter, tensor, [axis.start for axis in rectangles[name]])
    for chunk in parts:
        clear_padding(chunk)


def export_policy(
    model: Model,
    folder: str | Path,
    shape: PolicyShape | None = None,
    *,
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = 2**31,
) -> None:
    """Write the policy of a rank that holds all of it as a Hugging Face folder, whole or not at all (`write_policy`).

    Args:
        model: bare or wrapped. The weights keep its dtype.
        folder, tokenizer_from, max_shard_bytes: write_policy's.
        shape: whose config.json is written; the model's own by default.

    One rank of those that hold the same weights calls this.
    """
    policy = chunks(model)[0]
    write_policy(
        folder,
        shape or policy.shape,
        policy.config.params_dtype,
        hf_tensors(model),
        tokenizer_from=tokenizer_from,
        max_shard_bytes=max_shard_bytes,
    )


def write_policy(
    folder: str | Path,
    shape: PolicyShape,
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = 2**31,
) -> None:
    """Write config.json, the weights and a tokenizer's files as a Hugging Face folder, whole or not at all.

    Args:
        folder: replaced when it is there already and holds a checkpoint only; anything else in it is refused.
        shape: whose config.json is written.
        dtype: that config.json names.
        tensors: (Hugging Face name, whole tensor) of all the policy's tensors, in any order; written as they come.
        tokenizer_from: a folder whose tokenizer, chat template and generation config are copied, those that it has.
        max_shard_bytes: larger models are cut into several files with an index; one file's tensors are in memory.

    Raises:
        CheckpointError: foreign files in `folder`; or tensors that are missing, surplus, repeated, or of another shape.
    """
    target = Path(folder)
    _refuse_foreign_files(target)
    with replace_folder(target) as fresh:
        config = config_json(shape, dtype)
        (fresh / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name in TOKENIZER_FILES if tokenizer_from is not None else ():
            if (Path(str(tokenizer_from)) / name).is_file():
                shutil.copyfile(Path(str(tokenizer_from)) / name, fresh / name)
        write_tensors(fresh, _checked(tensors, tensor_shapes(shape)), max_shard_bytes)


def _checked(tensors: Iterable[tuple[str, Tensor]], wanted: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they come, each one checked, and at the end that all came."""
    missing = dict(wanted)
    for name, tensor in tensors:
        needed = missing.pop(name, None)
        if needed is None or tuple(tensor.shape) != needed:
            place = (needed and list(needed)) or ("a new name" if name in wanted else "no such tensor")
            raise CheckpointError(f"export: {name} {list(tensor.shape)} came where the policy has {place}")
        yield name, tensor
    if missing:
        raise CheckpointError(f"export: {len(missing)} tensors never came: {some(missing)}")


def config_json(shape: PolicyShape, dtype: torch.dtype) -> dict[str, object]:
    """The config.json to export: the one that was read, with the exported dtype and an architecture's name."""
    config = {key: value for key, value in shape.raw.items() if key not in ("torch_dtype", "dtype")}
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.setdefault("architectures", [ARCHITECTURES[shape.model_type]])
    config["tie_word_embeddings"] = shape.tied_embeddings
    return config


def _check_names(shape: PolicyShape, source: TensorFolder) -> None:
    where, wanted = source.folder, tensor_shapes(shape)
    missing = [name for name in wanted if name not in source.entries]
    if missing:
        raise CheckpointError(f"{where} lacks {len(missing)} tensors of the policy: {some(missing)}")
    # Old transformers saved a buffer of the rotary embedding with the weights.
    surplus = [name for name in source.entries if name not in wanted and not name.endswith("rotary_emb.inv_freq")]
    if HEAD in surplus and shape.tied_embeddings:
        surplus.remove(HEAD)
        _check_tied_head(source)
    if surplus:
        raise CheckpointError(f"{where} holds {len(surplus)} tensors that the policy has no place for: {some(surplus)}")
    wrong = [
        f"{name} {list(source.entries[name].shape)} instead of {list(size)}"
        for name, size in wanted.items()
        if source.entries[name].shape != size
    ]
    if wrong:
        raise CheckpointError(f"{where}: {len(wrong)} tensors of another shape: {some(wrong)}")
    packed = [f"{name} ({source.entries[name].dtype})" for name in wanted if source.entries[name].dtype not in _FLOATS]
    if packed:
        raise CheckpointError(f"{where}: {some(packed)} are not floating-point; quantised policies cannot be trained")


def _check_tied_head(source: TensorFolder) -> None:
    tensors = dict(source.read([EMBEDDING, HEAD]))
    if not torch.equal(tensors[EMBEDDING], tensors[HEAD]):
        raise CheckpointError(
            f"{source.folder}: lm_head.weight differs from model.embed_tokens.weight, but config.json says "
            "tie_word_embeddings: true; set it to false to keep the head"
        )


def _refuse_foreign_files(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file; a policy is exported to a folder")
    own = {"config.json", INDEX, *TOKENIZER_FILES}
    foreign = sorted(p.name for p in target.iterdir() if p.name not in own and p.suffix != ".safetensors")
    if foreign:
        raise CheckpointError(f"{target} holds {some(foreign)}, which an export would delete; choose another folder")
