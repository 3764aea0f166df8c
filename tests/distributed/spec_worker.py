"""One rank of test_spec_grpo_data_parallel.py: `python spec_worker.py OUT POLICY_FOLDER`.

Trains the real module for two steps on this rank's share of recorded rollouts, writes OUT/RANK.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_spec.batch import StepBatch
from lightning_spec.draft import Eagle3
from lightning_spec.loss import GRPO
from lightning_spec.module import SpecGRPO
from lightning_spec.optim import OptimConfig
from lightning_spec.policy import PolicySource
from tests.module.conftest import Collect, Recorded, make_rollouts, quiet_trainer


def run(policy: Path, rank: int, world: int) -> dict[str, Any]:
    """Metrics, reduced gradients and weights after two steps; rank r has the rollouts r, r + world, ..."""
    module = SpecGRPO(
        PolicySource(str(policy), init_seed=3),
        GRPO(aggregation="sequence_mean"),
        # A large eps: Adam would make weights of the rounding noise in gradients near zero.
        OptimConfig(lr=1e-2, clip_norm=0.5, eps=1e-3),
        Eagle3(num_passes=3),
        None,
        OptimConfig(lr=1e-2, clip_norm=0.5, eps=1e-3),
    )
    collect = Collect()
    batches = [StepBatch(make_rollouts(seed, count=8)[rank::world]) for seed in (1, 2)]
    # The last rank of two has fewer micro-batches: none of its rollouts is left in the second step.
    if world > 1:
        whole = make_rollouts(2, count=8)
        batches[1] = StepBatch(whole if rank == 0 else [])
    quiet_trainer(2, token_budget=24, callbacks=[collect], devices=world).fit(module, Recorded(batches))
    weights = {**dict(module.policy_tensors()), **{f"draft.{n}": t for n, t in module.draft_tensors() or ()}}
    return {
        "metrics": collect.metrics,
        "gradients": collect.gradients,
        "weights": {name: tensor.detach().clone() for name, tensor in weights.items()},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    local_rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.save(run(Path(sys.argv[2]), local_rank, size), Path(sys.argv[1]) / f"{local_rank}.pt")
