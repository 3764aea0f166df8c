"""PromptData: deterministic order, exact resume, disjoint shards, a validation set that training never sees."""

from __future__ import annotations

import json
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_spec.batch import Completion, Rollout, StepBatch
from lightning_spec.buffer import EmptyBufferError, RolloutBuffer
from lightning_spec.data import PromptData
from lightning_spec.errors import ConfigError
from lightning_spec.sources import Example, PromptSource, ReasoningGymPrompts
from lightning_spec.tokenizer import char_tokenizer


class Texts(PromptSource):
    def __init__(self, texts, worked=False):
        self.texts, self._worked = list(texts), worked

    def prepare(self):
        pass

    @property
    def has_worked(self):
        return self._worked

    def __len__(self):
        return len(self.texts)

    def item(self, index):
        text = self.texts[index]
        return Example(f"t:{index}", text, {"answer": text[::-1]}, f"w{text}" if self._worked else None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    char_tokenizer(folder)
    return str(folder)


def on_rank(data: PromptData, rank: int, size: int, step: int = 0) -> PromptData:
    strategy = SimpleNamespace(data_parallel_rank=rank, data_parallel_size=size)
    data.trainer = SimpleNamespace(strategy=strategy, global_step=step)
    return data


def numbers(n):
    return [f"{i}=" for i in range(n)]


def make(tokenizer, n=23, **kwargs):
    kwargs = {"validation_size": 0, "prompts_per_step": 4, **kwargs}
    return PromptData(tokenizer, Texts(numbers(n)), **kwargs)


def uids(prompts):
    return [p.uid for p in prompts]


def test_an_epoch_is_a_permutation_and_epochs_differ(tokenizer):
    data = make(tokenizer, 12)
    epochs = [[p.text for p in data.next_prompts(12)] for _ in range(3)]
    assert all(sorted(e) == sorted(numbers(12)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3
    assert epochs[0] != numbers(12)


def test_order_depends_on_the_seed_only_and_leaves_the_global_random_state_alone(tokenizer):
    state = torch.get_rng_state()
    a, b, c = (make(tokenizer, seed=s).next_prompts(20) for s in (3, 3, 4))
    assert uids(a) == uids(b) != uids(c)
    torch.manual_seed(999)
    assert uids(make(tokenizer, seed=3).next_prompts(20)) == uids(a)
    torch.set_rng_state(state)
    make(tokenizer).next_prompts(40)
    assert torch.equal(state, torch.get_rng_state())


def test_without_shuffle_the_source_order_is_kept(tokenizer):
    data = make(tokenizer, 5, shuffle=False)
    assert [p.text for p in data.next_prompts(7)] == [*numbers(5), "0=", "1="]


def test_a_prompt_drawn_twice_has_two_uids(tokenizer):
    data = make(tokenizer, 3)
    drawn = data.next_prompts(9)
    assert len(set(uids(drawn))) == 9
    assert len({p.text for p in drawn}) == 3


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 17),
    before=st.integers(0, 6),
    after=st.integers(1, 6),
    saved_size=st.sampled_from([1, 2, 3, 4]),
    loaded_size=st.sampled_from([1, 2, 3, 4]),
    long=st.sets(st.integers(0, 16), max_size=5),
)
def test_resume_at_any_step_and_data_parallel_size_equals_the_uninterrupted_run(
    tokenizer, n, before, after, saved_size, loaded_size, long
):
    texts = [f"{i}=" + "x" * 20 * (i in long) for i in range(n)]
    if all(len(t) > 15 for t in texts):
        return

    def ranks(size):
        return [
            on_rank(
                PromptData(tokenizer, Texts(texts), validation_size=0, prompts_per_step=12, max_prompt_tokens=15),
                r,
                size,
            )
            for r in range(size)
        ]

    whole = ranks(1)[0]
    expected = [uids(whole.next_prompts(12)) for _ in range(before + after)]
    saved = ranks(saved_size)
    for step in range(before):
        assert [u for d in saved for u in uids(d.next_prompts(12))] == expected[step]
    states = [json.loads(json.dumps(d.state_dict())) for d in saved]
    assert all(state == states[0] for state in states)
    loaded = ranks(loaded_size)
    for d in loaded:
        d.load_state_dict(states[-1])
    for step in range(before, before + after):
        assert [u for d in loaded for u in uids(d.next_prompts(12))] == expected[step]
    assert whole.dropped == loaded[0].dropped
    drawn = {int(uid.split(":")[1].split("@")[0]) for step in expected for uid in step}
    assert not drawn & long


def test_ranks_get_disjoint_prompts_that_cover_the_step(tokenizer):
    shards = [on_rank(make(tokenizer, 24, prompts_per_step=12), r, 3).next_prompts() for r in range(3)]
    assert [len(s) for s in shards] == [4, 4, 4]
    assert len({p.uid for s in shards for p in s}) == 12


def test_tensor_and_pipeline_ranks_of_one_replica_see_equal_prompts(tokenizer):
    # They share data_parallel_rank, which is all that the shard depends on.
    a, b = (on_rank(make(tokenizer), 1, 2).next_prompts(8) for _ in range(2))
    assert a == b


def test_a_step_that_does_not_divide_into_the_ranks_is_refused_at_setup(tokenizer):
    with pytest.raises(ConfigError, match="prompts_per_step") as error:
        on_rank(make(tokenizer, prompts_per_step=4), 0, 3).setup()
    assert "multiple of 3" in str(error.value)


@pytest.mark.parametrize(
    ("change", "key"),
    [({"seed": 1}, "data.seed"), ({"shuffle": False}, "data.shuffle"), ({"n": 24}, "data.source")],
)
def test_resuming_another_order_is_refused(tokenizer, change, key):
    state = make(tokenizer).state_dict()
    with pytest.raises(ConfigError) as error:
        make(tokenizer, **change).load_state_dict(state)
    assert error.value.key == key


def test_the_split_holds_out_the_end_of_the_source_and_is_fixed(tokenizer):
    data = make(tokenizer, 20, validation_size=6)
    data.setup()
    held = {p.text for p in data.validation_prompts()}
    assert held == set(numbers(20)[14:])
    assert {p.text for p in data.next_prompts(40)} == set(numbers(14))
    assert uids(data.validation_prompts()) == uids(make(tokenizer, 20, validation_size=6, seed=9).validation_prompts())


def test_training_never_sees_a_validation_prompt_whatever_the_sources_share(tokenizer):
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    source = ReasoningGymPrompts("chain_sum", small, size=300, seed=0, worked=True)
    # Seed + index is all that a problem depends on, so these two overlap in 200 problems and collide in many more.
    validation = ReasoningGymPrompts("chain_sum", small, size=300, seed=100, worked=True)
    data = PromptData(tokenizer, source, validation, validation_size=40)
    held = {p.text for p in data.validation_prompts()}
    trained = {p.text for p in data.next_prompts(300)}
    assert not held & trained
    assert data.dropped > 0
    assert trained


def test_a_validation_set_that_swallows_the_training_set_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="validation set"):
        PromptData(tokenizer, Texts(["a", "b"]), Texts(["b", "a"]), validation_size=2).setup()
    with pytest.raises(ConfigError, match=r"data\.validation_size"):
        make(tokenizer, 5, validation_size=5).setup()


