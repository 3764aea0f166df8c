from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_module import ToyData, ToyModule, optim, trainer

from callbacks.checkpoint import SpecCheckpoint
from lightning_spec.errors import CheckpointError, ConfigError
from lightning_spec.parallel.checkpoint import MARKER, complete_checkpoints, latest_complete
from strategies import MegatronStrategy

HERE = Path(__file__).parent


def run(
    folder: Path, steps: int, *, every: int = 100, keep: int = 0, resume: Path | None = None, **options: Any
) -> tuple[ToyModule, Any]:
    strategy = options.pop("strategy", {})
    module = ToyModule(
        optim(schedule="cosine", total_steps=20),
        options.pop("draft_optim", optim(clip_norm=0.3, warmup_steps=4)),
        noise=0.1,
        **options,
    )
    torch.manual_seed(5 if resume is None else 77)
    saver = SpecCheckpoint(str(folder), every, keep)
    one = trainer(MegatronStrategy(token_budget=20, **strategy), steps, callbacks=[saver], enable_checkpointing=True)
    one.fit(module, ToyData(), ckpt_path=str(resume) if resume else None)
    return module, one


@pytest.fixture(autouse=True, scope="module")
def _no_seed_left() -> Iterator[None]:
    """What `seed_everything` leaves in the environment of a process seeds every later run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PL_GLOBAL_SEED", raising=False)
        yield


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ToyModule]:
    """Twelve steps over epochs of five, saved after each, with noise from torch's generator in every step."""
    folder = tmp_path_factory.mktemp("full")
    return folder, run(folder, 12, every=1)[0]


@pytest.mark.parametrize("step", [1, 4, 5, 6, 10, 11])
def test_a_run_resumed_at_any_step_equals_the_uninterrupted_one(
    step: int, full: tuple[Path, ToyModule], tmp_path: Path
) -> None:
    """Up to rounding in the eighth digit: two runs in one process lie elsewhere in memory, and some of torch's CPU sums
    take another order there. (The noise is a thousand times that; separate processes: tests/integration/test_resume.)
    """
    folder, reference = full
    module, one = run(tmp_path, 12, resume=folder / f"step-{step:08d}")
    assert len(module.logged) == len(reference.logged[step:])
    for found, wanted in zip(module.logged, reference.logged[step:], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-8)
    assert (one.global_step, one.current_epoch) == (12, 3)
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)


def test_the_noise_would_show_if_generators_were_not_restored(full: tuple[Path, ToyModule], tmp_path: Path) -> None:
    module = ToyModule(optim(schedule="cosine", total_steps=20), optim(clip_norm=0.3, warmup_steps=4), noise=0.1)
    torch.manual_seed(6)
    trainer(MegatronStrategy(token_budget=20), 1).fit(module, ToyData())
    assert module.logged[0]["nll"] == full[1].logged[0]["nll"]
    assert module.logged[0]["loss"] != full[1].logged[0]["loss"]


@pytest.mark.parametrize("strategy", [{"precision": "bf16"}, {"distributed_optimizer": True}])
def test_resume_is_exact_with_other_optimizers(strategy: dict[str, Any], tmp_path: Path) -> None:
    reference, _ = run(tmp_path / "full", 6, every=3, strategy=strategy)
    module, _ = run(tmp_path / "again", 6, resume=tmp_path / "full" / "step-00000003", strategy=strategy)
    assert module.logged == reference.logged[3:]


