"""A signal at any moment of a run: one checkpoint at a step's end, the right exit code, and handlers left as found."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from callbacks import PreemptionCallback, ProgressCallback, SpecCheckpoint
from callbacks.preemption import EarlyListener, Preempted, job_id, requeue, without_lightning
from lightning_spec.errors import ConfigError
from lightning_spec.jsonl_logger import JSONLLogger

STEPS = 6
ANSWERED = (signal.SIGUSR1, signal.SIGTERM)


class LogValidation(pl.Callback):
    """What the real module logs at a validation's end."""

    def on_validation_epoch_end(self, trainer, pl_module):
        value = float(sum(r.completion.tokens[0] for batch in pl_module.validated[-1:] for r in batch.rollouts))
        pl_module.log_dict({"val/first": value, "step": float(trainer.global_step)})


class SignalAt(pl.Callback):
    """Signals this process in the given hook, once `at` steps are done."""

    def __init__(self, hook: str, at: int, signum: int = signal.SIGUSR1) -> None:
        def send(trainer, *args, **kwargs):
            if trainer.global_step == at and not trainer.sanity_checking:
                os.kill(os.getpid(), signum)

        setattr(self, hook, send)


@pytest.fixture(autouse=True)
def _handlers_stay_as_they_are() -> Iterator[None]:
    before = {one: signal.getsignal(one) for one in ANSWERED}
    yield
    after = {one: signal.getsignal(one) for one in ANSWERED}
    for one, handler in before.items():
        signal.signal(one, handler)
    assert after == before


@pytest.fixture(autouse=True)
def _outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake `scontrol` on the PATH; the file that it writes its arguments to."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\nexit ${{SCONTROL_CODE:-0}}\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path / "requeued"


def run(make_run: Any, folder: Path, *, more: Any = (), every: int = 100, resume: bool = False, **settings: Any) -> Any:
    saver = settings.pop("saver", SpecCheckpoint)
    callbacks = [
        ProgressCallback("none"),
        LogValidation(),
        *more,
        saver(str(folder / "saved"), every, 0),
        PreemptionCallback(**{"requeue": ["USR1"], **settings}),
    ]
    return make_run(
        steps=STEPS,
        loggers=[JSONLLogger(str(folder))],
        more=lambda _: callbacks,
        ckpt=str(max((folder / "saved").iterdir())) if resume else None,
    )


def records(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("wall", "time/", "rollout/tokens_per"))} for row in rows]


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "saved").iterdir())


# Validation runs at steps 2, 4, 6. Signalled in the hook when `at` steps are done; ends with `ends` steps done.
MOMENTS = [
    ("on_train_batch_start", 0, 1),  # before the first step
    ("on_before_optimizer_step", 2, 3),  # inside a step
    ("on_before_optimizer_step", 3, 4),  # inside a step that is validated
    ("on_train_batch_end", 3, 3),  # after the step, before the ranks compare notes
    ("on_train_batch_end", 4, 4),  # the same, with a validation due
    ("on_validation_start", 4, 4),
    ("on_validation_batch_end", 2, 2),
    ("on_train_epoch_start", 2, 3),  # between epochs, before rollouts
    ("on_save_checkpoint", 3, 3),  # while the checkpoint of the cadence is written (every=3): it is the one
]


