"""The frozen twin measures the first draft beside the live one, and gives the engine its live draft back."""

from __future__ import annotations

import pytest

from callbacks import FrozenTwin
from lightning_spec.errors import ConfigError


def twin(folder):
    return [FrozenTwin(enabled=True, folder=str(folder / "frozen"))]


def test_the_first_draft_is_measured_on_the_same_prompts_with_the_current_policy(make_run):
    run = make_run(steps=2, more=twin, validate_first=False).fit()
    assert run.events[-5:] == ["generate@2", "refit@2", "generate@2", "refit@2", "close"]
    live, frozen = run.engine.seeds[-2:]
    assert live == frozen
    values = run.module.validated[0].metrics.values()
    # The fake accepts 2 of 3 proposals of a draft as new as the policy, and 1 of an older one.
    assert values["val/acceptance_cotrained"] == 3.0
    assert values["val/acceptance_frozen"] == 2.0
    assert values["val/acceptance_length"] == 3.0


def test_training_goes_on_with_the_live_draft(make_run):
    run = make_run(steps=3, more=twin).fit()
    assert run.module.trained[2].metrics.values()["spec/acceptance_length"] == 3.0


def test_the_live_draft_comes_back_when_measuring_fails(make_run):
    run = make_run(steps=2, more=twin, validate_first=False, engine_fails_at=4)
    with pytest.raises(Exception, match="worker died"):
        run.fit()
    assert run.events[-2:] == ["refit@2", "close"]


def test_a_resumed_run_compares_with_the_same_first_draft(make_run, tmp_path):
    keep = lambda folder: [FrozenTwin(enabled=True, folder=str(tmp_path / "frozen"))]  # noqa: E731
    first = make_run(steps=2, more=keep).fit()
    first.trainer.save_checkpoint(tmp_path / "c.ckpt")
    second = make_run(steps=4, more=keep, ckpt=str(tmp_path / "c.ckpt")).fit()
    assert second.module.validated[-1].metrics.values()["val/acceptance_frozen"] == 2.0
    (tmp_path / "frozen" / "draft.safetensors").unlink()
    with pytest.raises(ConfigError, match="first draft is gone"):
        make_run(steps=6, more=keep, ckpt=str(tmp_path / "c.ckpt")).fit()


def test_disabled_it_does_nothing_and_enabled_it_needs_a_draft_in_the_engine(make_run):
    run = make_run(steps=2, more=lambda folder: [FrozenTwin()], validate_first=False).fit()
    assert run.events.count("generate@2") == 1
    run = make_run(steps=2, more=twin)
    run.engine.method = "ngram"
    with pytest.raises(ConfigError, match=r"acceptance\.enabled"):
        run.fit()
