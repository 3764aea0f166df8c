"""Prompt sources and recorded rollouts: what they read, and what they refuse, with the place of the fault."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_spec.batch import Completion, Prompt, Rollout, SpecStats
from lightning_spec.errors import ConfigError
from lightning_spec.recorded import load_rollouts, rollout_from_dict, rollout_to_dict, save_rollouts
from lightning_spec.sources import Example, HFDatasetPrompts, JSONLPrompts, ReasoningGymPrompts
from lightning_spec.tokenizer import char_tokenizer, decode, load_tokenizer
from lightning_spec.worked import ANSWER_PATTERN, WORKED_TASKS

ROWS = [{"q": "1+1", "a": "2", "w": "1+1=2"}, {"q": "2+2", "a": "4", "w": "\u2028é"}]


def write(path, rows):
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    return str(path)


def test_jsonl_rows_become_examples(tmp_path):
    source = JSONLPrompts(write(tmp_path / "p.jsonl", ROWS), "q", "a", "w")
    assert len(source) == 2
    assert source.has_worked
    item = source.item(1)
    assert (item.uid, item.prompt, item.task, item.worked) == ("p.jsonl:1", "2+2", {"answer": "4"}, "\u2028é")
    assert JSONLPrompts(source.path, "q", None).item(0).task == {}


def test_hf_datasets_on_disk_give_the_same_examples_as_jsonl(tmp_path):
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "arrow")
    data.to_parquet(tmp_path / "p.parquet")
    (tmp_path / "folder").mkdir()
    data.to_parquet(tmp_path / "folder" / "part0.parquet")
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "splits")
    (tmp_path / "array.json").write_text(json.dumps(ROWS))
    write(tmp_path / "lines.jsonl", ROWS)
    wanted = [JSONLPrompts(str(tmp_path / "lines.jsonl"), "q", "a", "w").item(i) for i in range(2)]
    for name, split in [
        ("arrow", None),
        ("p.parquet", None),
        ("folder", None),
        ("splits", "test"),
        ("array.json", None),
        ("lines.jsonl", None),
    ]:
        source = HFDatasetPrompts(str(tmp_path / name), split, "q", "a", "w")
        assert len(source) == 2
        assert [source.item(i).prompt for i in range(2)] == [w.prompt for w in wanted]
        assert [source.item(i).worked for i in range(2)] == [w.worked for w in wanted]
        assert [source.item(i).task for i in range(2)] == [w.task for w in wanted]
    with pytest.raises(ConfigError, match=r"data\.source\.split"):
        HFDatasetPrompts(str(tmp_path / "splits"), "valid", "q").prepare()
    with pytest.raises(ConfigError, match=r"data\.source\.split"):
        HFDatasetPrompts(str(tmp_path / "arrow"), "train", "q").prepare()


def lines(*rows):
    return "\n".join(rows)


MALFORMED = [
    (lines('{"q": "a", "a": "b"}', "{broken"), "line 2", "data.source.path"),
    (lines('{"q": "a", "a": "b"}', "", "[1]"), "line 3", "data.source.path"),
    (lines('{"q": "a", "a": "b"}', '{"Q": "a", "a": "b"}'), "line 2: no field 'q'", "data.source.prompt"),
    (lines('{"q": "a", "ans": "b"}'), "no field 'a'", "data.source.answer"),
    (lines('{"q": 7, "a": "b"}'), "neither text nor chat", "data.source.prompt"),
    (lines('{"q": [{"role": "user"}], "a": "b"}'), "neither text nor chat", "data.source.prompt"),
    ("\n\n", "no prompts", "data.source.path"),
    ("", "no prompts", "data.source.path"),
    (None, "no such file", "data.source.path"),
    (b"\xff\xfe\x00", "not UTF-8", "data.source.path"),
]


@pytest.mark.parametrize(("content", "message", "key"), MALFORMED)
def test_malformed_files_are_refused_with_line_and_key(tmp_path, content, message, key):
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as error:
        JSONLPrompts(str(path), "q", "a").prepare()
    assert message in str(error.value)
    assert error.value.key == key


def test_malformed_datasets_are_refused(tmp_path):
    (tmp_path / "bad.parquet").write_text("nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text('[{"q": 1},')
    for name, message in [
        ("none", "no such dataset"),
        ("bad.parquet", "cannot be read"),
        ("empty", "cannot be read"),
        ("bad.json", "broken JSON"),
    ]:
        with pytest.raises(ConfigError, match=message):
            HFDatasetPrompts(str(tmp_path / name), None, "q").prepare()


@pytest.mark.parametrize(
    ("kwargs", "message", "key"),
    [
        ({"task": "chain_sun"}, "did you mean 'chain_sum'", "data.source.task"),
        ({"task": "chain_sum", "config": {"max_term": 3}}, "did you mean 'max_terms'", "data.source.config.max_term"),
        ({"task": "chain_sum", "config": {"min_terms": 9, "max_terms": 2}}, "refuses", "data.source.config"),
        ({"task": "chain_sum", "config": {"seed": 2}}, "unknown setting", "data.source.config.seed"),
        ({"task": "chain_sum", "size": 0}, "bad number", "data.source.size"),
        ({"task": "caesar_cipher", "worked": True}, "no worked solutions", "data.source.worked"),
        ({"task": "spell_backwards", "worked": True}, "did you mean 'spell_backward'", "data.source.worked"),
    ],
)
def test_wrong_procedural_settings_are_refused_with_the_nearest_name(kwargs, message, key):
    with pytest.raises(ConfigError) as error:
        ReasoningGymPrompts(**kwargs).prepare()
    assert message in str(error.value)
    assert error.value.key == key


def test_procedural_items_depend_on_settings_seed_and_index_only():
    a, b = (ReasoningGymPrompts("chain_sum", size=50, seed=3) for _ in range(2))
    for _ in range(3):
        b.item(7)
    assert [a.item(i) for i in range(10)] == [b.item(i) for i in range(10)]
    assert a.item(0).prompt != ReasoningGymPrompts("chain_sum", size=50, seed=99).item(0).prompt
    assert a.item(4).prompt.startswith("State the final answer")
    assert json.loads(json.dumps(a.item(4).task)) == a.item(4).task


CONFIGS = {
    "chain_sum": {"min_terms": 2, "max_terms": 6, "max_digits": 3, "allow_negation": True},
    "spell_backward": {},
    "number_sorting": {"max_decimals": 1},
}


@pytest.mark.parametrize("task", sorted(WORKED_TASKS))
def test_worked_solutions_earn_full_reward_from_the_tasks_own_verifier(task):
    from lightning_spec.rollout.rewards import ReasoningGymReward

    source = ReasoningGymPrompts(task, CONFIGS[task], size=60, seed=1, worked=True)
    reward = ReasoningGymReward(extract=ANSWER_PATTERN)
    for i in range(60):
        item = source.item(i)
        prompt = Prompt(item.uid, (1,), str(item.prompt), item.task)
        assert reward(prompt, Completion((2,), (0.0,), "stop"), item.worked) == 1.0, item
        wrong = item.worked[:-1] + ("1" if item.worked[-1] != "1" else "2")
        assert reward(prompt, Completion((2,), (0.0,), "stop"), wrong) == 0.0, wrong


def test_worked_chain_sum_writes_each_running_total():
    entry = {"answer": "-4", "metadata": {"expression": "4 - 1 - 7"}}
    assert WORKED_TASKS["chain_sum"].prompt(entry) == "4-1-7="
    assert WORKED_TASKS["chain_sum"].worked(entry) == "4-1=3;3-7=-4;#-4"


# Tokenizer


def test_the_character_tokenizer_round_trips_and_its_ids_are_stable(tmp_path):
    built = char_tokenizer(tmp_path / "t")
    loaded = load_tokenizer(tmp_path / "t")
    text = "\n" + "".join(chr(c) for c in range(32, 127)) + "  a , b .  "
    for tokenizer in (built, loaded):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == 1
        assert ids[1:97] == list(range(4, 100))
        assert decode(tokenizer, [*ids, 2, 0]) == text
        assert len(tokenizer) == 100
        specials = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
        assert specials == (0, 1, 2, 3)
        assert tokenizer("é", add_special_tokens=False)["input_ids"] == [3]


# Recorded rollouts

ids = st.lists(st.integers(0, 2**31), max_size=6).map(tuple)
number = st.floats(allow_nan=False)
text = st.text(max_size=8)


@st.composite
def rollouts(draw):
    tokens = draw(ids)
    floats = st.lists(number, min_size=len(tokens), max_size=len(tokens)).map(tuple)
    spec = draw(st.none() | st.builds(SpecStats, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), ids))
    return Rollout(
        Prompt(draw(text), draw(ids), draw(text), {"answer": draw(text), "n": [1, {"x": None}]}, draw(st.none() | ids)),
        Completion(tokens, draw(floats), draw(st.sampled_from(["stop", "length"])), draw(st.integers(0, 99)), spec),
        draw(text),
        draw(number),
        {"exact": draw(number)},
        draw(number),
        draw(st.booleans()),
        draw(st.none() | floats),
        draw(st.none() | floats),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=st.lists(rollouts(), min_size=1, max_size=4))
def test_recorded_rollouts_round_trip_exactly(tmp_path, made):
    path = tmp_path / "r.jsonl"
    assert save_rollouts(path, made) == len(made)
    back = load_rollouts(path)
    assert back == made
    assert [hash(r.completion) for r in back] == [hash(r.completion) for r in made]
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


def good_row():
    return rollout_to_dict(
        Rollout(Prompt("u", (1,), "x"), Completion((5, 2), (-0.1, -0.2), "stop"), "g", old_logprobs=(0.0, 0.0))
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r["completion"].update(logprobs=[0.0]),
        lambda r: r["completion"].update(finish="eos"),
        lambda r: r["completion"].update(tokens=[1.5, 2]),
        lambda r: r["completion"].pop("tokens"),
        lambda r: r.pop("group"),
        lambda r: r.pop("prompt"),
        lambda r: r.update(surplus=1),
        lambda r: r.update(old_logprobs=[0.0]),
        lambda r: r.update(prompt="text"),
        lambda r: r["completion"].update(logprobs=["a", 1.0]),
    ],
)
def test_lines_that_are_not_rollouts_are_refused_by_number(tmp_path, spoil):
    assert rollout_from_dict(good_row())
    row = json.loads(json.dumps(good_row()))
    spoil(row)
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(good_row()) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="line 2 is not a rollout"):
        load_rollouts(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="no rollouts"):
        load_rollouts(path)


def test_a_share_of_worked_answers_is_careless_the_same_ones_each_time_and_the_verifier_is_not_fooled():
    def items(flaws: float) -> list[Example]:
        source = ReasoningGymPrompts("chain_sum", {"max_digits": 1}, size=200, worked=True, flaws=flaws)
        return [source.item(i) for i in range(200)]

    half, right = items(0.5), items(0.0)
    assert half == items(0.5)
    wrong = [a for a, b in zip(half, right, strict=True) if a.worked != b.worked]
    assert 70 < len(wrong) < 130
    for a, b in zip(half, right, strict=True):
        assert str(a.worked).split("#")[0] == str(b.worked).split("#")[0]
        assert a.task == b.task
    assert all(str(item.worked).split("#")[1] != item.task["answer"] for item in wrong)


@pytest.mark.parametrize(("task", "flaws"), [("chain_sum", 1.5), ("spell_backward", 1.0)])
def test_flaws_out_of_range_or_of_a_task_without_numbers_are_refused(task, flaws):
    with pytest.raises(ConfigError, match=r"data\.source\.flaws"):
        ReasoningGymPrompts(task, worked=True, flaws=flaws).item(0)