@pytest.fixture(scope="module")
def whole(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    from tests.callbacks.conftest import Run

    folder = tmp_path_factory.mktemp("whole")
    run(lambda **settings: Run(tokenizer, folder / "run", **settings), folder).fit()
    return records(folder)


@pytest.mark.parametrize(("hook", "at", "ends"), MOMENTS)
def test_a_signal_at_any_moment_ends_the_run_at_the_steps_end_and_loses_no_record(
    make_run: Any, tmp_path: Path, whole: list[dict[str, Any]], hook: str, at: int, ends: int
) -> None:
    every = 3 if hook == "on_save_checkpoint" else 100
    one = run(make_run, tmp_path, more=[SignalAt(hook, at)], every=every)
    with pytest.raises(Preempted) as caught:
        one.fit()
    assert (caught.value.code, one.trainer.global_step) == (128 + signal.SIGUSR1, ends)
    assert caught.value.checkpoint == tmp_path / "saved" / saved(tmp_path)[-1]
    assert saved(tmp_path)[-1] == f"step-{ends:08d}"
    assert records(tmp_path) == [row for row in whole if row["step"] <= ends], "the step's records were written"
    assert one.engine.closed
    run(make_run, tmp_path, resume=True).fit()
    assert records(tmp_path) == whole


def test_further_signals_during_the_last_save_change_nothing_but_the_exit_code(make_run: Any, tmp_path: Path) -> None:
    more = [SignalAt("on_train_batch_start", 2, signal.SIGUSR1), SignalAt("on_save_checkpoint", 3, signal.SIGTERM)]
    with pytest.raises(Preempted) as caught:
        run(make_run, tmp_path, more=more).fit()
    # The ranks had agreed on the first by then.
    assert caught.value.code == 128 + signal.SIGUSR1
    assert saved(tmp_path) == ["step-00000003"]


def test_of_two_signals_the_higher_one_is_the_exit_code(make_run: Any, tmp_path: Path) -> None:
    more = [SignalAt("on_train_batch_start", 2, one) for one in (signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(Preempted) as caught:
        run(make_run, tmp_path, more=more).fit()
    assert caught.value.code == 143


def test_a_run_that_made_its_last_step_finishes(make_run: Any, tmp_path: Path) -> None:
    one = run(make_run, tmp_path, more=[SignalAt("on_before_optimizer_step", STEPS - 1)])
    one.fit()
    assert one.trainer.state.finished
    assert saved(tmp_path) == [f"step-{STEPS:08d}"]


def test_the_step_is_saved_at_the_cadence_of_the_agreement(make_run: Any, tmp_path: Path) -> None:
    one = run(make_run, tmp_path, more=[SignalAt("on_train_batch_start", 2)], every_n_steps=5)
    with pytest.raises(Preempted):
        one.fit()
    # A validation's end is such a moment too, whatever the cadence.
    assert saved(tmp_path) == ["step-00000004"]


def test_without_signals_nothing_is_answered_and_no_checkpoint_is_asked_for(make_run: Any, tmp_path: Path) -> None:
    seen = []

    class Look(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            seen.append(signal.getsignal(signal.SIGUSR1))

    run(make_run, tmp_path, more=[Look()], signals=[], requeue=[]).fit()
    assert set(seen) == {signal.getsignal(signal.SIGUSR1)}


# ---- handlers


def test_a_foreign_handler_is_called_too_and_put_back(make_run: Any, tmp_path: Path) -> None:
    heard: list[int] = []

    def foreign(signum: int, _: Any) -> None:
        heard.append(signum)

    before = {one: signal.signal(one, foreign) for one in ANSWERED}
    try:
        for signum in ANSWERED:
            with pytest.raises(Preempted):
                run(make_run, tmp_path / str(signum), more=[SignalAt("on_train_batch_start", 2, signum)]).fit()
            assert signal.getsignal(signum) is foreign
        run(make_run, tmp_path / "unsignalled").fit()
        assert [signal.getsignal(one) for one in ANSWERED] == [foreign, foreign]
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert heard == list(ANSWERED)


def test_lightnings_own_handlers_are_left_out_of_the_chain() -> None:
    from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose, _SignalConnector

    lightnings = _SignalConnector(pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu"))
    ours, other = lambda *_: None, lambda *_: None
    notifier = lightnings._sigterm_notifier_fn
    assert without_lightning(_HandlersCompose([notifier])) == signal.SIG_DFL
    assert without_lightning(_HandlersCompose([notifier, signal.SIG_DFL])) == signal.SIG_DFL
    assert without_lightning(_HandlersCompose([notifier, ours])) is ours
    assert without_lightning(_HandlersCompose([ours, other])).signal_handlers == [ours, other]
    assert without_lightning(ours) is ours
    assert without_lightning(signal.SIG_IGN) == signal.SIG_IGN
    assert without_lightning(None) == signal.SIG_DFL, "a handler that Python did not set"


def test_an_exception_of_the_run_puts_the_handlers_back(make_run: Any, tmp_path: Path) -> None:
    class Fault(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            assert getattr(signal.getsignal(signal.SIGUSR1), "__func__", None) is PreemptionCallback._note
            raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        run(make_run, tmp_path, more=[Fault()]).fit()  # the fixture looks at the handlers


def test_training_in_another_thread_runs_without_handlers(make_run: Any, tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            run(make_run, tmp_path).fit()
        except BaseException as error:
            failures.append(error)

    def in_a_thread() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    with pytest.warns(UserWarning, match="main thread"):
        in_a_thread()
    assert failures == []
    assert saved(tmp_path) == [f"step-{STEPS:08d}"]


def test_a_signal_while_another_callback_starts_up_is_not_lost(make_run: Any, tmp_path: Path) -> None:
    """The rollout callback starts its engine and measures in `on_train_start`, ahead of every Checkpoint callback."""
    preemption = PreemptionCallback()
    saver = SpecCheckpoint(str(tmp_path / "saved"))
    early = EarlyListener(preemption)
    callbacks = [early, SignalAt("on_train_start", 0), saver, preemption]
    with pytest.raises(Preempted):
        make_run(steps=STEPS, more=lambda _: callbacks).fit()
    assert saved(tmp_path) == ["step-00000001"]


def test_should_stop_tells_of_this_ranks_signal_at_once(make_run: Any, tmp_path: Path) -> None:
    seen = []

    class Look(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
            (callback,) = [one for one in trainer.callbacks if isinstance(one, PreemptionCallback)]
            seen.append(callback.should_stop)

    with pytest.raises(Preempted):
        run(make_run, tmp_path, more=[SignalAt("on_train_batch_start", 2), Look()]).fit()
    assert seen == [False, False, True]


def test_slurms_warning_to_all_processes_does_not_end_the_engine(tmp_path: Path) -> None:
    from lightning_spec.rollout.process import ChildProcess, cleaned_environment

    child = ChildProcess("json.tool", cleaned_environment(), tmp_path / "log", "an engine")
    try:
        status = Path(f"/proc/{child.pid}/status").read_text()
    finally:
        child.kill()
    (blocked,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk")]
    seen = {one for one in signal.Signals if blocked >> (one - 1) & 1}
    assert seen == {signal.SIGUSR1, signal.SIGUSR2}
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


# ---- SLURM


def test_the_job_is_queued_again_once_and_only_after_the_signals_named(
    make_run: Any, tmp_path: Path, scontrol: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")  # so that Lightning does not look for tasks
    for signum in ANSWERED:
        with pytest.raises(Preempted):
            run(make_run, tmp_path / str(signum), more=[SignalAt("on_train_batch_start", 2, signum)]).fit()
    assert scontrol.read_text() == "requeue 4711\n"
    assert "SIGUSR1: step 3 is saved in" in (told := capsys.readouterr().out)
    assert told.count("job 4711 is queued again") == 1


def test_nothing_is_queued_outside_slurm(make_run: Any, tmp_path: Path, scontrol: Path) -> None:
    with pytest.raises(Preempted):
        run(make_run, tmp_path, more=[SignalAt("on_train_batch_start", 2)]).fit()
    assert not scontrol.exists()


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "12"}, "12"),
        ({"SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}, "12_3"),
        ({"SLURM_JOB_ID": "12; rm -r x"}, None),
    ],
)
def test_the_jobs_number_is_that_which_scontrol_knows(
    variables: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert job_id() == found


def test_a_failing_scontrol_is_told_and_ends_nothing(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCONTROL_CODE", "1")
    assert "could not be requeued: scontrol returned 1" in requeue("12")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "could not be requeued: [Errno 2]" in requeue("12")


@pytest.mark.parametrize(
    ("settings", "found", "needed", "key"),
    [
        ({"signals": ["USR3"]}, "USR3", "`USR", "preemption.signals"),
        ({"signals": ["KILL"]}, "KILL", "", "preemption.signals"),
        ({"signals": ["TERM"], "requeue": ["USR1"]}, "SIGUSR1", "SIGTERM", "preemption.requeue"),
        ({"every_n_steps": 0}, "0", "1 or more", "preemption.every_n_steps"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], found: str, needed: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PreemptionCallback(**settings)
    assert found in str(caught.value.found)
    assert needed in str(caught.value.needed)
    assert caught.value.key == key


def test_preemption_without_a_checkpoint_callback_is_refused(make_run: Any, tmp_path: Path) -> None:
    one = make_run(steps=1, more=lambda _: [PreemptionCallback()])
    with pytest.raises(ConfigError, match="SpecCheckpoint"):
        one.fit()


def test_signal_names_are_taken_with_and_without_sig_in_any_case() -> None:
    assert PreemptionCallback(["sigusr2", "Term"]).signals == [signal.SIGUSR2, signal.SIGTERM]
