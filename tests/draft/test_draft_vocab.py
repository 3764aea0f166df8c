"""The reduced draft vocabulary: target id = draft id + d2t[draft id]."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_spec.draft import VocabMap
from lightning_spec.errors import ConfigError


def test_the_most_frequent_tokens_are_kept_ascending_with_ties_to_the_lower_id() -> None:
    vocab = VocabMap.from_counts([5, 0, 9, 5, 5, 1], 3, 6)
    assert vocab.target_ids.tolist() == [0, 2, 3]
    assert vocab.d2t.tolist() == [0, 1, 1]
    assert vocab.t2d.tolist() == [True, False, True, True, False, False]
    assert VocabMap.from_counts({5: 7, 1: 2}, 2, 6).target_ids.tolist() == [1, 5]


def test_stop_tokens_can_be_kept_whatever_their_count() -> None:
    assert VocabMap.from_counts([5, 0, 9, 5, 5, 1], 3, 6, always=(1,)).target_ids.tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        VocabMap.from_counts([1] * 6, 1, 6, always=(1, 2))


@pytest.mark.parametrize("size", [0, 7])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        VocabMap.from_counts([1] * 6, size, 6)


def test_offsets_and_ids_are_inverse() -> None:
    ids = torch.tensor([5, 0, 3])  # need not ascend
    vocab = VocabMap(ids, 6)
    assert VocabMap.from_d2t(vocab.d2t, 6).target_ids.tolist() == [5, 0, 3]


@pytest.mark.parametrize(
    ("ids", "match"), [([0, 0], "one target id"), ([0, 6], "leaves"), ([-1, 2], "leaves"), ([], "bad draft vocabulary")]
)
def test_maps_that_repeat_or_leave_the_vocabulary_are_refused(ids: list[int], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        VocabMap(torch.tensor(ids, dtype=torch.int64), 6)


def test_maps_are_read_from_each_kind_of_file_and_others_are_refused(tmp_path: Path) -> None:
    want = [0, 2, 3]
    (tmp_path / "ids.json").write_text(json.dumps({"target_ids": want}))
    (tmp_path / "counts.json").write_text(json.dumps({"counts": {"2": 9, "0": 5, "3": 5, "4": 5}}))
    save_file({"d2t": torch.tensor([0, 1, 1])}, tmp_path / "map.safetensors")
    for name in ("ids.json", "counts.json", "map.safetensors"):
        assert VocabMap.from_file(tmp_path / name, 3, 6).target_ids.tolist() == want
    save_file({"t2d": torch.tensor([0])}, tmp_path / "other.safetensors")
    (tmp_path / "list.json").write_text("[1]")
    for name in ("other.safetensors", "list.json", "absent.json"):
        with pytest.raises(ConfigError, match="vocab_map"):
            VocabMap.from_file(tmp_path / name, 3, 6)
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        VocabMap.from_file(tmp_path / "counts.json", None, 6)
