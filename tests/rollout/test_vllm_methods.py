"""What vLLM would refuse after minutes, or serve wrongly, of a draft's folder is refused by name before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_spec.errors import ConfigError
from lightning_spec.rollout.engine import EngineFiles
from lightning_spec.rollout.speculation import Speculation
from lightning_spec.rollout.vllm_checks import check_draft

POLICY = {"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 8}
POLICY |= {"num_attention_heads": 2, "max_position_embeddings": 128}
COMMON = {"vocab_size": 100, "hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}
DFLASH: dict[str, Any] = {
    **COMMON,
    "architectures": ["DFlashDraftModel"],
    "block_size": 4,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 6]},
}
DSPARK = {**DFLASH, "architectures": ["Qwen3DSparkModel"], "block_size": 3}
MTP = {**COMMON, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "mtp_reads": "normed"}
MODEL = {**COMMON, "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "num_attention_heads": 3, "head_dim": 32}
EAGLE = {**COMMON, "architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
GOOD = {"dflash": DFLASH, "dspark": DSPARK, "mtp": MTP, "draft_model": MODEL, "eagle3": EAGLE}


def check(method: str, config: dict[str, Any], folder: Path, k: int = 3, on_cpu: bool = False, **policy: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    speculation = Speculation(method, k)  # type: ignore[arg-type]
    check_draft(speculation, EngineFiles(folder, folder), {**POLICY, **policy}, 128, on_cpu)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a test's name in it, which may be a method's."""
    return tmp_path_factory.mktemp("d")


@pytest.mark.parametrize("method", GOOD)
def test_a_draft_of_the_method_passes_and_one_of_any_other_is_refused(method: str, folder: Path) -> None:
    check(method, GOOD[method], folder)
    for other in GOOD.keys() - {method}:
        with pytest.raises(ConfigError, match=f"served by method {other}, not {method}"):
            check(method, GOOD[other], folder)


@pytest.mark.parametrize("method", GOOD)
def test_another_vocabulary_and_fewer_positions_are_refused_and_so_is_no_draft(method: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="vocabulary is not the policy's"):
        check(method, {**GOOD[method], "vocab_size": 99}, folder)
    with pytest.raises(ConfigError, match="fewer positions"):
        check(method, {**GOOD[method], "max_position_embeddings": 64}, folder)
    with pytest.raises(ConfigError, match="needs a draft"):
        check_draft(Speculation(method, 3), EngineFiles(folder), POLICY, None, False)  # type: ignore[arg-type]


def test_dspark_on_a_cpu_names_the_reference_engine_s_file(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"configs/rollout/reference\.yaml"):
        check("dspark", DSPARK, folder, on_cpu=True)


@pytest.mark.parametrize(("method", "most"), [("dflash", 3), ("dspark", 3)])
def test_a_block_gives_at_most_the_proposals_it_was_trained_for(method: str, most: int, folder: Path) -> None:
    check(method, GOOD[method], folder, k=most)
    with pytest.raises(ConfigError, match=f"at most {most}") as caught:
        check(method, GOOD[method], folder, k=most + 1)
    assert "num_speculative_tokens" in str(caught.value)


@pytest.mark.parametrize(
    ("nested", "needed"),
    [
        ({"mask_token_id": 100, "target_layer_ids": [1]}, "mask token"),
        ({"target_layer_ids": [1]}, "mask token"),
        ({"mask_token_id": 3, "target_layer_ids": [1, 8]}, "target_layer_ids"),
        ({"mask_token_id": 3, "target_layer_ids": [3, 1]}, "target_layer_ids"),
        ({"mask_token_id": 3, "target_layer_ids": []}, "target_layer_ids"),
        ({"mask_token_id": 3}, "target_layer_ids"),
    ],
)
def test_a_block_draft_needs_a_mask_token_and_layers_that_exist(
    nested: dict[str, Any], needed: str, folder: Path
) -> None:
    for method in ("dflash", "dspark"):
        with pytest.raises(ConfigError, match=needed):
            check(method, {**GOOD[method], "dflash_config": nested}, folder)


@pytest.mark.parametrize("method", ["dflash", "dspark", "mtp", "eagle3"])
def test_a_draft_of_another_width_is_refused_where_it_reads_the_policy(method: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="another hidden size"):
        check(method, {**GOOD[method], "hidden_size": 96}, folder)


def test_an_mtp_head_is_refused_that_was_trained_on_other_states_than_the_engine_gives(folder: Path) -> None:
    check("mtp", {**MTP, "mtp_reads": "residual"}, folder, model_type="mimo")
    with pytest.raises(ConfigError, match=r"model\.draft\.init_args\.reads"):
        check("mtp", {**MTP, "mtp_reads": "residual"}, folder)
    with pytest.raises(ConfigError, match="in turns"):
        check("mtp", {**MTP, "num_nextn_predict_layers": 2}, folder)
    with pytest.raises(ConfigError, match="no MTP layer"):
        check("mtp", {**MTP, "num_nextn_predict_layers": 0}, folder)


@pytest.mark.parametrize("name", ["my-eagle3-run", "DFlash", "dspark", "eagle-1"])
def test_a_path_from_which_vllm_would_tell_another_method_is_refused(name: str, folder: Path) -> None:
    for method in ("mtp", "draft_model"):
        with pytest.raises(ConfigError, match=r"rollout\.workdir"):
            check(method, GOOD[method], folder / name)
    check("dflash", DFLASH, folder / name)
