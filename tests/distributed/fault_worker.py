"""One rank of test_pipeline_faults.py: `python fault_worker.py OUT POLICY FAULT`, two pipeline stages.

In the second step the first stage fails in the way that FAULT says while it hands over features; what each rank that
can still speak raised goes to OUT/RANK.txt.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lightning as L
import torch
from context_worker import BUDGET, Recorded, Typed, disturbed, grpo, quiet

from lightning_spec.batch import StepBatch
from lightning_spec.draft import Eagle3
from lightning_spec.optim import OptimConfig
from lightning_spec.policy import PolicySource
from strategies import MegatronStrategy
from strategies.taps import PipelineTaps

BOUND_S = 8.0


class Break(L.Callback):
    """Breaks the first stage's second hand-over of the second step."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        data = trainer.datamodule
        data.make()
        data.batches = [
            StepBatch([disturbed(rollout) for rollout in scored.rollouts])
            for scored in module.prepare_rollouts(data.batches, 2)
        ]
        taps = trainer.strategy._steps.taps
        assert isinstance(taps, PipelineTaps)
        send = taps.send

        def broken(chunk: Any, index: int, step: Any) -> None:
            if trainer.global_step == 1 and index == 1 and trainer.strategy.pipeline.first:
                if self.fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.fault == "raises":
                    raise FloatingPointError("a cosmic ray")
                if self.fault == "forgets":
                    return
            send(chunk, index, step)

        taps.send = broken  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    out, policy, fault = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    optim = OptimConfig(lr=1e-2)
    rows = {"tap_rows": 7} if fault == "small slots" else {}
    module = Typed(PolicySource(str(policy), init_seed=3), grpo()(), optim, Eagle3(num_passes=2), None, optim)
    strategy = MegatronStrategy(token_budget=BUDGET, pipeline_parallel=2, timeout_s=BOUND_S, **rows)
    try:
        quiet(strategy, 2, [Break(fault)]).fit(module, datamodule=Recorded())
    except BaseException as error:
        (out / f"{os.environ['LOCAL_RANK']}.txt").write_text(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
