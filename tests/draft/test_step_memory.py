"""The memory estimates of block drafters and draft models against the peaks of real steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.cp_steps import make_inputs, make_shape
from lightning_spec.attention.context import Context
from lightning_spec.draft import DFlash, Draft, DraftModel, DSpark
from lightning_spec.loss import SoftCrossEntropy
from lightning_spec.shapes import PolicyShape
from tests.peak import allocated_peak

BLOCK = {"block_size": 4, "num_layers": 2, "mask_token_id": 1, "token_budget": 512}
SIZES = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "inner": 1024, "vocabulary": 4096}
CASES: dict[str, tuple[type[Draft], dict[str, Any], int, dict[str, int]]] = {
    # name: class, arguments, tokens, sizes that differ
    "dflash": (DFlash, BLOCK, 512, {}),
    "dflash, trunk in pieces": (DFlash, BLOCK, 1024, {}),
    "dflash, larger chunks": (DFlash, BLOCK | {"token_budget": 1024}, 512, {}),
    "dflash, one layer, small head": (DFlash, BLOCK | {"num_layers": 1}, 512, {"vocabulary": 1024}),
    "dflash, wide keys": (DFlash, BLOCK, 512, {"kv_heads": 4, "inner": 256}),
    "dspark": (DSpark, BLOCK | {"block_size": 3, "markov_rank": 16, "confidence": True}, 512, {}),
    "model": (DraftModel, {"num_layers": 2}, 1024, {}),
    "model, everything kept": (DraftModel, {"num_layers": 3, "recompute": False}, 512, {}),
    "model, small head": (DraftModel, {"num_layers": 2}, 512, {"vocabulary": 1024}),
}


@pytest.mark.parametrize("name", CASES)
def test_estimates_are_the_measured_peaks_within_a_third_and_hardly_below(name: str) -> None:
    kind, options, tokens, sizes = CASES[name]
    shape = make_shape(**{"tokens": tokens, **SIZES, **sizes})
    draft = kind(**options)
    draft.build(shape, seed=0)
    x = make_inputs(tokens, 8, shape.hidden_size, shape.vocab_size, Context.of(None))
    x = replace(x, features=torch.randn(tokens, max(1, len(draft.aux_layer_ids)) * shape.hidden_size))
    totals = dict.fromkeys([*(f"draft_slot_{slot}" for slot in range(4)), "draft_rows"], float(tokens))

    def step() -> None:
        draft.zero_grad(set_to_none=True)
        draft(x, SoftCrossEntropy(), totals).loss.backward()

    step()
    found, said = allocated_peak(step), draft.step_memory(tokens, 1, 4)
    assert said is not None
    assert 0.85 < said / found < 1.34


def test_ranks_share_the_rows_and_bf16_halves_what_is_kept() -> None:
    draft = DraftModel(num_layers=2)
    shape = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 1 << 16}
    draft.build(PolicyShape.from_hf(shape))
    one, two = draft.step_memory(1 << 16, 1, 4), draft.step_memory(1 << 16, 2, 4)
    assert one / 2 == pytest.approx(two, rel=0.1)
    assert draft.step_memory(1 << 16, 1, 2) < 0.7 * one
