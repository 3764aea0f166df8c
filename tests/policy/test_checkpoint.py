"""Policies from and to Hugging Face folders: bit-exact, whole or not at all, faults named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_spec.errors import CheckpointError, ConfigError
from lightning_spec.policy import (
    build_policy,
    embedding_weight,
    export_policy,
    has_weights,
    head_weight,
    hf_tensors,
    initial_weight,
    load_policy,
    new_policy_config,
    policy_from_folder,
    write_policy,
)
from lightning_spec.policy.config import megatron_config
from lightning_spec.shapes import PolicyShape

Packed = tuple[Tensor, Tensor, list[int]]
MakeHF = Callable[..., tuple[Any, Path]]


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize(
    "family", ["llama-attention-bias", "llama-tied", "llama-mlp-bias", "llama-wide-heads", "qwen2", "qwen3"]
)
@pytest.mark.parametrize("multiple", [1, 64])
def test_load_then_export_gives_back_every_bit_and_transformers_reads_it(
    family: str, multiple: int, hf_policy: MakeHF, packed: Packed, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    reference, folder = hf_policy(family)
    tokens, _, _ = packed
    export_policy(policy_from_folder(folder, vocab_multiple=multiple), tmp_path / "out")
    assert_same(weights_of(tmp_path / "out"), weights_of(folder))
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(again(tokens[None]).logits, reference(tokens[None]).logits)
    assert PolicyShape.from_file(tmp_path / "out") == PolicyShape.from_file(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_exported_dtype_is_the_models(dtype: torch.dtype, hf_policy: MakeHF, tmp_path: Path) -> None:
    _, folder = hf_policy("qwen3")
    export_policy(policy_from_folder(folder, dtype=dtype), tmp_path / "out")
    assert_same(weights_of(tmp_path / "out"), {name: t.to(dtype) for name, t in weights_of(folder).items()})
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_a_large_model_is_cut_into_files_with_an_index(hf_policy: MakeHF, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference, folder = hf_policy("llama-all-kv-heads")
    policy = policy_from_folder(folder)
    export_policy(policy, tmp_path / "out", max_shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(sum(t.nbytes for t in load_file(tmp_path / "out" / f).values()) <= 20_000 for f in files)
    assert_same(weights_of(tmp_path / "out"), weights_of(folder))
    assert_same(dict(hf_tensors(policy_from_folder(tmp_path / "out"))), dict(hf_tensors(policy)))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(dict(again.named_parameters()), dict(reference.named_parameters()))


def test_a_tied_head_follows_the_embedding(hf_policy: MakeHF, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = policy_from_folder(hf_policy("llama-tied")[1])
    with torch.no_grad():
        embedding_weight(policy).mul_(2)
    assert torch.equal(head_weight(policy), embedding_weight(policy))
    export_policy(policy, tmp_path / "out")
    assert "lm_head.weight" not in weights_of(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, head_weight(policy))
    assert torch.equal(head_weight(policy_from_folder(tmp_path / "out")), head_weight(policy))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_tied_checkpoint_may_carry_a_head_that_equals_the_embedding(hf_policy: MakeHF) -> None:
    _, folder = hf_policy("llama-tied")
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in dict(hf_tensors(policy_from_folder(folder)))
    change(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs.*tie_word_embeddings"):
        policy_from_folder(folder)


FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), r"lacks 1 tensors.*layers\.2\.mlp\.up_proj"),
    "missing head": (lambda t: t.pop("lm_head.weight"), r"lacks 1 tensors.*lm_head\.weight"),
    "surplus": (
        lambda t: t.update({"model.layers.4.mlp.up_proj.weight": torch.zeros(1)}),
        r"no place for: model\.layers\.4\.mlp\.up_proj\.weight",
    ),
    "surplus bias": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
        r"no place for: model\.layers\.0\.self_attn\.q_proj\.bias",
    ),
    "shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(31)}),
        r"model\.norm\.weight \[31\] instead of \[32\]",
    ),
    "transposed": (
        lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.ones(48, 32)}),
        r"down_proj\.weight \[48, 32\] instead of \[32, 48\]",
    ),
    "quantised": (
        lambda t: t.update({"model.layers.1.mlp.down_proj.weight": torch.ones(32, 48, dtype=torch.int8)}),
        r"layers\.1\.mlp\.down_proj\.weight \(I8\).*quantised",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_checkpoint_names_the_tensor_and_changes_no_weight(fault: str, hf_policy: MakeHF) -> None:
    _, folder = hf_policy("llama")
    edit, message = FAULTS[fault]
    change(folder, edit)
    policy = build_policy(PolicyShape.from_file(folder), seed=1)
    before = {name: tensor.clone() for name, tensor in hf_tensors(policy)}
    with pytest.raises(CheckpointError, match=message):
        load_policy(policy, folder)
    assert_same(dict(hf_tensors(policy)), before)


def test_a_truncated_file_names_the_tensors_it_lost(hf_policy: MakeHF) -> None:
    _, folder = hf_policy("llama")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"truncated: .* the data of \S+\.weight is not all there"):
        policy_from_folder(folder)
    for cut in (0, 5, 100):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match="its header is torn"):
            policy_from_folder(folder)
    path.write_bytes(whole[:8] + b"x" * (len(whole) - 8))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        policy_from_folder(folder)


def test_an_index_that_disagrees_with_its_files_is_refused(hf_policy: MakeHF, tmp_path: Path) -> None:
    policy = policy_from_folder(hf_policy("llama")[1])
    out = tmp_path / "out"

    def fresh() -> tuple[Path, dict[str, Any]]:
        export_policy(policy, out, max_shard_bytes=20_000)
        return out / "model.safetensors.index.json", json.loads((out / "model.safetensors.index.json").read_text())

    index, content = fresh()
    content["weight_map"]["model.norm.weight"] = content["weight_map"]["model.embed_tokens.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"places model\.norm\.weight in model-00001"):
        policy_from_folder(out)
    index, content = fresh()
    (out / content["weight_map"]["model.norm.weight"]).unlink()
    with pytest.raises(CheckpointError, match="which is not there; it holds"):
        policy_from_folder(out)
    index, _ = fresh()
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="not an index"):
        policy_from_folder(out)


def test_config_json_alone_starts_from_random_weights_but_unread_formats_do_not(tmp_path: Path) -> None:
    raw = new_policy_config(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert not has_weights(tmp_path)
    one, same, other = (policy_from_folder(tmp_path, seed=seed) for seed in (1, 1, 2))
    assert_same(dict(hf_tensors(one)), dict(hf_tensors(same)))
    assert not torch.equal(embedding_weight(one), embedding_weight(other))
    with pytest.raises(CheckpointError, match="holds neither"):
        load_policy(one, tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        policy_from_folder(tmp_path / "nowhere")
    for strange in ("pytorch_model.bin", "model-00001-of-00002.safetensors", "smol.gguf"):
        (tmp_path / strange).write_bytes(b"")
        with pytest.raises(CheckpointError, match=strange):
            policy_from_folder(tmp_path)
        (tmp_path / strange).unlink()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_policy_from_scratch_exports_to_what_transformers_reads(kind: str, tmp_path: Path, packed: Packed) -> None:
    from transformers import AutoModelForCausalLM

    raw = new_policy_config(kind, vocab_size=96, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
    policy = build_policy(PolicyShape.from_hf(raw), seed=3)
    export_policy(policy, tmp_path / "out")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = packed[0]
    with torch.no_grad():
        ours = policy(tokens, torch.arange(len(tokens)), [len(tokens)]) @ head_weight(policy).T
        torch.testing.assert_close(ours, reference(tokens[None]).logits[0], atol=1e-5, rtol=1e-5)


def test_export_copies_the_tokenizer_and_replaces_an_older_export_whole(hf_policy: MakeHF, tmp_path: Path) -> None:
    policy = policy_from_folder(hf_policy("llama")[1])
    source, out = tmp_path / "source", tmp_path / "exports" / "out"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "README.md"):
        (source / name).write_text(name)
    export_policy(policy, out, tokenizer_from=source, max_shard_bytes=20_000)
    assert (out / "tokenizer.json").read_text() == "tokenizer.json"
    assert not (out / "README.md").exists()
    export_policy(policy, out, tokenizer_from=out)
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert out.stat().st_mode & 0o055 == 0o055


def test_an_export_that_fails_leaves_the_older_one_untouched(
    hf_policy: MakeHF, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_spec.policy import tensor_folder

    policy = policy_from_folder(hf_policy("llama")[1])
    out = tmp_path / "exports" / "out"
    export_policy(policy, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with torch.no_grad():
        head_weight(policy).mul_(2)

    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(tensor_folder, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        export_policy(policy, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_tensors_are_written_as_they_come_and_may_share_a_buffer(hf_policy: MakeHF, tmp_path: Path) -> None:
    _, folder = hf_policy("qwen2")
    policy = policy_from_folder(folder)
    tensors = dict(hf_tensors(policy))
    buffer = torch.empty(max(tensor.numel() for tensor in tensors.values()))

    def streamed() -> Iterator[tuple[str, Tensor]]:
        for name in sorted(tensors, reverse=True):  # no checkpoint's order
            view = buffer[: tensors[name].numel()].view(tensors[name].shape)
            yield name, view.copy_(tensors[name])

    write_policy(tmp_path / "out", policy.shape, torch.float32, streamed(), max_shard_bytes=20_000)
    assert_same(weights_of(tmp_path / "out"), weights_of(folder))
    assert_same(dict(hf_tensors(policy_from_folder(tmp_path / "out"))), tensors)


def test_an_export_without_all_tensors_is_none(hf_policy: MakeHF, tmp_path: Path) -> None:
    policy = policy_from_folder(hf_policy("qwen2")[1])
    tensors = list(hf_tensors(policy))
    head = tensors[-1]
    faults: list[tuple[list[tuple[str, Tensor]], str]] = [
        (tensors[:-2], r"2 tensors never came: model\.norm\.weight, lm_head\.weight"),
        ([*tensors, head], r"lm_head\.weight \[96, 32\] came where the policy has a new name"),
        ([("model.layers.9.mlp.up_proj.weight", head[1])], r"no such tensor"),
        ([(head[0], head[1][:95])], r"lm_head\.weight \[95, 32\] came where the policy has \[96, 32\]"),
    ]
    for given, message in faults:
        with pytest.raises(CheckpointError, match=message):
            write_policy(tmp_path / "out", policy.shape, torch.float32, given)
        assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("family", ["llama-tied", "qwen2"])
@pytest.mark.parametrize("weights", [True, False], ids=["loaded", "drawn"])
def test_any_first_weight_can_be_had_without_a_policy(weights: bool, family: str, hf_policy: MakeHF) -> None:
    _, folder = hf_policy(family)
    if not weights:
        (folder / "model.safetensors").unlink()
    policy = policy_from_folder(folder, seed=4, dtype=torch.bfloat16)
    for name, tensor in hf_tensors(policy):
        assert torch.equal(initial_weight(folder, policy.shape, name, 4, torch.bfloat16), tensor)
    head = initial_weight(folder, policy.shape, "lm_head.weight", 4, torch.bfloat16)
    assert torch.equal(head, head_weight(policy))
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.bias"):
        initial_weight(folder, policy.shape, "lm_head.bias")


def test_export_refuses_to_delete_what_is_not_an_export(hf_policy: MakeHF, tmp_path: Path) -> None:
    policy = policy_from_folder(hf_policy("llama")[1])
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"chapter1\.tex.*choose another folder"):
        export_policy(policy, tmp_path / "thesis")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        export_policy(policy, tmp_path / "file")
    assert (tmp_path / "thesis" / "chapter1.tex").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute_granulariti": "full"}, r"unknown Megatron option.*megatron\.recompute_granulariti"),
        ({"num_layers": 3}, r"config\.json decides.*num_layers=3.*megatron\.num_layers"),
        ({"perform_initialization": False}, r"megatron\.perform_initialization"),
    ],
)
def test_megatron_options_that_cannot_be_honoured_are_refused(options: dict[str, Any], message: str) -> None:
    shape = PolicyShape.from_hf(new_policy_config(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4))
    with pytest.raises(ConfigError, match=message):
        megatron_config(shape, **options)


def test_sizes_that_no_policy_can_have_are_refused() -> None:
    good: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    shape = PolicyShape.from_hf(new_policy_config(**good))
    for changes, message in (
        ({"num_heads": 5}, "heads do not divide the hidden size"),
        ({"num_kv_heads": 3}, "query heads do not divide"),
        ({"model_type": "gpt2"}, "unsupported model family"),
        ({"num_layers": 0}, "bad num_hidden_layers"),
    ):
        with pytest.raises(ConfigError, match=message):
            new_policy_config(**{**good, **changes})
    with pytest.raises(ConfigError, match=r"unsupported dtype.*model\.dtype"):
        build_policy(shape, dtype=torch.float16)
    with pytest.raises(ConfigError, match="vocab_multiple"):
        build_policy(shape, vocab_multiple=0)
