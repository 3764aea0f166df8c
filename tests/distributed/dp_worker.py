"""One rank of test_data_parallel.py: `python dp_worker.py OUT`, with LOCAL_RANK and WORLD_SIZE in the environment.

Runs every scenario one after another and writes OUT/SCENARIO-rank.pt: logged metrics, reduced gradients, weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "strategies"))

from toy_module import ToyData, ToyModule, optim, trainer

from callbacks.checkpoint import SpecCheckpoint
from lightning_spec.metrics import MetricBag
from strategies import MegatronStrategy


class Recorder(ToyModule):
    """Also keeps each step's gradients as they are after the reductions (the whole of it, on every rank)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gradients: list[dict[str, torch.Tensor]] = []

    def step_done(self, metrics: MetricBag, batch: Any) -> None:
        super().step_done(metrics, batch)
        self.gradients.append({name: p.main_grad.clone() for name, p in self.named_parameters()})


SCENARIOS: dict[str, dict[str, Any]] = {
    "even": {},
    "uneven": {"data": {"uneven": True}},
    "seeds": {"seed": "rank"},
    "sharded": {"strategy": {"distributed_optimizer": True}, "dtype": torch.float32},
    "bf16": {"strategy": {"distributed_optimizer": True, "precision": "bf16"}, "dtype": torch.float32},
}


def run(name: str, out: Path, devices: int, rank: int, resume: Path | None = None) -> Recorder:
    scenario = SCENARIOS[name]
    module = Recorder(
        optim(clip_norm=0.2),
        optim(clip_norm=0.5),
        dtype=scenario.get("dtype", torch.float64),
        seed=rank if scenario.get("seed") == "rank" else 0,
    )
    one = trainer(
        MegatronStrategy(token_budget=12, timeout_s=60, **scenario.get("strategy", {})),
        4,
        devices=devices,
        callbacks=[SpecCheckpoint(str(out / f"{name}-checkpoints"), every_n_steps=2, keep=0)],
        enable_checkpointing=True,
        limit_val_batches=1,
    )
    one.fit(module, ToyData(**scenario.get("data", {})), ckpt_path=str(resume) if resume else None)
    one.validate(module, ToyData(**scenario.get("data", {})), verbose=False)
    return module


def main() -> None:
    torch.set_num_threads(1)
    out, world, rank = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    for name in SCENARIOS:
        module = run(name, out, world, rank)
        found = {
            "logged": module.logged,
            "validated": module.validated,
            "gradients": module.gradients,
            "weights": module.state_dict(),
        }
        torch.save(found, out / f"{name}-{rank}.pt")


if __name__ == "__main__":
    main()
