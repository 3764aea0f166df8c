"""One task of test_slurm_nodes.py: `python slurm_worker.py OUT MODE`, with SLURM's variables in the environment.

MODE `first`: a run that the test signals from outside, which ends the process. MODE `again`: that run continued, as a
job that was queued again; then one run left alone, and one for each scenario, which ends by a signal and is continued;
writes OUT/moments-RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "strategies"))

import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import SLURMEnvironment
from toy_module import ToyData, ToyModule, optim, trainer

from callbacks import PreemptionCallback, SpecCheckpoint
from callbacks.preemption import Preempted
from lightning_spec.parallel.checkpoint import latest_complete
from strategies import MegatronStrategy

STEPS, LONG = 8, 30
RANK = int(os.environ.get("SLURM_PROCID", "0"))

# name: (rank that is signalled, where, steps done by then, signal, cadence of ordinary checkpoints, last step made)
SCENARIOS: dict[str, tuple[int, str, int, int, int, int]] = {
    "inside a step, rank 1": (1, "step", 3, signal.SIGUSR1, 100, 4),
    "inside a step, rank 0": (0, "step", 2, signal.SIGTERM, 100, 3),
    "between steps": (1, "on_train_batch_start", 5, signal.SIGTERM, 100, 6),
    "as a validation starts": (1, "on_validation_start", 4, signal.SIGUSR1, 100, 4),
    "while a checkpoint is written": (1, "on_save_checkpoint", 3, signal.SIGUSR1, 3, 3),
}


class Signal(pl.Callback):
    """Signals this process once, in the hook, when `at` steps are done."""

    def __init__(self, rank: int, where: str, at: int, signum: int) -> None:
        self.mine, self.at, self.signum = rank == RANK, at, signum
        if where != "step":
            setattr(self, where, self.send)

    def send(self, trainer: Any, *args: Any) -> None:
        if self.mine and trainer.global_step == self.at:
            self.mine = False
            os.kill(os.getpid(), self.signum)


class Noisy(ToyModule):
    """Draws from torch's generator in every step, logs to a file, and is signalled inside of steps."""

    def __init__(self, log: Path, inside: Signal | None, slow: float = 0.0) -> None:
        super().__init__(optim(schedule="cosine", total_steps=20), optim(warmup_steps=4), noise=0.1)
        self.log_file, self.inside, self.slow = log, inside, slow

    def policy_step(self, *args: Any, **kwargs: Any) -> Any:
        out = super().policy_step(*args, **kwargs)
        if self.inside is not None:
            self.inside.send(self.trainer)
        time.sleep(self.slow)
        return out

    def step_done(self, metrics: Any, batch: Any) -> None:
        super().step_done(metrics, batch)
        with self.log_file.open("a") as out:
            out.write(json.dumps({"step": self.trainer.global_step + 1, **metrics.values()}) + "\n")


def fit(folder: Path, *, inside: Signal | None = None, every: int = 100, steps: int = STEPS, slow: float = 0.0) -> None:
    """One start of a job: continues from the newest checkpoint in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(5)
    callbacks = [SpecCheckpoint(str(folder / "saved"), every, 0), PreemptionCallback(requeue=["USR1", "TERM"])]
    found = latest_complete(folder / "saved")
    trainer(
        MegatronStrategy(token_budget=20, timeout_s=60),
        steps,
        num_nodes=2,
        plugins=[SLURMEnvironment(auto_requeue=False)],
        callbacks=[*([inside] if inside else []), *callbacks],
        enable_checkpointing=True,
        limit_val_batches=1,
        val_check_interval=4,
        check_val_every_n_epoch=None,
    ).fit(Noisy(folder / f"log-{RANK}.jsonl", inside, slow), ToyData(), ckpt_path=str(found) if found else None)


def moments(out: Path) -> None:
    fit(out / "whole")
    results = {}
    for name, (rank, where, at, signum, every, _) in SCENARIOS.items():
        sender = Signal(rank, where, at, signum)
        folder = out / name.replace(" ", "-")
        before = {one: signal.getsignal(one) for one in (signal.SIGUSR1, signal.SIGTERM)}
        try:
            fit(folder, inside=sender, every=every)
            code = 0
        except Preempted as preempted:
            code = int(preempted.code or 0)
        restored = before == {one: signal.getsignal(one) for one in before}
        saved = sorted(path.name for path in (folder / "saved").iterdir())
        fit(folder)
        results[name] = {"code": code, "saved": saved, "restored": restored}
    (out / f"moments-{RANK}.json").write_text(json.dumps(results))


def main() -> None:
    torch.set_num_threads(1)
    out, mode = Path(sys.argv[1]), sys.argv[2]
    if mode == "first":
        fit(out / "job", slow=0.05, steps=LONG)
    else:
        fit(out / "job", steps=LONG)
        moments(out)


if __name__ == "__main__":
    main()
