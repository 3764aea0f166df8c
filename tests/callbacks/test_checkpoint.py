"""What a run keeps when it is killed at the worst moments around a checkpoint: every record, each once."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest

from callbacks import ProgressCallback, SpecCheckpoint
from lightning_spec.jsonl_logger import JSONLLogger

STEPS = 6
AT = 4


class Killed(BaseException):
    """Not an Exception: nobody may handle it on the way."""


class LogValidation(pl.Callback):
    """What the real module logs at a validation's end."""

    def on_validation_epoch_end(self, trainer, pl_module):
        value = float(sum(r.completion.tokens[0] for batch in pl_module.validated[-1:] for r in batch.rollouts))
        pl_module.log_dict({"val/first": value, "step": float(trainer.global_step)})


class KillAt(pl.Callback):
    """Ends the run in the given hook, once `AT` steps are done."""

    def __init__(self, hook: str) -> None:
        def kill(trainer, *args, **kwargs):
            if trainer.global_step == AT:
                raise Killed

        setattr(self, hook, kill)


class KilledAfterSaving(SpecCheckpoint):
    state_key = "SpecCheckpoint"

    def _save(self, trainer):
        super()._save(trainer)
        if trainer.global_step in (AT, AT + 1):
            raise Killed


def records(path: Path) -> list[dict]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("wall", "time/", "rollout/tokens_per"))} for row in rows]


def run(make_run, folder: Path, *, updates: int, saver=SpecCheckpoint, every=1, more=(), resume=False):
    callbacks = [ProgressCallback("none"), LogValidation(), *more, saver(str(folder / "saved"), every, 0)]
    newest = max((folder / "saved").iterdir()) if resume else None
    # Rows in the order of Lightning's own callbacks: checkpoints last.
    return make_run(
        steps=STEPS,
        updates=updates,
        loggers=[JSONLLogger(str(folder))],
        more=lambda _: callbacks,
        ckpt=str(newest) if newest else None,
    )


@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize(
    "hook",
    [
        "on_train_batch_end",
        "on_validation_start",
        "on_validation_batch_end",
        "on_validation_end",
        "on_train_batch_start",
    ],
)
def test_a_run_killed_around_a_validation_loses_no_record_and_repeats_none(make_run, tmp_path, updates, hook):
    whole = run(make_run, tmp_path / "whole", updates=updates)
    whole.fit()
    with pytest.raises(Killed):
        run(make_run, tmp_path / "killed", updates=updates, more=[KillAt(hook)]).fit()
    again = run(make_run, tmp_path / "killed", updates=updates, resume=True)
    again.fit()
    expected = records(tmp_path / "whole" / "metrics.jsonl")
    assert records(tmp_path / "killed" / "metrics.jsonl") == expected
    assert [row["step"] for row in expected if "val/first" in row] == [2, 4, 6]
    trained = again.module.trained
    assert [b.rollouts for b in trained] == [b.rollouts for b in whole.module.trained[-len(trained) :]]


@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("every", [4, 5])
def test_a_run_killed_between_a_save_and_the_logging_of_its_step_loses_no_record(make_run, tmp_path, updates, every):
    """Saved at step 4: after its validation. At step 5: at the batch's end, before Lightning logs the step."""
    run(make_run, tmp_path / "whole", updates=updates).fit()
    with pytest.raises(Killed):
        run(make_run, tmp_path / "killed", updates=updates, saver=KilledAfterSaving, every=every).fit()
    assert [path.name for path in (tmp_path / "killed" / "saved").iterdir()] == [f"step-{every:08d}"]
    run(make_run, tmp_path / "killed", updates=updates, resume=True).fit()
    assert records(tmp_path / "killed" / "metrics.jsonl") == records(tmp_path / "whole" / "metrics.jsonl")


def test_a_step_that_is_validated_is_saved_after_its_validation_and_others_at_once(make_run, tmp_path):
    seen = []

    class Watch(SpecCheckpoint):
        def _save(self, trainer):
            seen.append((trainer.global_step, trainer.validating))
            super()._save(trainer)

    run(make_run, tmp_path, updates=1, saver=Watch).fit()
    assert seen == [(1, False), (2, True), (3, False), (4, True), (5, False), (6, True)]


def test_without_validation_data_nothing_waits_for_a_validation(make_run, tmp_path):
    one = run(make_run, tmp_path, updates=1)
    one.trainer.limit_val_batches = 0
    one.fit()
    assert len(list((tmp_path / "saved").iterdir())) == STEPS
