"""One rank of a replica that splits the model: rollouts through one engine that all its ranks refit.

python replica_worker.py OUT POLICY NAME KEY=NUMBER... runs context_rollouts.py's NAME in the layout that the keys say.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import context_rollouts
import torch


def main() -> None:
    torch.set_num_threads(1)
    out, policy, *names = sys.argv[1:]
    layout = {key: int(number) for key, number in (word.split("=") for word in names if "=" in word)}
    # Lightning takes the world's size out of the environment when a run ends.
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    for name in (name for name in names if "=" not in name):
        context_rollouts.save(Path(policy), Path(out), name, rank, world, **layout)


if __name__ == "__main__":
    main()