def test_long_and_empty_prompts_are_counted_and_dropped_and_all_long_is_refused(tokenizer):
    data = PromptData(tokenizer, Texts(["ok", "x" * 50, "fine"]), validation_size=0, max_prompt_tokens=10)
    assert {p.text for p in data.next_prompts(4)} == {"ok", "fine"}
    assert data.dropped in (1, 2)
    with pytest.raises(ConfigError, match="max_prompt_tokens") as error:
        PromptData(tokenizer, Texts(["x" * 50, "y" * 60]), validation_size=0, max_prompt_tokens=10).setup()
    assert "61 tokens" in str(error.value)


def test_prompts_start_with_bos_and_worked_answers_end_with_eos(tokenizer):
    data = PromptData(tokenizer, Texts(["ab"], worked=True), validation_size=0, mode="worked", prompts_per_step=1)
    (batch,) = data.train_dataloader()
    (rollout,) = batch.rollouts
    ids = data.tokenizer
    assert rollout.prompt.tokens == (ids.bos_token_id, *ids.convert_tokens_to_ids(["a", "b"]))
    assert rollout.completion.tokens == (*ids.convert_tokens_to_ids(["w", "a", "b"]), ids.eos_token_id)
    assert rollout.completion.finish == "stop"
    assert data.decode(rollout.completion.tokens) == "wab"
    assert data.stop_token_ids == (ids.eos_token_id,)


