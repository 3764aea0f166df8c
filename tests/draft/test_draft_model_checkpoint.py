"""A language model draft's sizes, folders, refusals, and its proposals against transformers' own generation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_spec.draft import DraftInputs, DraftModel
from lightning_spec.errors import CheckpointError, ConfigError
from lightning_spec.rollout.engine import EngineFiles, Request, Sampling
from lightning_spec.rollout.reference import ReferenceEngine
from lightning_spec.shapes import PolicyShape

SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 20, "max_position_embeddings": 64, "initializer_range": 0.4, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
MakeShape = Callable[..., PolicyShape]
Save = Callable[..., tuple[Any, str]]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """save(family, **changes) -> (transformers model, its folder)."""

    def make(family: str = "llama", seed: int = 7, shard: str | None = None, **changes: Any) -> tuple[Any, str]:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SIZES | changes))).eval()
        folder = tmp_path / f"hf-{family}-{seed}"
        model.save_pretrained(folder, **({} if shard is None else {"max_shard_size": shard}))
        return model, str(folder)

    return make


def built(shape: PolicyShape, **options: Any) -> DraftModel:
    draft = DraftModel(**options)
    draft.build(shape)
    return draft


def greedy(draft: DraftModel, sequences: list[list[int]], k: int, **options: Any) -> Any:
    """Proposals after sequences whose last token is the bonus token."""
    return draft.propose(
        None,
        torch.tensor([token for sequence in sequences for token in sequence[:-1]]),
        [len(sequence) - 1 for sequence in sequences],
        torch.tensor([sequence[-1] for sequence in sequences]),
        k,
        policy_head=torch.zeros(23, 16),
        policy_embedding=torch.zeros(23, 16),
        **options,
    )


# --- proposals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"rope_parameters": YARN}), ("qwen2", {"tie_word_embeddings": True}), ("qwen3", {"head_dim": 8})],
)
def test_greedy_proposals_are_transformers_own_continuation(
    family: str, changes: dict[str, Any], save: Save, make_shape: MakeShape
) -> None:
    model, folder = save(family, **changes)
    draft = built(make_shape(), path=folder)
    sequences = [PROMPT, PROMPT[:2], [*PROMPT, 7, 7, 20]]
    found = greedy(draft, sequences, 6)
    for row, sequence in enumerate(sequences):
        with torch.inference_mode():
            want = model.generate(torch.tensor([sequence]), max_new_tokens=6, do_sample=False)[0, len(sequence) :]
        assert found.tokens[row].tolist() == want.tolist()
    assert torch.equal(found.probs.argmax(-1), found.tokens)
    assert torch.equal(found.probs.sum(-1), torch.ones(3, 6))


def test_sampled_proposals_come_from_the_distribution_that_is_returned(save: Save, make_shape: MakeShape) -> None:
    model, folder = save("qwen3", head_dim=8)
    draft = built(make_shape(), path=folder)
    with pytest.raises(ValueError, match="generator"):
        greedy(draft, [PROMPT], 2, temperature=0.7)
    state = torch.get_rng_state()
    found = greedy(draft, [PROMPT] * 400, 2, temperature=0.7, generator=torch.Generator().manual_seed(1))
    assert torch.equal(state, torch.get_rng_state())
    with torch.no_grad():
        first = (model(torch.tensor([PROMPT])).logits[0, -1] / 0.7).softmax(-1)
        second = (model(torch.tensor([[*PROMPT, int(found.tokens[5, 0])]])).logits[0, -1] / 0.7).softmax(-1)
    torch.testing.assert_close(found.probs[5, 0], first, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.probs[5, 1], second, rtol=1e-4, atol=1e-5)
    share = torch.bincount(found.tokens[:, 0], minlength=23) / 400
    assert float((share - first).abs().max()) < 0.1


def test_the_reference_engine_is_lossless_with_it_and_accepts_all_of_a_copy(save: Save) -> None:
    _, policy = save("llama")
    _, other = save("llama", seed=3)
    requests = [Request((1, 2, 3)), Request((4,)), Request((7, 8, 9, 10, 11))]
    sampling = Sampling(temperature=0.0, max_tokens=20)

    def served(draft: str | None) -> tuple[list[tuple[int, ...]], ReferenceEngine]:
        engine = ReferenceEngine(method="none" if draft is None else "draft", num_speculative_tokens=3)
        files = EngineFiles(Path(policy), draft and Path(draft), "lightning_spec.draft.lm.DraftModel")  # type: ignore[arg-type]
        engine.start(files)
        return [c.tokens for c in engine.generate(requests, sampling)], engine

    plain, _ = served(None)
    copied, copy = served(policy)
    tokens, engine = served(other)
    assert plain == copied == tokens
    assert copy.stats().accepted == copy.stats().drafted > 0
    assert engine.stats().accepted < engine.stats().drafted
    # A refit of the draft alone changes what it proposes, and none of the tokens.
    before, tensors = engine.stats(), load_file(Path(policy) / "model.safetensors")
    assert engine.refit(None, tensors.items(), 1, verify=True).verified == len(tensors)
    assert [c.tokens for c in engine.generate(requests, sampling)] == plain
    assert engine.stats() - before == copy.stats()


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
        ("llama", {"rope_parameters": YARN, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 8}),
    ],
)
def test_transformers_reads_an_exported_draft_and_gets_the_same_logits(
    family: str, changes: dict[str, Any], save: Save, make_shape: MakeShape, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model, folder = save(family, **changes)
    draft = built(make_shape(), path=folder)
    assert {name for name, _ in draft.engine_tensors()} == set(load_file(Path(folder) / "model.safetensors"))
    out = draft.export(tmp_path / "out")
    again, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(tokens).logits, model(tokens).logits)
    twin = built(make_shape(), path=str(out))
    assert twin.config == draft.config
    assert twin.fingerprint() == draft.fingerprint()
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_a_new_draft_follows_the_policy_and_round_trips(make_shape: MakeShape, tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    shape = make_shape(tie_word_embeddings=True, eos_token_id=4, rope_scaling=scaling, partial_rotary_factor=0.5)
    draft = built(shape, num_layers=3, hidden_size=12, max_positions=50, seed=5)
    config = draft.config
    assert config is not None
    assert (config.model_type, config.num_layers, config.hidden_size, config.max_positions) == ("llama", 3, 12, 50)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (4, 2, 4, 24)
    assert (config.vocab_size, config.norm_eps, config.tied_embeddings) == (23, 1e-5, True)
    assert (config.rope.theta, config.rope.scaling, config.rope.partial_factor) == (100.0, scaling, 0.5)
    assert json.loads((draft.export(tmp_path) / "config.json").read_text())["eos_token_id"] == 4
    copy = built(shape, path=str(tmp_path))
    assert copy.config == config
    other = built(shape, num_layers=3, hidden_size=12, max_positions=50, seed=6)
    assert not torch.equal(other.head(), draft.head())
    other.load(tmp_path)
    for one in (copy, other):
        assert all(
            torch.equal(a, b) for (_, a), (_, b) in zip(one.engine_tensors(), draft.engine_tensors(), strict=True)
        )
    assert built(make_shape(), model_type="qwen2", num_heads=2).config.head_dim == 8  # type: ignore[union-attr]
    qwen3 = built(make_shape(model_type="qwen3", head_dim=6))
    assert (qwen3.config.model_type, qwen3.config.head_dim) == ("qwen3", 6)  # type: ignore[union-attr]


@pytest.mark.parametrize("tied", [False, True])
def test_a_new_draft_of_the_policy_s_width_starts_from_its_tensors(tied: bool, make_shape: MakeShape) -> None:
    head, table = torch.randn(23, 16), torch.randn(23, 16)
    draft = built(make_shape(), tie_embeddings=tied)
    draft.init_from_policy(head, table)
    assert torch.equal(draft.head(), head)
    assert torch.equal(draft.model.embed_tokens.weight, head if tied else table)
    narrow = built(make_shape(), hidden_size=12)
    before = narrow.head().clone()
    narrow.init_from_policy(head, table)
    assert torch.equal(narrow.head(), before)


def test_a_sharded_checkpoint_and_a_pytorch_one_load_like_a_single_file(
    save: Save, make_shape: MakeShape, tmp_path: Path
) -> None:
    _, folder = save("llama", shard="4KB")
    assert len(list(Path(folder).glob("model-*.safetensors"))) > 2
    whole: dict[str, torch.Tensor] = {}
    for file in Path(folder).glob("*.safetensors"):
        whole |= load_file(file)
    draft = built(make_shape(), path=folder)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in draft.engine_tensors())
    binary = tmp_path / "binary"
    binary.mkdir()
    (binary / "config.json").write_text((Path(folder) / "config.json").read_text())
    torch.save(whole | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, binary / "pytorch_model.bin")
    again = built(make_shape(), path=str(binary))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in again.engine_tensors())
    next(iter(Path(folder).glob("model-*.safetensors"))).unlink()
    with pytest.raises(CheckpointError, match="missing"):
        built(make_shape(), path=folder)


def test_a_tied_head_in_the_file_must_equal_the_embedding(save: Save, make_shape: MakeShape) -> None:
    """CASES D4."""
    _, folder = save("llama", tie_word_embeddings=True)
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    draft = built(make_shape(), path=folder)
    assert draft.lm_head is None
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        draft.load(folder)
    assert torch.equal(draft.head(), tensors["model.embed_tokens.weight"])


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"num_proposals": 0}, "num_proposals"),
        ({"num_layers": 0}, "num_layers"),
        ({"max_positions": 0}, "max_positions"),
        ({"model_type": "mamba"}, "model_type"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads"),
        ({"model_type": "qwen2", "head_dim": 8}, "head_dim"),
        ({"head_dim": 3}, "partial_rotary_factor"),
    ],
)
def test_bad_sizes_of_a_new_draft_are_refused_with_their_key(
    options: dict[str, Any], key: str, make_shape: MakeShape
) -> None:
    with pytest.raises(ConfigError) as error:
        built(make_shape(), **options)
    assert key in error.value.key


@pytest.mark.parametrize(
    ("changes", "options", "match"),
    [
        ({"vocab_size": 24}, {}, "another vocabulary"),
        ({"model_type": "mixtral"}, {}, "unsupported family"),
        ({"quantization_config": {"bits": 4}}, {}, "quantised"),
        ({"use_sliding_window": True, "sliding_window": 8}, {}, "sliding-window"),
        ({}, {"num_layers": 5}, "num_layers contradicts"),
        ({}, {"tie_embeddings": True}, "tie_embeddings contradicts"),
        ({}, {"model_type": "qwen3"}, "model_type contradicts"),
        ({"intermediate_size": 28}, {}, "does not fit"),
        ({"hidden_size": 20, "head_dim": 5}, {}, "does not fit|rotated part"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    changes: dict[str, Any], options: dict[str, Any], match: str, save: Save, make_shape: MakeShape
) -> None:
    _, folder = save("llama")
    file = Path(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=match):
        built(make_shape(), path=folder, **options)


def test_a_qwen3_whose_output_bias_the_engine_would_drop_is_refused(save: Save, make_shape: MakeShape) -> None:
    _, folder = save("qwen3", attention_bias=True)
    with pytest.raises(ConfigError, match="no bias in o_proj"):
        built(make_shape(), path=folder)


def test_missing_and_surplus_tensors_are_named_and_nothing_changes(save: Save, make_shape: MakeShape) -> None:
    """CASES D3."""
    draft = built(make_shape(), path=save("llama")[1])
    before = {name: tensor.clone() for name, tensor in draft.engine_tensors()}
    other = {name: tensor + 1 for name, tensor in before.items()}
    lost = other.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"missing \['model\.layers\.1\.mlp\.up_proj\.weight'\]"):
        draft.load_tensors(other.items(), "a refit")
    full = other | {"model.layers.1.mlp.up_proj.weight": lost, "model.layers.9.x": lost}
    with pytest.raises(CheckpointError, match=r"surplus \['model\.layers\.9\.x'\]"):
        draft.load_tensors(full.items(), "a refit")
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.engine_tensors())


def test_another_draft_s_checkpoint_is_not_loaded(save: Save, make_shape: MakeShape) -> None:
    draft = built(make_shape(), path=save("llama")[1])
    _, other = save("llama", seed=8, num_hidden_layers=3)
    with pytest.raises(ConfigError, match="num_layers"):
        draft.load(other)
    assert draft.fingerprint() != built(make_shape(), path=other).fingerprint()


def test_rollouts_longer_than_its_positions_are_refused(make_shape: MakeShape, save: Save) -> None:
    """CASES B3."""
    _, folder = save("llama")
    draft = built(make_shape(), path=folder)
    draft.check_length(64)
    with pytest.raises(ConfigError, match="fewer positions"):
        draft.check_length(65)
    longer = built(make_shape(), path=folder, max_positions=80)
    longer.check_length(80)
    assert longer.built().rope == longer.built().rope.__class__(4, 10000.0, 80)


def test_a_stage_without_its_parameters_still_counts_checks_and_describes(
    make_shape: MakeShape, make_inputs: Callable[..., DraftInputs]
) -> None:
    draft, twin = built(make_shape()), built(make_shape())
    x = make_inputs([5, 4])
    twin.drop_parameters()
    assert twin.counts(x) == draft.counts(x)  # type: ignore[arg-type]
    assert twin.fingerprint() == draft.fingerprint()
    assert twin.row_products() == draft.row_products() > 0
    assert twin.speculative_config(4) == {"method": "draft_model", "num_speculative_tokens": 4}
    twin.check_length(64)
    assert list(twin.local_tensors()) == []
    for call in (lambda: list(twin.engine_tensors()), lambda: greedy(twin, [PROMPT], 2), lambda: twin(x, None, {})):
        with pytest.raises(RuntimeError, match="dropped"):
            call()
