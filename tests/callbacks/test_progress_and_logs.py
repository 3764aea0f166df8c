"""Progress lines, the metrics file, and what a resume does to it."""

from __future__ import annotations

import io
import json

import pytest

from callbacks import ExportCallback, ProgressCallback, ThroughputCallback
from lightning_spec.jsonl_logger import JSONLLogger
from lightning_spec.records import by_step, read_records, series


def shown(kind="plain", **settings):
    bar = ProgressCallback(kind, **settings)
    bar.stream = io.StringIO()
    return bar


def test_plain_progress_is_one_line_a_step_with_reward_acceptance_and_speed(make_run):
    bar = shown()
    make_run(steps=2, more=lambda folder: [bar]).fit()
    lines = [line for line in bar.stream.getvalue().splitlines() if line.startswith("step")]
    assert [line.split("  ")[0] for line in lines] == ["step 1/2", "step 2/2"]
    for word in ("reward", "acceptance 3.00", "tokens/s 36", "left"):
        assert word in lines[1]


def test_every_n_steps_thins_the_lines_but_keeps_the_last(make_run):
    bar = shown(every_n_steps=2)
    make_run(steps=3, more=lambda folder: [bar]).fit()
    lines = [line.split("  ")[0] for line in bar.stream.getvalue().splitlines() if line.startswith("step")]
    assert lines == ["step 2/3", "step 3/3"]


def test_silent_progress_says_nothing(make_run):
    bar = shown("none")
    make_run(steps=1, more=lambda folder: [bar]).fit()
    assert bar.stream.getvalue() == ""


def test_the_live_line_is_taken_down_when_the_run_fails(make_run):
    bar = shown("rich")
    with pytest.raises(RuntimeError):
        make_run(steps=3, module_fails_at=1, more=lambda folder: [bar]).fit()
    assert bar._live is None
    assert "reward" in bar.stream.getvalue()


def test_metrics_are_logged_at_the_optimiser_step_counted_from_one_and_the_start_at_zero(make_run, tmp_path):
    logger = JSONLLogger(str(tmp_path))
    make_run(steps=3, loggers=[logger], more=lambda folder: [shown("none"), ThroughputCallback()]).fit()
    steps = by_step(logger.path)
    assert list(steps) == [0, 1, 2, 3]
    assert "val/reward" in steps[0]
    assert [step for step, _ in series(steps, "reward")] == [1, 2, 3]
    assert [step for step, _ in series(steps, "time/update")] == [1, 2, 3]
    assert [step for step, _ in series(steps, "time/validation")] == [2]


def test_a_resumed_run_drops_the_records_past_its_checkpoint(make_run, tmp_path):
    logger = JSONLLogger(str(tmp_path))
    run = make_run(steps=2, loggers=[logger], more=lambda folder: [shown("none")]).fit()
    run.trainer.save_checkpoint(tmp_path / "c.ckpt")
    logger.log_metrics({"lost": 1.0}, step=3)
    make_run(steps=3, loggers=[logger], more=lambda f: [shown("none")], ckpt=str(tmp_path / "c.ckpt")).fit()
    steps = by_step(logger.path)
    assert list(steps) == [0, 1, 2, 3]
    assert "lost" not in steps[3]
    assert "reward" in steps[3]


def test_a_new_run_in_an_old_folder_starts_an_empty_file(make_run, tmp_path):
    logger = JSONLLogger(str(tmp_path))
    logger.log_metrics({"old": 1.0}, step=9)
    make_run(steps=1, loggers=[logger], more=lambda folder: [shown("none")]).fit()
    assert list(by_step(logger.path)) == [0, 1]


def test_a_line_torn_by_a_crash_is_dropped_and_what_follows_is_whole(tmp_path):
    logger = JSONLLogger(str(tmp_path))
    logger.log_metrics({"a": 1.0}, step=1)
    with logger.path.open("a") as out:
        out.write('{"step": 2, "a": 2.')
    assert [record["step"] for record in read_records(logger.path)] == [1]
    logger.truncate_after(1)
    logger.log_metrics({"a": 3.0}, step=2)
    assert [json.loads(line)["step"] for line in logger.path.read_text().splitlines()] == [1, 2]


def test_numbers_that_json_cannot_hold_stay_readable_and_out_of_curves(tmp_path):
    logger = JSONLLogger(str(tmp_path))
    logger.log_metrics({"a": float("nan"), "b": float("inf")}, step=1)
    assert json.loads(logger.path.read_text())["a"] == "nan"
    assert series(by_step(logger.path), "a") == []


def test_the_export_at_the_end_appears_whole_and_replaces_an_older_one(make_run, tmp_path):
    folder = tmp_path / "export"
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "stale").touch()
    make_run(steps=1, more=lambda _: [ExportCallback(str(folder))]).fit()
    assert sorted(p.name for p in folder.iterdir()) == ["draft", "policy"]
    assert not (folder / "policy" / "stale").exists()