def test_a_plain_checkpoint_resumes_under_the_distributed_optimizer(
    full: tuple[Path, ToyModule], tmp_path: Path
) -> None:
    module, _ = run(tmp_path, 12, resume=full[0] / "step-00000007", strategy={"distributed_optimizer": True})
    for mine, theirs in zip(module.logged, full[1].logged[7:], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_resume_works_with_paths_in_callback_state_under_torchs_weights_only_default(tmp_path: Path) -> None:
    class Stateful(SpecCheckpoint):
        def state_dict(self) -> dict[str, Any]:
            return {"where": Path("/somewhere")}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            assert state_dict == {"where": Path("/somewhere")}

    for resume in (None, str(tmp_path / "step-00000002")):
        one = trainer(
            MegatronStrategy(token_budget=20),
            2 if resume is None else 3,
            callbacks=[Stateful(str(tmp_path))],
            enable_checkpointing=True,
        )
        one.fit(ToyModule(optim(), optim()), ToyData(), ckpt_path=resume)
    assert one.global_step == 3


def test_validate_reads_a_training_checkpoint(full: tuple[Path, ToyModule]) -> None:
    module = ToyModule(optim(), optim(), seed=9)
    one = trainer(MegatronStrategy(token_budget=20), limit_val_batches=1)
    one.validate(module, ToyData(), ckpt_path=str(full[0] / "step-00000012"), verbose=False)
    for mine, theirs in zip(module.parameters(), full[1].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_weights_only_checkpoint_starts_the_optimizer_anew(tmp_path: Path) -> None:
    module, one = run(tmp_path / "a", 2)
    one.strategy.setup_environment()
    one.save_checkpoint(tmp_path / "weights", weights_only=True)
    one.strategy.teardown()
    again = ToyModule(optim(), optim(), seed=9)
    two = trainer(MegatronStrategy(token_budget=20), 1, limit_val_batches=1)
    two.validate(again, ToyData(), ckpt_path=str(tmp_path / "weights"), verbose=False)
    for mine, theirs in zip(again.parameters(), module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# ---- torn, foreign, old


@pytest.mark.parametrize("damage", ["no marker", "half a marker", "missing tensors", "short tensors"])
def test_a_torn_checkpoint_is_skipped_and_refused(damage: str, full: tuple[Path, ToyModule], tmp_path: Path) -> None:
    for step in (3, 4):
        shutil.copytree(full[0] / f"step-{step:08d}", tmp_path / f"step-{step:08d}")
    torn = tmp_path / "step-00000004"
    tensors = next((torn / "tensors").glob("*.distcp"))
    if damage == "no marker":
        (torn / MARKER).unlink()
    elif damage == "half a marker":
        (torn / MARKER).write_text((torn / MARKER).read_text()[:100])
    elif damage == "missing tensors":
        tensors.unlink()
    else:
        with open(tensors, "r+b") as handle:
            handle.truncate(100)
    os.utime(torn)  # the newest by time
    assert latest_complete(tmp_path) == tmp_path / "step-00000003"
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        run(tmp_path / "x", 12, resume=torn)


def test_a_checkpoint_of_another_format_says_so(full: tuple[Path, ToyModule], tmp_path: Path) -> None:
    old = tmp_path / "step-00000004"
    shutil.copytree(full[0] / "step-00000004", old)
    marker = json.loads((old / MARKER).read_text())
    (old / MARKER).write_text(json.dumps({**marker, "format": 1}))
    said = rf"{old} is of format 1, this version reads format 2"
    with pytest.raises(CheckpointError, match=said):
        run(tmp_path / "x", 12, resume=old)
    # Alone, it must not look like an empty folder, from which a run would start anew.
    for folder in (tmp_path, old):
        with pytest.raises(CheckpointError, match=said):
            latest_complete(folder)
    shutil.copytree(full[0] / "step-00000003", tmp_path / "step-00000003")
    assert latest_complete(tmp_path) == tmp_path / "step-00000003"


def test_the_newest_step_counts_not_the_newest_time(full: tuple[Path, ToyModule], tmp_path: Path) -> None:
    for step in (9, 10, 3):
        shutil.copytree(full[0] / f"step-{step:08d}", tmp_path / f"step-{step:08d}")
    os.utime(tmp_path / "step-00000003")
    assert latest_complete(tmp_path) == tmp_path / "step-00000010"
    assert latest_complete(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"name": "dflash"}, r"draft is 'toy' in the checkpoint, 'dflash' here"),
        ({"draft": False, "draft_optim": None}, r"draft is 'toy' in the checkpoint, None here"),
        ({"width": 16}, r"policy\.width is 12 in the checkpoint, 16 here"),
        ({"strategy": {"precision": "bf16"}}, r"precision is 'fp32' in the checkpoint, 'bf16' here"),
        ({"draft_optim": None}, r"surplus optimizer\.draft"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_says_what_differs(
    options: dict[str, Any], named: str, full: tuple[Path, ToyModule], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=named):
        run(tmp_path, 12, resume=full[0] / "step-00000003", **options)


def test_rotation_keeps_the_newest_and_the_last_step_is_saved(tmp_path: Path) -> None:
    run(tmp_path, 7, every=2, keep=2)
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["step-00000006", "step-00000007"]
    assert sorted(os.listdir(tmp_path)) == ["step-00000006", "step-00000007"]


def test_saving_a_step_again_replaces_it_and_leaves_no_debris(tmp_path: Path) -> None:
    (tmp_path / "step-00000002.unfinished").mkdir()
    (tmp_path / "step-00000002.unfinished" / "junk").write_text("of a killed save")
    run(tmp_path, 2)
    first = json.loads((tmp_path / "step-00000002" / MARKER).read_text())["time"]
    run(tmp_path, 2)
    assert json.loads((tmp_path / "step-00000002" / MARKER).read_text())["time"] > first
    assert os.listdir(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("options", [{"every_n_steps": 0}, {"keep": -1}])
def test_bad_checkpoint_settings_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="checkpoint"):
        SpecCheckpoint("x", **options)


# ---- killed

_KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import torch
torch.set_num_threads(1)
import test_resume
test_resume.run(Path({folder!r}), 2000, every=1, keep=3)
"""


@pytest.mark.distributed
def test_a_run_killed_while_it_saves_resumes_exactly(full: tuple[Path, ToyModule], tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(_KILLED.format(here=str(HERE), folder=str(tmp_path / "run")))
    # It saves after each step, so most of its time is spent saving.
    process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while latest_complete(tmp_path / "run") is None and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    found = latest_complete(tmp_path / "run")
    assert found is not None
    step = json.loads((found / MARKER).read_text())["step"]
    module, _ = run(tmp_path / "again", step + 3, resume=found)
    reference, _ = run(tmp_path / "reference", step + 3)
    assert len(module.logged) == 3
    for mine, theirs in zip(module.logged, reference.logged[step:], strict=True):
        # The steps before were another process's: tensors lie elsewhere, and some sums take another order.
        assert mine == pytest.approx(theirs, rel=1e-5)
