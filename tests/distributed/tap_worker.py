"""Real processes with a TapChannel between them.

    tap_worker.py FOLDER world              one rank of a gloo world (see launch.py): blocks of several layouts
    tap_worker.py FOLDER faults             starts the ranks of each fault itself; FOLDER/faults.json gets what they saw

The ranks of a fault are forked from one process that has imported everything, so a fault costs no start of Python.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_spec.errors import TapError
from lightning_spec.parallel.groups import Ranks
from lightning_spec.parallel.tap_channel import TapChannel, TapSource, TapStats

BOUND_S = 2.0


def block(step: int, micro: int, rows: int, width: int = 7) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * step + micro))


# --- a world -------


def in_a_world() -> None:
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    ranks = Ranks(dist.group.WORLD, dist.new_group(backend="gloo"))
    os.environ.pop("SLURM_NODEID", None)
    for transport, first, second in (
        ("auto", "shared_memory", "shared_memory"),
        ("group", "group", "group"),
        ("two nodes", "group", "shared_memory"),
        ("auto", "shared_memory", "shared_memory"),
    ):
        os.environ["NODE_RANK"] = "1" if transport == "two nodes" and rank == 0 else "0"
        # Stages 0..5 on 3 ranks: rank 1 has no taps in its first chunk, the host two sources of its own.
        sources = [TapSource(0, 0, 3), TapSource(2, 2, 2), TapSource(4, 1, 1), TapSource(5, 2, 1)]
        made = TapChannel(
            sources,
            2,
            ranks,
            rows=4096,
            dtype=torch.float32,
            depth={0: 2, 4: 1},
            bound_s=60,
            transport="group" if transport == "group" else "auto",
        )
        assert made.transports == {0: first, 2: "local", 4: second, 5: "local"}, made.transports
        for step in range(3):
            with made.step(step):
                for micro in range(7):
                    exchange(made, rank, step, micro, rows=(micro * 617 + step) % 4097)
                # The schedule's own messages go on meanwhile.
                ring = torch.full((1,), float(rank))
                dist.all_reduce(ring)
                assert ring.item() == sum(range(size))
            check(made.last_stats, rank)
        assert (made.memory > 0) == (rank == 2)
        made.close()
    assert left_behind() == [], left_behind()
    dist.barrier()
    dist.destroy_process_group()


def exchange(made: TapChannel, rank: int, step: int, micro: int, rows: int) -> None:
    whole = block(step, micro, rows)
    if rank == 0:
        made.put(0, micro, [whole[:, :1], whole[:, 1:3]])
    if rank == 1:
        made.put(4, micro, whole[:, 5:6])
    if rank == 2:
        made.put(2, micro, whole[:, 3:5])
        made.put(5, micro, [whole[:, 6:]])
        got = torch.cat([made.get(stage, micro, rows) for stage in (0, 2, 4, 5)], dim=1)
        assert torch.equal(got, whole)


def check(stats: TapStats, rank: int) -> None:
    assert stats.blocks_sent == (7, 7, 14)[rank]
    assert stats.blocks_received == (0, 0, 28)[rank]
    if rank == 2:
        assert stats.bytes_received * 3 == stats.bytes_sent * 7  # 7 columns arrive, 3 of them its own


# --- faults -------


class StoreRanks:
    """Ranks whose `gather` goes through a store, so that a killed rank takes no process group with it."""

    def __init__(self, rank: int, size: int, store: dist.Store) -> None:
        self.rank, self.size, self._store, self._round = rank, size, store, 0
        self.cpu_group = self

    def get_group_store(self) -> dist.Store:
        return self._store

    def gather(self, value: Any) -> list[Any]:
        self._round += 1
        self._store.set(f"{self._round}/{self.rank}", pickle.dumps(value))
        return [pickle.loads(self._store.get(f"{self._round}/{rank}")) for rank in range(self.size)]


def step_of(made: TapChannel, rank: int, number: int, fault: Callable[[int, int], int | None]) -> None:
    """A step in which ranks 0 and 1 put 5 blocks that rank 2 gets; `fault(rank, micro)` may replace the rows."""
    with made.step(number):
        for micro in range(5):
            rows = fault(rank, micro)
            rows = micro + 1 if rows is None else rows
            if rank == 2:
                for stage in (0, 1):
                    made.get(stage, micro, micro + 1)
            else:
                made.put(rank, micro, torch.full((rows, 3), float(micro)))
            time.sleep(0.01)


def killed(made: TapChannel, rank: int) -> None:
    def fault(rank: int, micro: int) -> None:
        if (rank, micro) == (0, 3):
            os.kill(os.getpid(), signal.SIGKILL)

    step_of(made, rank, 1, fault)


def raises(made: TapChannel, rank: int) -> None:
    def fault(rank: int, micro: int) -> None:
        if (rank, micro) == (1, 3):
            raise FloatingPointError("loss is not finite")

    step_of(made, rank, 1, fault)


def never_frees(made: TapChannel, rank: int) -> None:
    if rank == 2:
        made.begin(1)
        return
    step_of(made, rank, 1, lambda rank, micro: None)


def wrong_rows(made: TapChannel, rank: int) -> None:
    step_of(made, rank, 1, lambda rank, micro: 6 if (rank, micro) == (1, 3) else None)


def wrong_step(made: TapChannel, rank: int) -> None:
    step_of(made, rank, 2 if rank == 0 else 1, lambda rank, micro: None)


def too_many_rows(made: TapChannel, rank: int) -> None:
    step_of(made, rank, 1, lambda rank, micro: 9 if (rank, micro) == (0, 2) else None)


def stalls(made: TapChannel, rank: int) -> None:
    def fault(rank: int, micro: int) -> None:
        if (rank, micro) == (0, 3):
            time.sleep(2.5 * BOUND_S)

    step_of(made, rank, 1, fault)


def host_killed(made: TapChannel, rank: int) -> None:
    def fault(rank: int, micro: int) -> None:
        if (rank, micro) == (2, 3):
            os.kill(os.getpid(), signal.SIGKILL)

    step_of(made, rank, 1, fault)
    step_of(made, rank, 2, fault)


FAULTS = (killed, raises, never_frees, wrong_rows, wrong_step, too_many_rows, stalls, host_killed)


def child(name: Callable[[TapChannel, int], None], transport: Any, rank: int, port: int, file: Path) -> None:
    ranks: Any = StoreRanks(rank, 3, dist.TCPStore("127.0.0.1", port, is_master=False))
    os.environ.pop("SLURM_NODEID", None)
    os.environ["NODE_RANK"] = "1" if transport == "two nodes" and rank == 0 else "0"
    sources = [TapSource(0, 0, 3), TapSource(1, 1, 3)]
    kind: Any = "auto" if transport == "two nodes" else transport
    made = TapChannel(
        sources, 2, ranks, rows=8, dtype=torch.float32, depth={0: 3, 1: 2}, bound_s=BOUND_S, transport=kind
    )
    step_of(made, rank, 0, lambda rank, micro: None)
    file.with_suffix(".open").touch()
    start, text = time.monotonic(), "no error"
    try:
        name(made, rank)
        while time.monotonic() < start + 3 * BOUND_S:  # a rank with nothing to wait for looks at the channel
            made.check()
            time.sleep(0.02)
    except (TapError, FloatingPointError) as error:
        text = str(error)
    seconds = time.monotonic() - start
    made.close()
    file.write_text(json.dumps({"text": text, "seconds": seconds, "left": left_behind()}))


def left_behind() -> list[str]:
    """Threads, open files and mapped memory of channels in this process."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("tap-")]
    files = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    with open("/proc/self/maps") as maps:
        return threads + [name for name in (*files, *maps) if "memfd:tap-" in name]


