"""What it costs to move a micro-batch's taps from one process to another: the TapChannel against the plain ways.

    python -m benchmarks.tap_transport [--quick] [--json FILE]

Two processes on this machine. "paced": the source makes a block every few milliseconds, as forwards do; the figures are
the time inside `put` (lost to the source's forward) and inside `get` (lost to the host once the block is there).
"burst": blocks back to back; the figure is MiB/s until all are read.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import common

SHAPES = {"small": (64, 256), "large": (4096, 768)}
PAUSE_S = {"small": 0.002, "large": 0.02}
"""A forward's time, between two blocks of the paced runs."""


class Way(Protocol):
    """One way to move blocks from rank 0 to rank 1."""

    def begin(self, step: int) -> None: ...
    def put(self, micro: int, block: Tensor) -> None: ...
    def get(self, micro: int) -> Tensor: ...
    def finish(self) -> None: ...


class Channel:
    def __init__(self, transport: Any, rows: int, width: int) -> None:
        from lightning_spec.parallel.groups import Ranks
        from lightning_spec.parallel.tap_channel import TapChannel, TapSource

        world = dist.group.WORLD
        assert world is not None
        self._rows = rows
        self._channel = TapChannel(
            [TapSource(0, 0, width)],
            1,
            Ranks(world, world),
            rows=rows,
            dtype=torch.float32,
            depth={0: 4},
            bound_s=60,
            transport=transport,
        )
        atexit.register(self._channel.close)

    def begin(self, step: int) -> None:
        self._channel.begin(step)

    def finish(self) -> None:
        self._channel.finish()

    def put(self, micro: int, block: Tensor) -> None:
        self._channel.put(0, micro, block)

    def get(self, micro: int) -> Tensor:
        return self._channel.get(0, micro, self._rows)


class Blocking:
    """A blocking send inside the forward, as a hook would do it."""

    def __init__(self, rows: int, width: int) -> None:
        self._shape = rows, width

    def begin(self, step: int) -> None:
        """Nothing to prepare."""

    def put(self, micro: int, block: Tensor) -> None:
        dist.send(block, 1)

    def get(self, micro: int) -> Tensor:
        block = torch.empty(self._shape)
        dist.recv(block, 0)
        return block

    def finish(self) -> None:
        """Nothing is under way."""


class Files:
    """A file for each block, moved into place when it is complete; the host polls for it."""

    def __init__(self) -> None:
        name = [tempfile.mkdtemp(prefix="tap-bench-")] if dist.get_rank() == 0 else [""]
        dist.broadcast_object_list(name)
        self._folder, self._step = Path(name[0]), 0
        atexit.register(shutil.rmtree, name[0], ignore_errors=True)

    def begin(self, step: int) -> None:
        self._step = step

    def put(self, micro: int, block: Tensor) -> None:
        path = self._path(micro)
        with open(path.with_suffix(".part"), "wb") as file:
            pickle.dump(block.numpy(), file, protocol=5)
        path.with_suffix(".part").rename(path)

    def get(self, micro: int) -> Tensor:
        path = self._path(micro)
        while not path.exists():
            time.sleep(0.0002)
        with open(path, "rb") as file:
            block = torch.from_numpy(pickle.load(file))
        path.unlink()
        return block

    def finish(self) -> None:
        """Nothing is under way."""

    def _path(self, micro: int) -> Path:
        return self._folder / f"{self._step}-{micro}"


def make(blocks: int, rounds: int) -> Callable[[], dict[str, Any]]:
    """One rank's part of everything: in each round all ways take turns, so that only neighbours are compared."""
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
    torch.set_num_threads(1)
    ways: dict[tuple[str, str], Way] = {}
    for size, (rows, width) in SHAPES.items():
        ways[size, "shared_memory"] = Channel("shared_memory", rows, width)
        ways[size, "group"] = Channel("group", rows, width)
        ways[size, "blocking send/recv"] = Blocking(rows, width)
        ways[size, "pickle to a file"] = Files()

    def run() -> dict[str, Any]:
        found: dict[tuple[str, str], list[tuple[float, float, float]]] = {key: [] for key in ways}
        for step in range(1, rounds + 2):
            for (size, way), made in ways.items():
                taps = torch.randn(SHAPES[size])
                put, get, _ = one(made, taps, 2 * step, blocks, PAUSE_S[size])
                _, _, seconds = one(made, taps, 2 * step + 1, blocks, 0.0)
                if step > 1:  # the first round warms up
                    found[size, way].append((put * 1e6, get * 1e6, blocks * taps.nbytes / 2**20 / seconds))
        middle = {key: [statistics.median(column) for column in zip(*rows, strict=True)] for key, rows in found.items()}
        return {
            "transports": [
                {"way": way, "size": size, "put_us": put, "get_us": get, "burst_mib_per_s": speed}
                for (size, way), (put, get, speed) in middle.items()
            ]
        }

    return run


def one(made: Way, taps: Tensor, step: int, blocks: int, pause_s: float) -> tuple[float, float, float]:
    """Seconds of the median `put`, of the median `get`, and of everything; the same on both ranks."""
    times = []
    dist.barrier()
    begin = time.perf_counter()
    made.begin(step)
    for micro in range(blocks):
        # The host asks when the block has had time to arrive.
        time.sleep(pause_s * (1 + dist.get_rank() / 2 if micro == 0 else 1))
        start = time.perf_counter()
        made.put(micro, taps) if dist.get_rank() == 0 else made.get(micro)
        times.append(time.perf_counter() - start)
    made.finish()
    both: list[Any] = [None, None]
    dist.all_gather_object(both, (statistics.median(times), time.perf_counter() - begin))
    return both[0][0], both[1][0], max(both[0][1], both[1][1])


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    blocks, rounds = (4, 1) if options.quick else (32, options.rounds)
    case = common.Case("all", "benchmarks.tap_transport:make", {"blocks": blocks, "rounds": rounds}, ranks=2)
    (result,) = common.measure([case], rounds=0, threads=1, timeout=300)
    figures = result.extra["transports"]
    print(f"{'way':22}{'block MiB':>10}{'put us':>10}{'get us':>10}{'burst MiB/s':>13}")
    for one_way in figures:
        rows, width = SHAPES[one_way["size"]]
        print(
            f"{one_way['way']:22}{rows * width * 4 / 2**20:10.2f}{one_way['put_us']:10.0f}{one_way['get_us']:10.0f}"
            f"{one_way['burst_mib_per_s']:13.0f}"
        )
    common.write_json(options.json, "tap_transport", options, transports=figures)


if __name__ == "__main__":
    main()