def test_worked_loaders_are_sized_and_resume_inside_an_epoch(tokenizer):
    def fresh():
        return PromptData(
            tokenizer,
            Texts(numbers(22), worked=True),
            validation_size=2,
            validation_batch=1,
            mode="worked",
            prompts_per_step=4,
        )

    data = fresh()
    loader = data.train_dataloader()
    assert len(loader) == 5
    batches = iter(loader)
    seen = [uids(r.prompt for r in next(batches).rollouts) for _ in range(2)]
    state = data.state_dict()
    rest = [uids(r.prompt for r in batch.rollouts) for batch in batches]
    assert len(seen) + len(rest) == 5
    resumed = fresh()
    resumed.load_state_dict(state)
    again = [uids(r.prompt for r in batch.rollouts) for batch in islice(resumed.train_dataloader(), 3)]
    assert again == rest
    assert [len(b.rollouts) for b in data.val_dataloader()] == [1, 1]
    assert len(data.val_dataloader()) == 2


def test_worked_mode_without_worked_answers_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="worked"):
        make(tokenizer, mode="worked").setup()


@pytest.mark.parametrize(
    ("kwargs", "key"),
    [
        ({"prompts_per_step": 0}, "data.prompts_per_step"),
        ({"validation_size": -1}, "data.validation_size"),
        ({"validation_batch": 0}, "data.validation_batch"),
        ({"max_prompt_tokens": 0}, "data.max_prompt_tokens"),
        ({"steps_per_epoch": 0}, "data.steps_per_epoch"),
        ({"updates_per_rollout": 0}, "data.updates_per_rollout"),
        ({"mode": "rollout"}, "data.mode"),
        ({"mode": "recorded"}, "data.recorded"),
    ],
)
def test_bad_sizes_and_modes_are_refused_at_once(tokenizer, kwargs, key):
    with pytest.raises(ConfigError) as error:
        make(tokenizer, **kwargs)
    assert error.value.key == key


def test_no_source_and_bad_tokenizers_are_refused(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.source"):
        PromptData(tokenizer)
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=r"data\.tokenizer"):
            PromptData(str(folder), Texts(["a", "b"]), validation_size=0).setup()
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        PromptData(str(tmp_path), Texts(["a", "b"]), validation_size=0).setup()


def test_chat_prompts_use_the_template_once(tokenizer, tmp_path):
    chat = char_tokenizer(tmp_path)
    chat.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    chat.save_pretrained(tmp_path)
    data = PromptData(str(tmp_path), Texts(["hi"]), validation_size=0, chat_template=True, system="be")
    (prompt,) = data.next_prompts(1)
    assert prompt.tokens[0] == chat.bos_token_id
    assert chat.bos_token_id not in prompt.tokens[1:]
    assert data.decode(prompt.tokens) == "s:be;u:hi;a:"
    with pytest.raises(ConfigError, match="chat_template"):
        PromptData(tokenizer, Texts(["hi"]), validation_size=0, chat_template=True).setup()


# Rollout mode


def rollout(prompt, version=0, reward=0.0):
    done = Completion((5, 6, 2), (-0.1, -0.2, -0.3), "stop", version)
    return Rollout(prompt, done, group=prompt.uid, reward=reward)


def test_the_buffer_is_sized_lazy_and_single_use(tokenizer):
    data = make(tokenizer, updates_per_rollout=2)
    loader = data.train_dataloader()
    assert loader is data.buffer
    assert len(loader) == 2
    reading = iter(loader)  # made before there is anything to read
    batches = [StepBatch([], version=i) for i in (4, 5)]
    data.buffer.set(batches)
    assert [b.version for b in reading] == [4, 5]
    assert data.buffer.remaining == 0
    with pytest.raises(EmptyBufferError, match="Rollout callback"):
        next(iter(loader))
    with pytest.raises(ValueError, match="2 batches a phase, got 1"):
        data.buffer.set(batches[:1])


