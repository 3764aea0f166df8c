"""For all tests: one thread in this process, so that sums have one order and two cores are not fought over; no process
group outlives its module; and which tests may run beside each other (`pytest -n 2 --dist loadgroup`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).parent
FIRST = ("engine", "distributed", "integration")
"""Folders with the longest files: when these come last, one process waits for the other's."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests run in one process. So do all that share the engines of tests/engine, one of which at a time may
    bind to the cores. First, because xdist reads the groups in this hook too."""
    for item in items:
        file = item.path.relative_to(HERE)
        item.add_marker(pytest.mark.xdist_group("engine" if file.parts[0] == "engine" else str(file)))
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
