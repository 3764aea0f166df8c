"""EAGLE-3 and MTP over context-parallel ranks equals one rank, in every mode (CASES.md A3, B5, B6, B7, B9)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launch import start

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.mark.parametrize("size", [2, 4])
def test_loss_metrics_and_every_gradient_summed_over_ranks_equal_one_rank(size: int, tmp_path: Path) -> None:
    start(tmp_path, size, "draft_worker.py")