def test_a_phase_interrupted_between_updates_resumes_with_the_same_rollouts(tokenizer):
    data = on_rank(make(tokenizer, updates_per_rollout=3), 1, 2)
    prompts = data.next_prompts(6)
    batches = [StepBatch([rollout(p, version=8)], version=8) for p in prompts]
    data.buffer.set(batches)
    next(iter(data.buffer))
    state = json.loads(json.dumps(data.state_dict()))
    resumed = on_rank(make(tokenizer, updates_per_rollout=3), 1, 2)
    resumed.load_state_dict(state)
    assert resumed.buffer.remaining == 2
    left = list(islice(resumed.buffer, 2))
    assert [b.rollouts for b in left] == [b.rollouts for b in batches[1:]]
    assert [b.version for b in left] == [8, 8]
    assert uids(resumed.next_prompts(6)) == uids(data.next_prompts(6))
    with pytest.raises(ConfigError, match="another data-parallel rank"):
        on_rank(make(tokenizer, updates_per_rollout=3), 0, 2).load_state_dict(state)


def test_samples_of_one_prompt_keep_one_group_through_batches_files_and_state(tokenizer, tmp_path):
    from lightning_spec.recorded import load_rollouts, save_rollouts

    data = make(tokenizer, 3)
    prompts = data.next_prompts(6)  # two epochs: equal texts, distinct groups
    samples = [rollout(p, reward=float(i)) for i in range(4) for p in prompts]
    save_rollouts(tmp_path / "r.jsonl", samples)
    back = load_rollouts(tmp_path / "r.jsonl")
    buffer = RolloutBuffer(2)
    buffer.set([StepBatch(back[:12]), StepBatch(back[12:])])
    groups = [r.group for batch in buffer for r in batch.rollouts]
    assert sorted(groups) == sorted(p.uid for p in prompts for _ in range(4))
    assert len(set(groups)) == 6


def test_validation_batches_are_equal_in_number_on_uneven_ranks(tokenizer):
    counts, seen = [], []
    for rank in range(2):
        data = on_rank(make(tokenizer, 20, validation_size=5, validation_batch=2), rank, 2, step=3)
        loader = data.val_dataloader()
        mine = data.validation_prompts()
        data.val_buffer.set(data.split_validation([rollout(p) for p in mine for _ in range(2)]))
        batches = list(loader)
        counts.append((len(loader), [len(b.rollouts) for b in batches]))
        seen += [r.prompt.text for b in batches for r in b.rollouts]
        assert all(b.version == 3 for b in batches)
    assert counts == [(2, [4, 2]), (2, [4, 0])]
    assert sorted(seen) == sorted(numbers(20)[15:] * 2)


def test_recorded_rollouts_are_dealt_by_group_in_order(tokenizer, tmp_path):
    from lightning_spec.recorded import save_rollouts

    prompts = make(tokenizer, 8).next_prompts(8)
    samples = [rollout(p, reward=float(i)) for i in range(3) for p in prompts]
    save_rollouts(tmp_path / "r.jsonl", samples)
    kwargs = {"mode": "recorded", "recorded": str(tmp_path / "r.jsonl"), "shuffle": False, "prompts_per_step": 4}
    batches = list(PromptData(tokenizer, **kwargs).train_dataloader())
    assert [{r.group for r in b.rollouts} for b in batches] == [set(uids(prompts[:4])), set(uids(prompts[4:]))]
    assert [len(b.rollouts) for b in batches] == [12, 12]
    halves = [list(on_rank(PromptData(tokenizer, **kwargs), r, 2).train_dataloader()) for r in range(2)]
    assert [h[0].rollouts + k[0].rollouts for h, k in [halves]] == [batches[0].rollouts]
    resumed = PromptData(tokenizer, **kwargs)
    first = PromptData(tokenizer, **kwargs)
    next(iter(first.train_dataloader()))
    resumed.load_state_dict(first.state_dict())
    assert next(iter(resumed.train_dataloader())).rollouts == batches[1].rollouts
