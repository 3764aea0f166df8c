"""MTP heads on disk and in the engine: what vLLM loads, what comes back, what is proposed, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_spec.draft import MTP, DraftInputs, Proposal
from lightning_spec.errors import CheckpointError, ConfigError
from lightning_spec.loss.draft import SoftCrossEntropy

Shapes = Callable[..., Any]
Inputs = Callable[..., DraftInputs]
K = 4
PREFIX = "model.mtp_layers.0."
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}},
}


def build(shape: Any, **args: Any) -> MTP:
    draft = MTP(**args)
    draft.build(shape, dtype=torch.float64)
    if "path" not in args:
        with torch.no_grad():
            for p in draft.parameters():
                p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(p.dtype))
    return draft


def propose(draft: MTP, x: DraftInputs, bonus: list[int], **args: Any) -> Proposal:
    features = x.hidden if draft.reads_hidden else x.features
    assert x.policy_embedding is not None
    return draft.propose(
        features, x.tokens, x.lengths, torch.tensor(bonus), K,
        policy_head=x.policy_head, policy_embedding=x.policy_embedding, **args,
    )  # fmt: skip


def edit(folder: Path, **change: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (raw | change).items() if v is not None}))


# ---- proposals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", ["normed", "residual"])
def test_proposals_equal_the_training_passes_on_the_same_prefix(
    reads: str, make_shape: Shapes, make_inputs: Inputs
) -> None:
    """A context of one token among them: its only row stands at position 0."""
    draft = build(make_shape(), num_passes=K, reads=reads)
    context = make_inputs([6, 1, 9], taps=1)
    bonus = [3, 7, 20]
    sampled = propose(draft, context, bonus, temperature=0.9, generator=torch.Generator().manual_seed(0))
    start = 0
    for b, length in enumerate(context.lengths):
        x = make_inputs([length + 1 + K], seed=b + 1, taps=1)
        x.tokens = torch.cat([context.tokens[start : start + length], torch.tensor([bonus[b]]), sampled.tokens[b]])
        x.policy_head, x.policy_embedding = context.policy_head, context.policy_embedding
        assert context.policy_embedding is not None
        x.embeddings = context.policy_embedding[x.tokens]
        for name in ("features", "hidden"):
            getattr(x, name)[:length] = getattr(context, name)[start : start + length]
        x.sampled = torch.arange(length + 1 + K) >= length
        seen: list[Tensor] = []

        class Recorder(SoftCrossEntropy):
            def __call__(self, hidden: Tensor, head: Tensor, *rest: Any, seen: list[Tensor] = seen, **more: Any) -> Any:
                q = (hidden @ head.T / 0.9).softmax(-1).detach()
                seen.extend(rows[0] for rows in q.split([K + 1 - i for i in range(K)]))  # a pass less, a row less
                return super().__call__(hidden, head, *rest, **more)

        draft.set_attention("ring")
        draft(x, Recorder(), draft.counts(x))  # type: ignore[arg-type]
        assert all(torch.allclose(sampled.probs[b, i], seen[i], atol=1e-12) for i in range(K))
        start += length


def test_greedy_proposals_are_the_most_likely_tokens_and_packing_changes_nothing(
    make_shape: Shapes, make_inputs: Inputs
) -> None:
    draft, x = build(make_shape()), make_inputs([6, 4], taps=0)
    greedy = propose(draft, x, [3, 7])
    assert torch.equal(greedy.probs.argmax(-1), greedy.tokens)
    first = replace(x, tokens=x.tokens[:6], hidden=x.hidden[:6], lengths=[6])
    assert torch.equal(propose(draft, first, [3]).tokens, greedy.tokens[:1])


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("options", [{}, {"num_heads": 2, "num_kv_heads": 1, "reads": "residual", "max_positions": 40}])
def test_a_checkpoint_comes_back_bit_for_bit_with_its_settings(
    rope: str, options: dict[str, Any], make_shape: Shapes, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    shape = make_shape(**ROPES[rope])
    draft = build(shape, **options)
    folder = draft.export(tmp_path / "head")
    again, built = build(shape, path=str(folder), seed=99), build(shape, seed=5, **options)
    built.load(folder)
    for other in (again, built):
        assert other.config == draft.config
        assert other.fingerprint() == draft.fingerprint()
        held = dict(other.engine_tensors())
        assert all(torch.equal(held[name], tensor) for name, tensor in draft.engine_tensors())
    assert (again.reads_hidden, again.aux_layer_ids) == (draft.reads_hidden, draft.aux_layer_ids)
    # What the engine reads through transformers.
    config = AutoConfig.from_pretrained(folder)
    assert config.rope_parameters["rope_theta"] == draft.built().rope.theta
    assert config.num_nextn_predict_layers == 1
    assert config.architectures == ["MiMoForCausalLM"]


def test_tensor_names_and_shapes_are_the_engines_and_nothing_shared_is_among_them(
    make_shape: Shapes, tmp_path: Path
) -> None:
    draft = build(make_shape())
    want: dict[str, tuple[int, ...]] = {"input_proj.weight": (16, 32)}
    want |= {f"{n}_layernorm.weight": (16,) for n in ("token", "hidden", "final", "input", "post_attention")}
    want |= {f"self_attn.{n}_proj.weight": (size, 16) for n, size in (("q", 16), ("k", 8), ("v", 8), ("o", 16))}
    want |= {f"self_attn.{n}_proj.bias": (size,) for n, size in (("q", 16), ("k", 8), ("v", 8))}
    want |= {"mlp.gate_proj.weight": (24, 16), "mlp.up_proj.weight": (24, 16), "mlp.down_proj.weight": (16, 24)}
    want = {PREFIX + name: size for name, size in want.items()}
    assert {name: tuple(tensor.shape) for name, tensor in draft.engine_tensors()} == want
    assert {p.name for [p] in draft.placements().values()} == set(want)
    assert set(load_file(draft.export(tmp_path) / "model.safetensors")) == set(want)


def test_the_head_of_a_mimo_policy_s_folder_is_taken_and_the_rest_left(make_shape: Shapes, tmp_path: Path) -> None:
    """MiMo's own config.json: model_type mimo, the policy's layers, no word on what the head reads."""
    shape = make_shape()
    draft = build(shape)
    folder = draft.export(tmp_path)
    edit(folder, model_type="mimo", num_hidden_layers=8, num_nextn_predict_layers=2, mtp_reads=None, head_dim=4)
    tensors = load_file(folder / "model.safetensors")
    others = {name.replace("layers.0", "layers.1"): tensor + 1 for name, tensor in tensors.items()}
    others |= {"model.embed_tokens.weight": torch.ones(23, 16), "lm_head.weight": torch.ones(23, 16)}
    save_file(
        tensors | others | {"model.layers.0.mlp.up_proj.weight": torch.ones(24, 16)}, folder / "model.safetensors"
    )
    for policy, reads, taps in ((shape, "normed", ()), (replace(shape, model_type="mimo"), "residual", (8,))):
        again = build(policy, path=str(folder))
        held = dict(again.engine_tensors())
        assert held.keys() == tensors.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())
        assert (again.built().reads, again.aux_layer_ids, again.reads_hidden) == (reads, taps, not taps)


def test_a_missing_surplus_or_misshapen_tensor_is_named_and_nothing_has_changed(make_shape: Shapes) -> None:
    draft = build(make_shape())
    before = {name: tensor.clone() for name, tensor in draft.engine_tensors()}
    new = {name: tensor + 1 for name, tensor in before.items()}
    lost = PREFIX + "self_attn.v_proj.bias"
    for tensors, error in (
        ({name: tensor for name, tensor in new.items() if name != lost}, "missing .*v_proj.bias"),
        (new | {"lm_head.weight": torch.zeros(23, 16)}, "surplus .*lm_head.weight"),
        (new | {lost: torch.zeros(3)}, "v_proj.bias does not fit"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=error):
            draft.load_tensors(tensors.items(), "refit")
        assert all(torch.equal(tensor, before[name]) for name, tensor in draft.engine_tensors())


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"head_dim": 8}, "head_dim"),
        ({"rope_theta": None, "rope_parameters": None}, "rope_theta"),
        ({"quantization_config": {"bits": 8}}, "quantization_config"),
        ({"vocab_size": 24}, "vocabulary"),
        ({"hidden_size": 32}, "width"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_checkpoint_that_the_engine_would_serve_otherwise_is_refused(
    change: dict[str, Any], key: str, make_shape: Shapes, tmp_path: Path
) -> None:
    folder = build(make_shape()).export(tmp_path)
    edit(folder, **change)
    with pytest.raises(ConfigError, match=key):
        build(make_shape(), path=str(folder))


def test_arguments_that_contradict_or_cannot_be_are_refused(make_shape: Shapes, tmp_path: Path) -> None:
    shape = make_shape()
    folder = str(build(shape).export(tmp_path))
    unfit: list[tuple[dict[str, Any], str]] = [
        ({"path": folder, "num_kv_heads": 1}, "num_kv_heads"),
        ({"path": folder, "reads": "residual"}, "reads"),
        ({"num_heads": 3}, "num_heads"),
        ({"num_heads": 16}, "even size"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"intermediate_size": 0}, "intermediate_size"),
    ]
    for options, key in unfit:
        with pytest.raises(ConfigError, match=key):
            build(shape, **options)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"reads": "taps"}, "reads"),
        ({"num_passes": 0}, "num_passes"),
        ({"recycle": "no"}, "recycle"),
        ({"pass_weights": [1.0]}, "pass_weights"),
    ]
    for options, key in wrong:
        with pytest.raises(ConfigError, match=key):
            MTP(**options)
    other = build(shape, num_heads=2)
    with pytest.raises(ConfigError, match="num_heads"):
        other.load(folder)


def test_positions_may_be_raised_and_longer_rollouts_are_refused(make_shape: Shapes, tmp_path: Path) -> None:
    shape = make_shape(**ROPES["yarn"])
    folder = str(build(shape).export(tmp_path))
    with pytest.raises(ConfigError, match="max_positions"):
        build(shape, path=folder).check_length(65)
    longer = build(shape, path=folder, max_positions=128)
    longer.check_length(128)
    scaling = longer.built().rope.scaling
    assert scaling is not None
    assert scaling["original_max_position_embeddings"] == 64


def test_without_its_parameters_a_head_still_counts_and_describes_itself(
    make_shape: Shapes, make_inputs: Inputs
) -> None:
    whole, bare = build(make_shape()), build(make_shape())
    bare.drop_parameters()
    x = make_inputs([9], taps=0)
    assert {k: float(v) for k, v in bare.counts(x).items()} == {k: float(v) for k, v in whole.counts(x).items()}  # type: ignore[arg-type]
    assert bare.fingerprint() == whole.fingerprint()
    assert bare.row_products() == whole.row_products() > 0
    assert bare.work(64, 32, 2, 4) == whole.work(64, 32, 2, 4)
    assert bare.speculative_config(3) == {"method": "mtp", "num_speculative_tokens": 3}
    with pytest.raises(RuntimeError, match="another pipeline stage"):
        bare(x, SoftCrossEntropy(), {})


def test_building_takes_nothing_from_the_global_random_state(make_shape: Shapes) -> None:
    state = torch.get_rng_state()
    first, second, third = (MTP(seed=seed) for seed in (1, 1, 2))
    for draft in (first, second, third):
        draft.build(make_shape())
    assert torch.equal(state, torch.get_rng_state())
    weights = [draft.layer.input_proj.weight for draft in (first, second, third)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
