"""Which transport a pair of ranks gets, and what the ranks of one machine know of each other."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from lightning_spec.errors import ConfigError, TapError
from lightning_spec.parallel.transports.base import Header
from lightning_spec.parallel.transports.board import Board, Member, Wait, started
from lightning_spec.parallel.transports.connect import TapSource, choose, machine
from lightning_spec.parallel.transports.cuda_ipc import _DEVICE_ARGUMENT

CPU = Member(rank=0, global_rank=0, host="a", pid=os.getpid(), machine="one", device="cpu")
GPU = replace(CPU, device="GPU-1", visible=("GPU-1", "GPU-2"))


@pytest.mark.parametrize(
    ("source", "host", "kind"),
    [
        (CPU, replace(CPU, rank=1), "shared_memory"),
        (CPU, replace(CPU, rank=1, machine="two"), "group"),
        (GPU, replace(GPU, rank=1, device="GPU-2"), "cuda_ipc"),
        (GPU, replace(GPU, rank=1, device="GPU-9"), "group"),  # not among the GPUs that the source may open
        (GPU, replace(GPU, rank=1, machine="two"), "group"),
        (GPU, replace(CPU, rank=1), "group"),
    ],
)
def test_auto_takes_the_nearest_way_that_both_ranks_have(source: Member, host: Member, kind: str) -> None:
    assert choose(TapSource(0, 0, 4), 1, [source, host], "auto") == kind
    assert choose(TapSource(0, 0, 4), 0, [source, host], "auto") == "local"
    assert choose(TapSource(0, 0, 4), 1, [source, host], "group") == "group"


def test_a_transport_that_the_ranks_cannot_use_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no shared_memory between.*rank 0.*rank 1.*tap_transport"):
        choose(TapSource(0, 0, 4), 1, [CPU, replace(CPU, rank=1, machine="two")], "shared_memory")


def test_nodes_emulated_on_one_machine_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_NODEID", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    unset = machine()
    monkeypatch.setenv("NODE_RANK", "0")  # Lightning sets it for the processes it starts, not for the first
    assert machine() == unset
    monkeypatch.setenv("NODE_RANK", "1")
    assert machine() != unset
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert machine() == unset


def boards(number: int, store: dist.Store | None = None, apart: bool = False) -> list[Board]:
    members = [replace(CPU, rank=rank, machine=f"m{rank}" if apart else "one") for rank in range(number)]
    made = [Board(member, members, store) for member in members]
    offers = [board.offer for board in made]
    for board in made:
        board.join(offers)
    return made


@pytest.mark.parametrize("apart", [False, True])
def test_the_first_failure_wins_on_all_ranks(apart: bool) -> None:
    three = boards(3, dist.HashStore() if apart else None, apart)
    assert [board.failure() for board in three] == [None] * 3
    told: list[str] = [""] * 3
    threads = [
        threading.Thread(target=lambda r=rank: told.__setitem__(r, three[r].fail(f"rank {r} says")))
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(told)) == 1
    time.sleep(0.25)
    assert {board.failure() for board in three} == set(told)
    for board in three:
        board.close()
        assert board.failure() == told[0]


def test_a_text_longer_than_the_board_is_cut_not_lost() -> None:
    one, two = boards(2)
    first = one.fail("é" * 10_000)
    assert two.failure() == first
    assert len(first) == 4096
    one.close()
    two.close()


def test_a_process_that_was_killed_is_seen_before_anyone_reaps_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert started(child.pid) == started(child.pid) != ""
        members = [CPU, replace(CPU, rank=1, pid=child.pid)]
        board = Board(CPU, members, None)
        board.join([board.offer, -1])
        wait = Wait(board, 5.0, 1, "here", lambda: "nothing came")
        assert 0 < wait.tick() <= 0.05
        assert "is alive" in board.state(1)
        child.kill()
        end = time.monotonic() + 5
        while board.gone() is None and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(TapError, match=f"here: pipeline rank 1 .*pid {child.pid}.* is gone"):
            wait.tick()
        board.close()
    finally:
        child.kill()
        child.wait()
    assert started(child.pid) == ""


def test_a_process_that_left_in_good_order_is_not_missed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    members = [CPU, replace(CPU, rank=1, pid=child.pid)]
    board = Board(CPU, members, None)
    board.join([board.offer, -1])
    os.pwrite(board.offer, b"\1", 8 + 8192 + 1)  # what the other's `leave` writes
    child.kill()
    child.wait()
    assert board.gone() is None
    assert "has closed the channel" in board.state(1)
    board.close()


def test_a_header_survives_its_bytes() -> None:
    header = Header(2**40, -1, 3, 2**33, 0, 5, 1)
    assert len(header.pack()) == Header.SIZE
    assert Header.unpack(header.pack()) == header
    assert header.kind == "torch.bfloat16"
    assert replace(header, dtype=99).kind == "unknown dtype 99"


def test_pytorch_still_names_the_gpu_where_the_ipc_link_writes_it() -> None:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[_DEVICE_ARGUMENT] == "storage_device"