def all_faults(folder: Path) -> None:
    seen: dict[str, Any] = {}
    for transport in ("shared_memory", "group"):
        for name in FAULTS:
            seen[f"{name.__name__}-{transport}"] = one_fault(name, transport, folder)
    for name in (killed, raises, host_killed):
        seen[f"{name.__name__}-two nodes"] = one_fault(name, "two nodes", folder)
    (folder / "faults.json").write_text(json.dumps(seen))


def one_fault(name: Callable[[TapChannel, int], None], transport: str, folder: Path) -> dict[str, Any]:
    seen = try_fault(name, transport, folder)
    if seen["hung"] and not seen["opened"]:
        # Once on a loaded machine all three children stood still before they had a channel: this process has threads
        # (torch's, the stores'), and a fork may catch one of them with a lock. What is tested comes after that.
        seen = try_fault(name, transport, folder)
    return seen


def try_fault(name: Callable[[TapChannel, int], None], transport: str, folder: Path) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    files = [folder / f"{name.__name__}-{transport}-{rank}.json" for rank in range(3)]
    children = []
    for rank in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                child(name, transport, rank, store.port, files[rank])
            finally:
                sys.stderr.flush()
                os._exit(0)
        children.append(pid)
    end, codes = time.monotonic() + 60, {}
    while len(codes) < 3 and time.monotonic() < end:
        for pid in set(children) - set(codes):
            if os.waitpid(pid, os.WNOHANG)[0]:
                codes[pid] = True
        time.sleep(0.02)
    for pid in set(children) - set(codes):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {str(rank): json.loads(file.read_text()) if file.exists() else None for rank, file in enumerate(files)} | {
        "hung": 3 - len(codes),
        "opened": sum(file.with_suffix(".open").exists() for file in files),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2] == "world":
        in_a_world()
    else:
        all_faults(Path(sys.argv[1]))
