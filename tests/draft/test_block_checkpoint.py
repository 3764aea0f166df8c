"""Checkpoints of block drafters: what comes back, and what is refused (CASES.md part D)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_spec.draft import DFlash, DSpark
from lightning_spec.draft.block import BlockDraft
from lightning_spec.errors import CheckpointError, ConfigError

Shapes = Callable[..., Any]

SMALL: dict[str, Any] = {"block_size": 4, "num_layers": 2, "mask_token_id": 20}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dflash": (DFlash, {}),
    "dflash, window": (DFlash, {"sliding_window": 5, "causal": True, "num_kv_heads": 1, "aux_layer_ids": [1, 8]}),
    "dspark": (DSpark, {"markov_rank": 3}),
    "dspark, bare": (DSpark, {"markov_rank": 0, "confidence": False}),
}


def build(kind: str, shape: Any, **options: Any) -> BlockDraft:
    make, own = KINDS[kind]
    draft: BlockDraft = make(**({} if "path" in options else SMALL | own), **options)
    draft.build(shape, seed=3)
    return draft


def same(a: BlockDraft, b: BlockDraft) -> bool:
    one, other = dict(a.engine_tensors()), dict(b.engine_tensors())
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_comes_back_bit_for_bit_with_its_settings(kind: str, make_shape: Shapes, tmp_path: Path) -> None:
    draft = build(kind, make_shape())
    with torch.no_grad():
        for parameter in draft.parameters():  # none as it was made, so that all of them must be read
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    folder = draft.export(tmp_path)
    again = build(kind, make_shape(), path=str(folder))
    assert again.config == draft.config
    assert again.aux_layer_ids == draft.aux_layer_ids
    assert again.fingerprint() == draft.fingerprint()
    assert same(again, draft)
    fresh = build(kind, make_shape())
    assert not same(fresh, draft)
    fresh.load(folder)
    assert same(fresh, draft)
    stored = load_file(folder / "model.safetensors")
    assert set(stored) == {name for name, _ in draft.named_parameters()}  # a refit sends just these
    assert not {"lm_head.weight", "embed_tokens.weight"} & set(stored)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_missing_and_surplus_tensors_are_named_and_nothing_is_written(
    kind: str, make_shape: Shapes, tmp_path: Path
) -> None:
    draft = build(kind, make_shape())
    folder = draft.export(tmp_path)
    whole = load_file(folder / "model.safetensors")
    for name in [*whole]:
        save_file({n: t + 1 for n, t in whole.items() if n != name}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match="missing"):
            draft.load(folder)
    save_file({n: t + 1 for n, t in whole.items()} | {"other.weight": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"surplus \['other\.weight'\]"):
        draft.load(folder)
    with pytest.raises(CheckpointError, match="surplus"):
        build(kind, make_shape(), path=str(folder))
    assert all(torch.equal(t, whole[n]) for n, t in draft.state_dict().items())


def test_a_checkpoint_of_another_block_size_or_kind_is_no_resume(make_shape: Shapes, tmp_path: Path) -> None:
    draft, folder = build("dflash", make_shape()), tmp_path / "longer"
    longer = DFlash(**(SMALL | {"block_size": 6}))
    longer.build(make_shape())
    longer.export(folder)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    with pytest.raises(ConfigError, match=r"another draft \(block_size\)"):
        draft.load(folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.state_dict().items())
    with pytest.raises(ConfigError, match="not a dflash draft"):
        draft.load(build("dspark", make_shape()).export(tmp_path / "dspark"))
    with pytest.raises(ConfigError, match="block_size contradicts"):
        DFlash(path=str(folder), block_size=4).build(make_shape())
    with pytest.raises(ConfigError, match="sliding_window contradicts"):
        DFlash(path=str(folder), sliding_window=4).build(make_shape())
