"""The TapChannel between processes: bit-equal blocks, and faults that end every rank with one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import start

pytestmark = pytest.mark.distributed


def test_blocks_are_bit_equal_between_processes_by_both_transports(tmp_path: Path) -> None:
    start(tmp_path, 3, "tap_worker.py", "world", timeout_s=120)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("faults")
    start(folder, 1, "tap_worker.py", "faults", timeout_s=240)
    return json.loads((folder / "faults.json").read_text())


CASES = {
    # fault: (ranks that die of it, words of the error)
    "killed": ((0,), "pipeline rank 0 (", "stage 0, micro-batch 3"),
    "raises": ((), "pipeline rank 1 (", "step 1", "FloatingPointError: loss is not finite"),
    "never_frees": ((), "still unconsumed after 2 s", "step 1, put of stage ", "pipeline rank 2 ("),
    "wrong_rows": (
        (),
        "pipeline rank 2 (",
        "step 1, get of stage 1, micro-batch 3",
        "found (1, 3, 6), needed (1, 3, 4)",
    ),
    "wrong_step": ((), "pipeline rank 2 (", "get of stage 0, micro-batch 0", "found (2, 0, 1), needed (1, 0, 1)"),
    "too_many_rows": ((), "pipeline rank 0 (", "put of stage 0, micro-batch 2", "a slot holds 8 rows", "tap_rows"),
    "stalls": ((), "stage 0 sent nothing for micro-batch 3 within 2 s", "pipeline rank 0 ("),
    "host_killed": ((2,), "pipeline rank 2 ("),
}


PAIRS = [(name, transport) for name in CASES for transport in ("shared_memory", "group")]
PAIRS += [(name, "two nodes") for name in ("killed", "raises", "host_killed")]
"""Two nodes: rank 0 is on one of its own, so there is one link of each transport."""


@pytest.mark.parametrize(("name", "transport"), PAIRS)
def test_a_fault_ends_every_rank_within_the_bound_with_one_error(
    faults: dict[str, Any], name: str, transport: str
) -> None:
    seen = faults[f"{name}-{transport}"]
    dead, *words = CASES[name]
    assert seen["hung"] == 0
    survivors = [seen[str(rank)] for rank in range(3) if rank not in dead]
    assert all(survivor is not None for survivor in survivors), seen
    first = {survivor["text"].partition(" [seen by ")[0] for survivor in survivors}
    if name == "raises":
        # The rank whose own code raised keeps its own exception.
        assert "loss is not finite" in first
        first -= {"loss is not finite"}
    assert len(first) == 1, first
    if name == "killed" and transport != "shared_memory":
        words = ["pipeline rank 0 (", "is lost after step 1, stage 0, micro-batch 2"]  # the last that came
    for word in words:
        assert word in next(iter(first))
    # Twice the bound (the step goes on until a wait begins), and room for a busy machine.
    assert max(survivor["seconds"] for survivor in survivors) < (8.0 if name == "stalls" else 6.0)
    assert [survivor["left"] for survivor in survivors] == [[]] * len(survivors)
    if dead and transport == "shared_memory":
        assert max(survivor["seconds"] for survivor in survivors) < 1.9, "death is seen, not waited for"
