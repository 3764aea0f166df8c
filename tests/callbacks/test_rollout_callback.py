"""The Rollout callback: order of events, on-policy versions, exact seeds, and an engine that never outlives the run."""

from __future__ import annotations

import dataclasses
import types

import pytest

from lightning_spec.errors import ConfigError, EngineError
from lightning_spec.rollout.engine import Sampling, SpeculationReport


def test_each_phase_refits_generates_and_trains_in_this_order(make_run):
    run = make_run(steps=3, validate_first=False).fit()
    assert run.events == [
        "start", "generate@0", "train@0",
        "refit@1", "generate@1", "train@1",
        "refit@2", "generate@2",  # validation after step 2
        "generate@2", "train@2",
        "close",
    ]  # fmt: skip


def test_every_batch_was_sampled_by_the_version_it_says(make_run):
    run = make_run(steps=4).fit()
    for step, batch in enumerate(run.module.trained):
        assert batch.version == step
        assert {rollout.completion.version for rollout in batch.rollouts} == {step}


def test_updates_per_rollout_uses_one_phase_for_several_steps_and_each_prompt_once(make_run):
    run = make_run(steps=4, updates=2, validate_first=False).fit()
    assert [batch.version for batch in run.module.trained] == [0, 0, 2, 2]
    uids = [r.prompt.uid for batch in run.module.trained for r in batch.rollouts]
    assert len(uids) == 4 * 2 * 3
    assert len(set(uids)) == 8


def test_a_group_is_whole_inside_its_batch(make_run):
    run = make_run(steps=2, updates=2).fit()
    for batch in run.module.trained:
        groups = [r.group for r in batch.rollouts]
        assert all(groups.count(group) == 3 for group in groups)


def test_validation_prompts_and_seeds_are_the_same_each_time_and_training_seeds_are_not(make_run):
    run = make_run(steps=4).fit()
    by_size = {size: [s for s in run.engine.seeds if len(s) == size] for size in (4, 6)}
    assert len(by_size[4]) == 3
    assert len({tuple(seeds) for seeds in by_size[4]}) == 1
    assert len({tuple(seeds) for seeds in by_size[6]}) == 4


def test_validation_is_greedy_by_default_and_stops_at_the_tokenizers_end(make_run):
    run = make_run(steps=1).fit()
    assert [s.temperature for s in run.engine.samplings] == [0.0, 1.0]
    assert all(s.stop_token_ids == (2,) for s in run.engine.samplings)
    assert all(s.max_tokens == 8 for s in run.engine.samplings)


def test_given_stop_tokens_win_over_the_tokenizers(make_run):
    run = make_run(steps=1, sampling=Sampling(max_tokens=8, stop_token_ids=(9,))).fit()
    assert all(s.stop_token_ids == (9,) for s in run.engine.samplings)


def test_validation_metrics_reach_the_validation_batches(make_run):
    run = make_run(steps=2).fit()
    values = run.module.validated[0].metrics.values()
    assert values["val/acceptance_length"] > 1
    assert {"val/reward", "val/pass_rate", "val/truncated", "val/length"} <= values.keys()
    assert sum(len(batch.rollouts) for batch in run.module.validated) == 4


@pytest.mark.parametrize("fault", [{"engine_fails_at": 3}, {"module_fails_at": 1}])
def test_the_engine_is_closed_when_the_run_fails_and_the_error_is_its_own(make_run, fault):
    run = make_run(steps=4, **fault)
    with pytest.raises(EngineError if "engine_fails_at" in fault else RuntimeError):
        run.fit()
    assert run.engine.closed == 1
    assert not run.engine.alive


def test_closing_twice_closes_once_and_before_the_start_not_at_all(make_run):
    run = make_run(steps=1)
    run.rollout.close()
    assert run.engine.closed == 0
    run.fit()
    run.rollout.close()
    assert run.engine.closed == 1


def test_refits_are_verified_every_nth_time(make_run):
    run = make_run(steps=5, verify_refit=2, validate_first=False).fit()
    refits = [event for event in run.events if event.startswith("refit")]
    assert refits == ["refit@1", "refit@2 verify", "refit@3", "refit@4 verify"]


def test_state_is_plain_and_restored(make_run):
    run = make_run(steps=3, updates=2).fit()
    state = run.rollout.state_dict()
    other = make_run().rollout
    other.load_state_dict(state)
    assert other.state_dict() | {"engine_version": 0} == state | {"engine_version": 0}
    assert other.engine_version == 0, "a new engine holds no weights of the old one"


def test_rollouts_are_recorded_for_each_phase(make_run, tmp_path):
    from lightning_spec.recorded import load_rollouts

    run = make_run(steps=2, record=str(tmp_path / "rec")).fit()
    files = sorted((tmp_path / "rec").iterdir())
    assert [file.name for file in files] == ["step-000000-rank-0.jsonl", "step-000001-rank-0.jsonl"]
    assert load_rollouts(files[1]) == run.module.trained[1].rollouts


