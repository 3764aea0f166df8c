"""Policies from and to Hugging Face folders (config.json + safetensors), which transformers and vLLM read."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_spec.errors import CheckpointError
from lightning_spec.policy.config import ARCHITECTURES
from lightning_spec.policy.tensor_folder import INDEX, SINGLE, TensorFolder, replace_folder, some, write_tensors
from lightning_spec.policy.weights import Piece, hf_tensors, pieces, unwrap
from lightning_spec.shapes import PolicyShape

if TYPE_CHECKING:
    from lightning_spec.policy.model import PolicyModel

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
def load_policy(model: nn.Module, folder: str | Path) -> None:
    """Read this rank's weights from a Hugging Face folder, one tensor at a time, into the model's dtype and device.

    Every name, shape and dtype is checked before the first weight changes. Raises CheckpointError that names the
    tensors which are missing, surplus, of another shape, or lost in a truncated file. A tied policy accepts an
    `lm_head.weight` that equals the embedding, as some checkpoints carry one.

    Optimisers that keep their own copy of the weights have to reload it after this call.
    """
    policy = unwrap(model)
    source = TensorFolder(folder)
    wanted = {piece.hf_name: piece for piece in pieces(policy)}
    _check_names(policy, source, wanted)
    parameters = dict(policy.named_parameters())
    # By file, so that each is opened once.
    order = sorted(wanted, key=lambda name: (str(source.entries[name].file), name))
    for name, tensor in source.read(order):
        piece = wanted[name]
        piece.write(parameters[piece.parameter], tensor)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in parameters:
            parameters[name][policy.shape.vocab_size :].zero_()


def export_policy(
    model: nn.Module,
    folder: str | Path,
    shape: PolicyShape | None = None,
    *,
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = 2**31,
) -> None:
    """Write config.json, the weights and a tokenizer's files as a Hugging Face folder, whole or not at all.

    Args:
        model: a PolicyModel, bare or wrapped. The weights keep its dtype.
        folder: replaced when it is there already and holds a checkpoint only; anything else in it is refused.
        shape: whose config.json is written; the model's own by default.
        tokenizer_from: a folder whose tokenizer, chat template and generation config are copied, those that it has.
        max_shard_bytes: larger models are cut into several files with an index.

    One rank of those that hold the same weights calls this.
    """
    policy = unwrap(model)
    target = Path(folder)
    _refuse_foreign_files(target)
    dtype = policy.config.params_dtype
    with replace_folder(target) as fresh:
        config = config_json(shape or policy.shape, dtype)
        (fresh / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name in TOKENIZER_FILES if tokenizer_from is not None else ():
            if (Path(str(tokenizer_from)) / name).is_file():
                shutil.copyfile(Path(str(tokenizer_from)) / name, fresh / name)
        sizes = {piece.hf_name: _count(piece) * dtype.itemsize for piece in pieces(policy)}
        write_tensors(fresh, hf_tensors(policy), sizes, max_shard_bytes)


def config_json(shape: PolicyShape, dtype: torch.dtype) -> dict[str, object]:
    """The config.json to export: the one that was read, with the exported dtype and an architecture's name."""
    config = {key: value for key, value in shape.raw.items() if key not in ("torch_dtype", "dtype")}
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.setdefault("architectures", [ARCHITECTURES[shape.model_type]])
    config["tie_word_embeddings"] = shape.tied_embeddings
    return config


def _check_names(policy: PolicyModel, source: TensorFolder, wanted: dict[str, Piece]) -> None:
    where = source.folder
    missing = [name for name in wanted if name not in source.entries]
    if missing:
        raise CheckpointError(f"{where} lacks {len(missing)} tensors of the policy: {some(missing)}")
    surplus = [name for name in source.entries if name not in wanted and not _elsewhere(policy, name)]
    if "lm_head.weight" in surplus and policy.shape.tied_embeddings:
        surplus.remove("lm_head.weight")
        _check_tied_head(policy, source)
    if surplus:
        raise CheckpointError(f"{where} holds {len(surplus)} tensors that the policy has no place for: {some(surplus)}")
    wrong = [
        f"{name} {list(source.entries[name].shape)} instead of {list(piece.shape)}"
        for name, piece in wanted.items()
        if source.entries[name].shape != piece.shape
    ]
    if wrong:
        raise CheckpointError(f"{where}: {len(wrong)} tensors of another shape: {some(wrong)}")
    packed = [f"{name} ({source.entries[name].dtype})" for name in wanted if source.entries[name].dtype not in _FLOATS]
    if packed:
        raise CheckpointError(f"{where}: {some(packed)} are not floating-point; quantised policies cannot be trained")


def _elsewhere(policy: PolicyModel, name: str) -> bool:
    """Names that are no fault: buffers that old transformers saved, and what other pipeline stages hold."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if policy.pre_process and policy.post_process:
        return False
    if name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        return True
    here = {f"model.layers.{layer.layer_number - 1}." for layer in policy.decoder.layers}
    return name.startswith("model.layers.") and ".".join(name.split(".")[:3]) + "." not in here


def _check_tied_head(policy: PolicyModel, source: TensorFolder) -> None:
    tensors = dict(source.read(["model.embed_tokens.weight", "lm_head.weight"]))
    if not torch.equal(tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]):
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


def _count(piece: Piece) -> int:
    return int(torch.Size(piece.shape).numel())
