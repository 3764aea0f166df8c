"""Losses with the vocabulary split over ranks equal the losses with all of it on one: gloo worlds of 2 and 3 (with 3
the parts are uneven). The cases are in vocab_worker.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.launch import start

pytestmark = pytest.mark.distributed

CLAIMS = {
    "logprobs": "log-probs, entropies and both gradients are those of one rank, in float64, float32 and bfloat16",
    "logprobs bits": "all ranks hold the same bits of them",
    "draft": "every draft loss, with and without labels and bias, its metrics and gradients are those of one rank",
    "draft bits": "all ranks hold the same bits of them",
    "empty parts": "ranks that have none of the draft's tokens take part",
    "ties": "equally likely tokens on two ranks: the lowest id wins",
    "poison": "rows that are not scored do not leak",
    "prepared": "heads that were prepared once change no bit, and sweeps add up",
    "traffic": "collectives and tensors are as few and as small as they should be",
    "refusals": "wrong arguments are refused by every rank before anything is sent",
    "subgroup": "groups that are not the world",
}


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("vocab")
    start(folder, request.param, "vocab_worker.py", timeout_s=200)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("claim", CLAIMS)
def test_vocabulary_parallel_losses_equal_those_of_one_rank(ranks: list[dict[str, Any]], claim: str) -> None:
    for rank, result in enumerate(ranks):
        assert result["checks"].get(claim, 0) > 0, f"rank {rank} made no check; failures: {result['failed']}"
        failed = result["failed"].get(claim, [])
        assert not failed, f"rank {rank}: {len(failed)} of {result['checks'][claim]}: {CLAIMS[claim]}\n" + "\n".join(
            failed[:5]
        )


def test_nothing_else_failed(ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(ranks):
        other = {claim: failed[:3] for claim, failed in result["failed"].items() if claim not in CLAIMS}
        assert not other, f"rank {rank}: {other}"
