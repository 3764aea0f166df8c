"""A language model draft over two ranks, by rows (CP) and by vocabulary (TP), equals one rank (CASES A3, B5, B7)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launch import start

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def test_loss_metrics_and_every_gradient_over_two_ranks_equal_one_rank(tmp_path: Path) -> None:
    """Context parallelism by ring and Ulysses, then tensor parallelism, in one world."""
    start(tmp_path, 2, "lm_worker.py")
