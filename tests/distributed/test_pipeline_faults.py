"""A pipeline stage that fails while the draft's features travel ends the run on every rank, with the cause, in time."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from fault_worker import BOUND_S  # noqa: E402
from launch import spawn  # noqa: E402

from tests.distributed.nursery import Child  # noqa: E402
from tests.module.conftest import CONFIG  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

CASES = {
    # fault: what each rank that can still speak has to say
    "killed": ["micro-batch", "rank 0", "is gone"],
    "raises": ["cosmic ray"],
    "forgets": ["micro-batch 1", "stage 0"],
    "small slots": ["tap_rows", "micro-batch"],
}


@pytest.mark.parametrize("fault", CASES)
def test_every_rank_ends_in_time_with_one_cause(fault: str, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 8}))
    processes: list[Child] = []
    try:
        processes = spawn(tmp_path, 2, "fault_worker.py", str(policy), fault)
        codes = [process.wait(300) for process in processes[:1]]
        ended = time.monotonic()
        codes += [process.wait(5 * BOUND_S) for process in processes[1:]]
        assert time.monotonic() - ended < 4 * BOUND_S
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(codes)
    assert (codes[0] == -signal.SIGKILL) == (fault == "killed")
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in (range(1, 2) if fault == "killed" else range(2))]
    for text in said:
        for word in CASES[fault]:
            assert word in text, f"{word!r} is not in {text!r}"
