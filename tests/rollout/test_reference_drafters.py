"""The reference engine runs every drafter: what each is given of the policy, shorter proposals, losslessness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spec.draft import MTP, DFlash, Draft, DraftModel, DSpark, Eagle3
from lightning_spec.errors import ConfigError
from lightning_spec.rollout.engine import EngineFiles, Request, Sampling
from lightning_spec.rollout.proposers import Context, Proposer
from lightning_spec.rollout.reference import ReferenceEngine
from lightning_spec.shapes import PolicyShape

LAYERS, WIDTH, VOCAB = 4, 32, 20
BLOCK = {"num_layers": 2, "aux_layer_ids": [1, 4], "mask_token_id": 19}
DRAFTS: dict[str, Draft] = {
    "eagle3": Eagle3(aux_layer_ids=[1, 2, 3]),
    "dflash": DFlash(block_size=4, **BLOCK),  # type: ignore[arg-type]
    "dspark": DSpark(block_size=3, markov_rank=4, confidence=True, **BLOCK),  # type: ignore[arg-type]
    "mtp": MTP(),
    "draft_model": DraftModel(num_layers=1),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    for name, draft in DRAFTS.items():
        draft.build(PolicyShape.from_file(policy), seed=3)
        draft.export(root / name)
    return {name: root / name for name in DRAFTS}


def files(policy: Path, folders: dict[str, Path], name: str) -> EngineFiles:
    kind = type(DRAFTS[name])
    return EngineFiles(policy, folders[name], f"{kind.__module__}.{kind.__qualname__}")


class Reads(Proposer):
    """Proposes nothing and keeps what it is given."""

    def __init__(self, layers: tuple[int, ...] = (), hidden: bool = False) -> None:
        self.aux_layer_ids, self.reads_hidden = layers, hidden
        self.seen: list[tuple[list[int], Tensor | None]] = []

    def propose(self, context: Context, k: int) -> tuple[list[int], Tensor]:
        self.seen.append((list(context.tokens), context.features))
        return [], torch.zeros(0, VOCAB, dtype=torch.float64)


def states(policy: Path, tokens: list[int]) -> dict[Any, Tensor]:
    """Inputs of the layers by number, what the last gives (number L), and the final-normed states."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy).double().eval()
    found: dict[Any, Tensor] = {}
    for number, block in enumerate([*model.model.layers, model.model.norm]):
        block.register_forward_pre_hook(lambda m, args, number=number: found.update({number: args[0][0]}))
    with torch.no_grad():
        found["normed"] = model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    return found


@pytest.mark.parametrize(("layers", "hidden"), [((1, 3), False), ((0, LAYERS), False), ((), True), ((), False)])
def test_a_proposer_sees_its_layers_or_the_normed_states_of_all_tokens_but_the_last(
    policy: Path, layers: tuple[int, ...], hidden: bool
) -> None:
    proposer = Reads(layers, hidden)
    engine = ReferenceEngine(proposer=proposer)
    engine.start(EngineFiles(policy))
    engine.generate([Request((3, 4, 5))], Sampling(temperature=0.0, max_tokens=6))
    assert len(proposer.seen) == 5
    for tokens, features in proposer.seen:
        if not layers and not hidden:
            assert features is None
            continue
        wanted = states(policy, tokens[:-1])
        want = wanted["normed"] if hidden else torch.cat([wanted[layer] for layer in layers], -1)
        # Of states up to 30, a few roundings of float32 are 1e-5 at entries near zero.
        torch.testing.assert_close(features.double(), want, atol=1e-6 * float(want.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_tokens_do_not_depend_on_the_drafter_and_proposals_are_counted(
    policy: Path, folders: dict[str, Path], name: str
) -> None:
    requests = [Request((1, 4, 3)), Request((4,)), Request((7, 8, 9, 10, 11))]
    sampling = Sampling(temperature=0.0, max_tokens=30)
    plain, drafted = ReferenceEngine("none"), ReferenceEngine("draft", 3)
    plain.start(EngineFiles(policy))
    drafted.start(files(policy, folders, name))
    want = plain.generate(requests, sampling)
    done = drafted.generate(requests, sampling)
    assert [c.tokens for c in done] == [c.tokens for c in want]
    assert [c.tokens for c in drafted.generate(requests[1:2], sampling)] == [want[1].tokens]
    assert drafted.stats().drafted == 3 * drafted.stats().drafts > 0


@pytest.mark.parametrize("name", DRAFTS)
def test_a_seed_repeats_sampled_completions_whatever_else_is_in_the_call(
    policy: Path, folders: dict[str, Path], name: str
) -> None:
    engine = ReferenceEngine("draft", 2)
    engine.start(files(policy, folders, name))
    sampling = Sampling(temperature=1.0, max_tokens=12)
    several = engine.generate([Request((1, 4), seed=i) for i in range(4)], sampling)
    assert engine.generate([Request((1, 4), seed=2)], sampling)[0] == several[2]


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_more_proposals_than_a_block_gives_are_refused_at_the_start(
    policy: Path, folders: dict[str, Path], name: str
) -> None:
    with pytest.raises(ConfigError, match="at most 3") as caught:
        ReferenceEngine("draft", 4).start(files(policy, folders, name))
    assert "rollout.engine.num_speculative_tokens" in str(caught.value)


def test_a_confidence_threshold_shortens_proposals_and_changes_no_greedy_token(
    policy: Path, folders: dict[str, Path]
) -> None:
    requests, sampling = [Request((1, 4, 3)), Request((5, 6))], Sampling(temperature=0.0, max_tokens=30)
    found = []
    for threshold in (None, 0.0, 0.5, 1.0):
        engine = ReferenceEngine("draft", 3, confidence_threshold=threshold)
        engine.start(files(policy, folders, "dspark"))
        found.append(([c.tokens for c in engine.generate(requests, sampling)], engine.stats()))
    assert all(tokens == found[0][0] for tokens, _ in found)
    assert found[0][1] == found[1][1]
    assert found[3][1].drafted == 0
    assert found[2][1].drafted < found[0][1].drafted
    with pytest.raises(ConfigError, match="no confidence head"):
        ReferenceEngine("draft", 3, confidence_threshold=0.5).start(files(policy, folders, "dflash"))
    with pytest.raises(ConfigError, match="bad confidence_threshold"):
        ReferenceEngine("draft", 3, confidence_threshold=1.5)


@pytest.mark.parametrize("name", DRAFTS)
def test_training_s_metric_walked_as_an_engine_walks_is_the_engine_s_acceptance_at_every_position(
    policy: Path, folders: dict[str, Path], name: str
) -> None:
    from benchmarks.drafters_train import predict

    longest = 30
    requests = [Request((1, first, second)) for first in range(3, 7) for second in (4, 9)]
    plain, drafted = ReferenceEngine("none"), ReferenceEngine("draft", 3)
    plain.start(EngineFiles(policy))
    drafted.start(files(policy, folders, name))
    text = plain.generate(requests, Sampling(temperature=0.0, max_tokens=longest + 5))
    drafted.generate(requests, Sampling(temperature=0.0, max_tokens=longest))
    rollouts = [(request.prompt_tokens, completion.tokens) for request, completion in zip(requests, text, strict=True)]
    given = files(policy, folders, name)
    assert given.draft is not None
    assert given.draft_class is not None
    found = predict(policy, given.draft_class, given.draft, rollouts, 3, longest)
    stats = drafted.stats()
    assert stats.accepted > 0
    assert found.drafts == stats.drafts
    assert found.walked == pytest.approx([accepted / stats.drafts for accepted in stats.per_position], abs=1e-12)
