"""A DFlash draft of ours in vLLM: lossless, counted as in the reference engine, trained, refitted (CASES A12, D1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spec.batch import SpecStats
from lightning_spec.draft import DFlash, DraftInputs
from lightning_spec.loss.draft import SoftCrossEntropy
from lightning_spec.rollout.engine import EngineFiles, Request, Sampling
from lightning_spec.rollout.reference import ReferenceEngine
from lightning_spec.rollout.speculation import Speculation
from lightning_spec.shapes import PolicyShape

K, COUNT = 3, 32
# One token alone: its first block has a trunk of one row.
PROMPTS = [(5,), *(tuple(range(3 + i, 9 + 2 * i)) for i in range(7))]
REQUESTS = [Request(prompt) for prompt in PROMPTS]
GREEDY = Sampling(temperature=0, max_tokens=COUNT)


def train(draft: DFlash, model: Any, texts: Sequence[Sequence[int]], steps: int) -> None:
    """Optimiser steps on the policy's own continuations."""
    with torch.no_grad():
        seen = [model.model(torch.tensor([text]), output_hidden_states=True) for text in texts]
    tokens = torch.tensor([token for text in texts for token in text])
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    table = model.model.embed_tokens.weight.detach()
    x = DraftInputs(
        features=torch.cat([torch.cat([one.hidden_states[i][0] for i in draft.aux_layer_ids], -1) for one in seen]),
        embeddings=table[tokens],
        hidden=torch.cat([one.last_hidden_state[0] for one in seen]),
        tokens=tokens,
        positions=positions,
        lengths=[len(text) for text in texts],
        sampled=torch.ones_like(tokens, dtype=torch.bool),
        stop=torch.zeros_like(tokens, dtype=torch.bool),
        policy_head=model.lm_head.weight.detach(),
        policy_embedding=table,
    )
    totals = draft.counts(x)  # type: ignore[arg-type]
    optimiser = torch.optim.Adam(draft.parameters(), 5e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        draft(x, SoftCrossEntropy(), totals).loss.backward()
        optimiser.step()


def generate(engine: Any) -> tuple[list[tuple[int, ...]], SpecStats]:
    completions = engine.generate(REQUESTS, GREEDY)
    return [completion.tokens for completion in completions], engine.last.spec


def by_reference(policy: Path, draft: DFlash, folder: Path) -> tuple[list[tuple[int, ...]], SpecStats]:
    engine = ReferenceEngine(method="draft", num_speculative_tokens=K)
    engine.start(EngineFiles(policy, draft.export(folder), "lightning_spec.draft.DFlash"))
    return generate(engine)


@pytest.mark.timeout(300)
def test_a_trained_and_refitted_draft_is_lossless_and_accepted_as_often_as_in_the_reference_engine(
    start_engine: Any, tiny: Any, tmp_path: Path
) -> None:
    policy = tmp_path / "policy"
    model = tiny.make_policy(policy, 3, tied=True)
    want = [tiny.greedy(model, prompt, COUNT) for prompt in PROMPTS]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, want, strict=True)]
    draft = DFlash(block_size=K + 1, num_layers=2, aux_layer_ids=[4, 7], mask_token_id=127)
    draft.build(PolicyShape.from_file(policy))
    with torch.no_grad():
        # As different in the two layers as a shared buffer would hide: each key has its own layer's norm.
        for scale, layer in zip((0.5, 2.0), draft.decoder_layers(), strict=True):
            layer.self_attn.k_norm.weight.mul_(scale)  # type: ignore[union-attr]
    train(draft, model, texts, 6)
    engine = start_engine(policy, draft.export(tmp_path / "draft"), speculation=Speculation("dflash", K))
    try:
        tokens, before = generate(engine)
        assert tokens == want
        assert (tokens, before) == by_reference(policy, draft, tmp_path / "first")

        train(draft, model, texts, 60)
        held = dict(draft.engine_tensors())
        report = engine.refit(None, held.items(), 1, verify=True)
        assert report.verified == report.tensors == len(held)
        tokens, after = generate(engine)
        assert tokens == want
        assert (tokens, after) == by_reference(policy, draft, tmp_path / "trained")
        assert after.accepted > before.accepted + 50
        assert min(after.per_position) > 10
    finally:
        engine.close()


@pytest.mark.timeout(300)
def test_a_window_and_causal_slots_are_served_as_they_are_trained(start_engine: Any, tiny: Any, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    model = tiny.make_policy(policy, 3, tied=True)
    want = [tiny.greedy(model, prompt, COUNT) for prompt in PROMPTS]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, want, strict=True)]
    # A window much shorter than the texts, and a block's slots that do not see what comes after them.
    draft = DFlash(block_size=K + 1, aux_layer_ids=[4, 7], mask_token_id=127, sliding_window=4, causal=True)
    draft.build(PolicyShape.from_file(policy))
    train(draft, model, texts, 40)
    engine = start_engine(policy, draft.export(tmp_path / "draft"), speculation=Speculation("dflash", K))
    try:
        tokens, stats = generate(engine)
        assert tokens == want
        assert (tokens, stats) == by_reference(policy, draft, tmp_path / "first")
        assert min(stats.per_position) > 10
        # Served as if it saw everything, the same weights are not accepted as often.
        whole = DFlash(block_size=K + 1, aux_layer_ids=[4, 7], mask_token_id=127)
        whole.build(PolicyShape.from_file(policy))
        whole.load_state_dict(draft.state_dict())
        assert by_reference(policy, whole, tmp_path / "whole")[1] != stats
    finally:
        engine.close()
