"""For all tests: one thread in this process, so that sums have one order and two cores are not fought over; no process
group outlives its module; and which tests may run beside each other (`pytest -n 2`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from xdist.scheduler import LoadFileScheduling

HERE = Path(__file__).parent
FIRST = ("engine", "distributed", "integration")
"""Folders with the longest files: when these come last, one process waits for the other's."""


class Files(LoadFileScheduling):
    """A file's tests run in one process. So do all that share the engines of tests/engine, one of which at a time may
    bind to the cores. (xdist 3.8's own groups have no effect under pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "engine" if file.startswith("tests/engine/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Files:
    return Files(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: order(item.path.relative_to(HERE).parts[0]))


def order(folder: str) -> int:
    return FIRST.index(folder) if folder in FIRST else len(FIRST)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _groups_end_with_the_module() -> Iterator[None]:
    yield
    if dist.is_initialized():
        from lightning_spec.parallel.groups import destroy_groups

        destroy_groups()
