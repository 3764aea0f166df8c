"""For all tests: one thread in this process, so that sums have one order and two cores are not fought over."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
