"""What a draft is given of the batch and of the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_spec.batch import StepBatch
from lightning_spec.draft.base import DraftInputs
from lightning_spec.loss import GRPO
from lightning_spec.module import SpecGRPO
from lightning_spec.optim import OptimConfig
from lightning_spec.parallel.cpu_stand_in import cpu_stand_in
from lightning_spec.policy import PolicySource, embedding_weight
from tests.module.conftest import CONFIG, Recorded, Train, make_rollouts, quiet_trainer
from tests.module.reading_draft import Reading


def document_seeds(given: list[DraftInputs]) -> dict[tuple[int, ...], int]:
    """The seed of each document, by its tokens."""
    found = {}
    for one in given:
        assert one.document_seeds is not None
        for tokens, seed in zip(one.tokens.split(one.lengths), one.document_seeds, strict=True):
            found[tuple(tokens.tolist())] = seed
    return found


def test_a_documents_seed_is_its_own_whatever_micro_batch_it_lies_in(train: Train) -> None:
    found = []
    for budget in (1000, 30, 1):
        draft = Reading()
        torch.manual_seed(11)  # the run's
        train(1, token_budget=budget, draft=draft)
        found.append(document_seeds(draft.given))
    whole = found[0]
    assert len(set(whole.values())) == len(whole) == 6
    assert found == [whole] * 3


def test_a_document_gets_another_seed_at_each_step(train: Train) -> None:
    draft = Reading()
    train(2, draft=draft, batches=[StepBatch(make_rollouts(0))] * 2)
    first, second = (document_seeds([one]) for one in draft.given)
    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())


def test_counts_are_taken_of_the_micro_batches_that_the_draft_is_given(train: Train) -> None:
    draft = Reading()
    train(2, token_budget=30, draft=draft)
    assert len(draft.counted) == len(draft.given) > 2
    for counted, given in zip(draft.counted, draft.given, strict=True):
        assert counted.document_seeds == given.document_seeds
        assert torch.equal(counted.tokens, given.tokens)


class Embedding(L.Callback):
    """The policy's embedding at the start of each step."""

    def __init__(self) -> None:
        self.tables: list[Tensor] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        assert isinstance(module, SpecGRPO)
        assert module.policy is not None
        self.tables.append(embedding_weight(module.policy).detach().clone())


@pytest.mark.parametrize("tied", [False, True])
def test_special_embeddings_are_the_live_ones_in_every_step_and_in_validation(tied: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": tied}))
    draft, ids, seen = Reading(special=(7, 2)), [7, 2], Embedding()
    optim = OptimConfig(lr=1e-2)
    module = SpecGRPO(PolicySource(str(tmp_path), init_seed=3), GRPO(), optim, draft, None, optim)
    data = Recorded([StepBatch(make_rollouts(seed)) for seed in range(3)])
    trainer = quiet_trainer(3, token_budget=1000, callbacks=[seen])
    trainer.fit(module, data)
    trainer.limit_val_batches = 1
    trainer.validate(module, data, verbose=False)
    assert module.policy is not None
    tables = [*seen.tables, embedding_weight(module.policy)]
    assert len(draft.given) == len(tables) == 4
    for given, table in zip(draft.given, tables, strict=True):
        assert given.special is not None
        assert torch.equal(given.special, table[ids])
    assert len({tuple(given.special.flatten().tolist()) for given in draft.given if given.special is not None}) == 4


def test_a_draft_without_taps_is_given_none(train: Train) -> None:
    draft = Reading()
    train(1, draft=draft)
    (given,) = draft.given
    assert given.features.shape == (len(given.tokens), 0)
    assert given.embeddings.shape == given.hidden.shape == (len(given.tokens), CONFIG["hidden_size"])
    assert given.special is None


def test_the_tap_after_the_last_layer_is_what_the_final_norm_reads(train: Train) -> None:
    last: Any = CONFIG["num_hidden_layers"]
    draft = Reading(taps=(2, last))
    module, _ = train(1, draft=draft, policy_optim=OptimConfig(lr=1e-30))
    (given,) = draft.given
    _, tap = given.features.split(CONFIG["hidden_size"], -1)
    with torch.no_grad(), cpu_stand_in():
        normed = module.last_chunk.decoder.final_layernorm(tap)
    torch.testing.assert_close(normed, given.hidden)
