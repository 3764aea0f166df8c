"""Files that compose files: who wins, what merges, and what is refused."""

from __future__ import annotations

import pytest

from lightning_spec.compose import load, merge, nearest
from lightning_spec.errors import ConfigError


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(files))}.yaml"


def test_later_files_win_over_earlier_ones_and_the_file_itself_over_all(tmp_path):
    top = write(tmp_path, top="compose: [a.yaml, b.yaml]\nz: 3\n", a="x: 1\ny: 1\nz: 1\n", b="y: 2\nz: 2\n")
    assert load(top).values == {"x": 1, "y": 2, "z": 3}


def test_paths_are_relative_to_the_file_that_names_them(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "top.yaml").write_text("compose: [../mid.yaml]\n")
    write(tmp_path, mid="compose: [low.yaml]\nb: 2\n", low="a: 1\n")
    assert load(tmp_path / "deep" / "top.yaml").values == {"a": 1, "b": 2}


def test_each_key_remembers_the_file_and_line_that_set_it(tmp_path):
    top = write(tmp_path, top="compose: [a.yaml]\ng:\n  x: 1\n", a="g: {x: 0, y: 0}\n")
    origin = load(top).origin
    assert origin["g.x"].endswith("top.yaml:3")
    assert origin["g.y"].endswith("a.yaml:1")


def test_another_class_replaces_the_old_one_with_its_arguments_and_the_same_class_merges():
    low = {"e": {"class_path": "A", "init_args": {"x": 1, "y": 1}}}
    same = merge(low, {"e": {"class_path": "A", "init_args": {"x": 2}}})
    assert same["e"]["init_args"] == {"x": 2, "y": 1}
    other = merge(low, {"e": {"class_path": "B", "init_args": {"z": 1}}})
    assert other["e"] == {"class_path": "B", "init_args": {"z": 1}}
    assert merge(low, {"e": None})["e"] is None


def test_lists_replace_and_plus_appends():
    assert merge({"l": [1]}, {"l": [2]}) == {"l": [2]}
    assert merge({"l": [1]}, {"l+": [2]}) == {"l": [1, 2]}
    assert merge({}, {"l+": [2]}) == {"l+": [2]}, "left to the parser, which appends to its default"


def test_numbers_in_exponent_form_are_numbers(tmp_path):
    assert load(write(tmp_path, top="lr: 1e-4\ns: 1e-4x\n")).values == {"lr": 1e-4, "s": "1e-4x"}


def test_an_empty_file_is_an_empty_configuration(tmp_path):
    assert load(write(tmp_path, top="# nothing\n")).values == {}


@pytest.mark.parametrize(
    ("files", "what", "key"),
    [
        ({"top": "a: [1\n"}, "not valid YAML", "top.yaml:2"),
        ({"top": "- a\n"}, "holds a mapping", "top.yaml"),
        ({"top": "a: 1\nb: 2\na: 3\n"}, "given twice", "top.yaml:3"),
        ({"top": "compose: base.yaml\n"}, "bad compose list", "compose"),
        ({"top": "compose: [bas.yaml]\n", "base": "x: 1\n"}, "no such configuration file", "compose"),
        ({"top": "compose: [b.yaml]\n", "b": "compose: [top.yaml]\n"}, "circle", "compose"),
    ],
)
def test_bad_files_are_refused_with_their_place(tmp_path, files, what, key):
    with pytest.raises(ConfigError, match=what) as caught:
        load(write(tmp_path, **files))
    assert key in caught.value.key


def test_a_missing_file_names_the_nearest(tmp_path):
    write(tmp_path, demo_grpo="x: 1\n")
    with pytest.raises(ConfigError, match="demo_grpo"):
        load(tmp_path / "demo_grop.yaml")


def test_the_nearest_word_or_all_of_them():
    assert nearest("polcy", ["policy", "draft"], "one of") == "`policy`"
    assert nearest("xyz", ["policy", "draft"], "one of") == "one of (draft, policy)"
