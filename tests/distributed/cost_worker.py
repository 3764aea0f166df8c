"""One rank of test_cost_bytes.py: `python cost_worker.py OUT CASES`. Writes OUT/RANK.json: bytes sent in each case."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

os.environ["RANK"] = os.environ["LOCAL_RANK"]

from benchmarks.cp_steps import attention, draft


def main() -> None:
    torch.set_num_threads(1)
    out, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    sent = []
    for case in cases:
        kind = case.pop("kind")
        step = draft(**case) if kind == "draft" else attention(**case)
        sent.append(step()["sent"])
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(sent))


if __name__ == "__main__":
    main()