def test_resume_inside_a_phase_trains_the_same_batches_with_the_same_metrics(make_run, tmp_path):
    whole = make_run(steps=4, updates=2).fit()
    first = make_run(steps=3, updates=2).fit()
    first.trainer.save_checkpoint(tmp_path / "c.ckpt")
    second = make_run(steps=4, updates=2, ckpt=str(tmp_path / "c.ckpt")).fit()
    assert [b.rollouts for b in second.module.trained] == [b.rollouts for b in whole.module.trained[3:]]
    assert second.module.trained[0].metrics.values() == whole.module.trained[3].metrics.values()


def test_resume_between_phases_makes_the_same_rollouts(make_run, tmp_path):
    whole = make_run(steps=4).fit()
    first = make_run(steps=2).fit()
    first.trainer.save_checkpoint(tmp_path / "c.ckpt")
    second = make_run(steps=4, ckpt=str(tmp_path / "c.ckpt")).fit()
    assert [b.rollouts for b in second.module.trained] == [b.rollouts for b in whole.module.trained[2:]]
    assert second.events[:3] == ["start", "refit@2", "generate@2"], "a fresh engine takes the step's version"


def test_no_engine_needs_other_data_and_an_engine_needs_rollouts(make_run):
    with pytest.raises(ConfigError, match="no engine"):
        make_run(engine=None).fit()
    run = make_run()
    run.data.mode = "worked"
    with pytest.raises(ConfigError, match="does not come from rollouts"):
        run.fit()


def test_a_policy_that_learns_from_rollouts_needs_a_reward_and_a_frozen_one_does_not(make_run):
    with pytest.raises(ConfigError, match=r"rollout\.reward"):
        make_run(reward=None).fit()
    run = make_run(reward=None, steps=1)
    run.module.trains_policy = False
    run.fit()
    assert {r.reward for r in run.module.trained[0].rollouts} == {0.0}


@pytest.mark.parametrize("key", ["samples_per_prompt", "validation_samples", "verify_refit"])
def test_numbers_out_of_range_are_refused(make_run, key):
    with pytest.raises(ConfigError, match=rf"rollout\.{key}"):
        make_run(**{key: -1})


def test_speculation_that_cannot_pay_is_said_once(make_run, monkeypatch):
    monkeypatch.setattr("callbacks.gain.PAYS_FROM", 4.0)
    said = []
    monkeypatch.setattr("callbacks.gain.rank_zero_warn", said.append)
    make_run(steps=3).fit()
    assert len(said) == 1
    assert "acceptance length 3.00" in said[0]
    monkeypatch.setattr("callbacks.gain.PAYS_FROM", 2.0)
    make_run(steps=3).fit()
    assert len(said) == 1


def test_adaptive_speculation_is_logged_said_once_for_a_band_and_carried_across_a_resume(make_run, monkeypatch):
    said = []
    monkeypatch.setattr("callbacks.gain.rank_zero_warn", said.append)

    def adaptive_run(**options):
        run = make_run(**options)
        generate, run.restored = run.engine.generate, []
        run.engine.restore_speculation = run.restored.append

        def reporting(*args):
            out = generate(*args)
            report = SpeculationReport(10, 15, 4, (0, 3, 0, 0), {1: 1.4, 2: 0.8}, {"2": {"calls": run.engine.calls}})
            run.engine.last = dataclasses.replace(run.engine.last, adaptive=report)
            return out

        run.engine.generate = reporting
        return run.fit()

    first = adaptive_run(steps=3)
    values = first.module.trained[0].metrics.values()
    assert (values["rollout/k"], values["rollout/spec_off"]) == (1.5, 0.4)
    assert len(said) == 1
    assert "from 2 running requests on (0.80x" in said[0]
    state = first.rollout.state_dict()
    assert state["speculation"] == {"2": {"calls": first.engine.calls}}
    second = make_run()
    second.rollout.load_state_dict(state)
    second.engine.restore_speculation = (given := []).append
    second.fit()
    assert given == [state["speculation"]]


def test_rollouts_longer_than_the_drafts_positions_are_refused_before_the_engine_starts(make_run):
    """CASES B3: the engine would clamp the draft's positions without a word."""
    run = make_run()
    run.module.draft.max_positions = 100
    with pytest.raises(ConfigError, match="too few positions"):
        run.fit()
    assert not any(event.startswith("start") for event in run.events)


def test_rollouts_longer_than_the_policys_positions_are_refused(make_run):
    run = make_run()
    run.module.shape = types.SimpleNamespace(max_positions=100)
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.max_tokens") as caught:
        run.fit()
    assert "520" in str(caught.value)


def test_without_a_reward_no_reward_is_logged(make_run):
    run = make_run(reward=None)
    run.module.trains_policy = False
    run.fit()
    names = set(dict(run.module.trained[0].metrics.items()))
    assert "rollout/length" in names
    assert not any(name.startswith(("reward", "advantage")) for name in names)
