"""EAGLE-3 and MTP over tensor-parallel ranks, alone and with context parallelism, equals one rank (A3, B9, D6)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launch import start

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.mark.parametrize("size", [2, 4])
def test_loss_and_metrics_on_every_rank_and_gradients_summed_over_ranks_equal_one_rank(
    size: int, tmp_path: Path
) -> None:
    """Two ranks: TP 2. Four: TP 2 x CP 2, and TP 4."""
    start(tmp_path, size, "draft_tp_worker.py")
