"""The cost model's traffic against bytes counted in real steps over gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_spec.attention.cost import DraftWork, estimate
from tests.distributed.launch import start

pytestmark = pytest.mark.distributed

SIZES: dict[str, Any] = {"hidden": 32, "heads": 4, "kv_heads": 4, "head_dim": 16, "inner": 32, "vocabulary": 64}


def case(mode: str, tokens: int, passes: int, prompt: int = 0, layers: int = 1, **more: Any) -> dict[str, Any]:
    kind = {"kind": "draft", "mode": mode, "tokens": tokens, "passes": passes, "prompt": prompt, "layers": layers}
    return kind | {"chunk_rows": 64} | SIZES | more


CASES = [
    case("ring", 512, 3),
    case("ring", 512, 1, kv_heads=2),
    case("ring", 510, 4, prompt=400),
    case("ring", 256, 3, layers=2),
    case("ulysses", 512, 3),
    case("ulysses", 512, 4, prompt=256),
    case("stream", 512, 3),
    case("stream", 512, 7, kv_heads=2),
    case("stream", 510, 4, prompt=400),
    case("stream", 256, 3, layers=2),
]
TOLERANCE = 0.15


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_sent_are_the_estimated_ones(tmp_path: Path, world: int) -> None:
    """Mean over ranks, within 15 %."""
    start(tmp_path, world, "cost_worker.py", json.dumps(CASES), timeout_s=280)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    wrong = []
    for one, *sent in zip(CASES, *ranks, strict=True):
        work = DraftWork(
            tokens=one["tokens"],
            context=world,
            passes=one["passes"],
            layers=one["layers"],
            heads=one["heads"],
            kv_heads=one["kv_heads"],
            head_dim=one["head_dim"],
            hidden=one["hidden"],
            intermediate=one["inner"],
            vocabulary=one["vocabulary"],
            taps=3,
            bytes_per_element=4,
            rows=one["tokens"] - one["prompt"],
            chunk_rows=one["chunk_rows"],
        )
        said, found = estimate(work, one["mode"]).traffic, sum(sent) / world
        if abs(said / found - 1) > TOLERANCE:
            wrong.append(f"{one}: {said} said, {found:.0f} sent on average ({sent})")
    assert not wrong, "\n".join(wrong)
