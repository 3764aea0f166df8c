"""A draft known by its configuration alone, as on the pipeline stages that do not host it (CASES.md C1, C6)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spec.draft import DraftInputs, Eagle3, VocabMap
from lightning_spec.errors import ConfigError
from lightning_spec.loss.draft import SoftCrossEntropy
from lightning_spec.parallel.placement import Placement

Shapes = Callable[..., Any]
Inputs = Callable[..., DraftInputs]


def built(shape: Any, dropped: bool = False) -> Eagle3:
    draft = Eagle3(num_passes=3, num_layers=2, draft_vocab_size=5, own_embedding=True, rows_per_step=4)
    draft.use_vocab_map(VocabMap(torch.tensor([1, 4, 5, 11, 22]), 23))
    draft.build(shape, seed=1)
    if dropped:
        draft.drop_parameters()
    return draft


def test_what_follows_from_the_configuration_is_the_same_without_parameters(
    make_shape: Shapes, make_inputs: Inputs
) -> None:
    here, away = built(make_shape()), built(make_shape(), dropped=True)
    x = make_inputs([9, 4])
    assert (here.resident, away.resident) == (True, False)
    assert away.counts(x) == here.counts(x)  # type: ignore[arg-type]
    assert away.fingerprint() == here.fingerprint()
    assert away.aux_layer_ids == here.aux_layer_ids
    assert away.speculative_config(3) == here.speculative_config(3)
    assert {n: p.shape for n, p in away.named_parameters()} == {n: p.shape for n, p in here.named_parameters()}
    assert all(p.is_meta and not p.requires_grad for p in away.parameters())
    for draft in (here, away):
        draft.check_length(64)
        with pytest.raises(ConfigError, match="max_positions"):
            draft.check_length(65)


def test_what_reads_parameters_says_that_they_are_elsewhere(
    make_shape: Shapes, make_inputs: Inputs, tmp_path: Path
) -> None:
    here, away = built(make_shape()), built(make_shape(), dropped=True)
    x = make_inputs([9, 4])
    here.export(tmp_path / "draft")
    head = x.policy_head
    calls: list[Callable[[], Any]] = [
        lambda: away(x, SoftCrossEntropy(), away.counts(x)),  # type: ignore[arg-type]
        lambda: away.engine_tensors(),
        lambda: away.export(tmp_path / "away"),
        lambda: away.load(tmp_path / "draft"),
        lambda: away.load_tensors(here.engine_tensors(), "here"),
        lambda: away.init_from_policy(head, head),
        lambda: away.propose(x.features, x.tokens, [9, 4], x.tokens[:2], 2, policy_head=head, policy_embedding=head),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="another pipeline stage holds them"):
            call()
    assert not (tmp_path / "away").exists()


def test_it_moves_to_another_type_with_its_module(make_shape: Shapes) -> None:
    module = torch.nn.ModuleDict({"draft": built(make_shape(), dropped=True), "other": torch.nn.Linear(2, 2)})
    module.to(torch.float64).to("cpu")
    away = module["draft"]
    assert isinstance(away, Eagle3)
    assert all(p.is_meta for p in away.parameters())
    assert away.target_ids().tolist() == [1, 4, 5, 11, 22]  # type: ignore[union-attr]


def test_placements_are_of_all_parameters_and_with_the_map_they_are_the_engine_s_tensors(make_shape: Shapes) -> None:
    here, away = built(make_shape()), built(make_shape(), dropped=True)
    placed = here.placements()
    assert placed == {n: [Placement.whole(n, tuple(p.shape))] for n, p in here.named_parameters()}
    engine = dict(here.engine_tensors())
    assert engine.keys() == placed.keys() | {"d2t"}
    local = {placement.name: (placement, tensor) for placement, tensor in here.local_tensors()}
    assert local.keys() == engine.keys()
    for name, (placement, tensor) in local.items():
        (piece,) = placement.pieces(tensor)
        assert torch.equal(piece.tensor, engine[name])
        assert (piece.shape, set(piece.offset)) == (tuple(engine[name].shape), {0})
        assert not tensor.requires_grad
    assert away.placements() == {}
    assert list(away.local_tensors()) == []
