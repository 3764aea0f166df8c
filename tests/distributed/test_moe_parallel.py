"""Experts over several ranks change nothing: hidden states, every gradient and its norm equal one process's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.launch import start
from tests.distributed.moe_worker import CASES, micro_batches

TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """case -> what each of its ranks wrote; one start of workers for all cases."""
    folder = tmp_path_factory.mktemp("moe")
    make_policy(folder / "policy")
    start(folder, max(case.world for case in CASES.values()), "moe_worker.py", str(folder / "policy"), *CASES)
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(case.world)] for name, case in CASES.items()
    }


def make_policy(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        max_position_embeddings=128,
        initializer_range=0.2,
        dtype=torch.float32,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def whole(results: dict[str, list[dict[str, Any]]]) -> dict[str, Tensor]:
    """The gradients of one process, by checkpoint name."""
    (one,) = results["one"]
    found: dict[str, Tensor] = {}
    for name, offset, shape, tensor in one["gradients"]:
        rectangle(found.setdefault(name, torch.full(shape, math.nan, dtype=tensor.dtype)), offset, tensor).copy_(tensor)
    assert all(gradient.isfinite().all() for gradient in found.values())
    return found


def rectangle(tensor: Tensor, offset: tuple[int, ...], like: Tensor) -> Tensor:
    return tensor[tuple(slice(first, first + size) for first, size in zip(offset, like.shape, strict=True))]


LAYOUTS = [name for name in CASES if name != "one"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_holds_its_part_of_the_gradients_of_one_process(
    name: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    wanted = whole(results)
    held = {tensor: torch.zeros(gradient.shape, dtype=torch.bool) for tensor, gradient in wanted.items()}
    for rank in results[name]:
        for tensor, offset, _, gradient in rank["gradients"]:
            expected = rectangle(wanted[tensor], offset, gradient)
            torch.testing.assert_close(
                gradient, expected, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda m, n=tensor: f"{n}: {m}"
            )
            rectangle(held[tensor], offset, gradient).fill_(True)
    assert all(cells.all() for cells in held.values()), [n for n, cells in held.items() if not cells.all()]
    moving = [n for n, gradient in wanted.items() if gradient.abs().max() > 1e-3]
    assert sum(".experts." in n for n in moving) == 3 * 4 * 3
    assert {n for n in wanted if n.startswith("model.")} == set(moving)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_norm_of_dense_and_expert_gradients_together_is_that_of_one_process(
    name: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    wanted = math.sqrt(sum(float(gradient.square().sum()) for gradient in whole(results).values()))
    for rank in [*results["one"], *results[name]]:
        assert rank["norm"] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if CASES[name].sizes.context_parallel == 1])
def test_hidden_states_are_those_of_one_process(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    (one,) = results["one"]
    speaking = 0
    for rank in results[name]:
        data_rank, data_size = rank["data"]
        if not rank["hidden"]:
            continue  # not the last pipeline stage
        speaking += 1
        expected = one["hidden"][data_rank::data_size]
        assert len(rank["hidden"]) == len(expected) == len(micro_batches(data_rank, data_size))
        for hidden, want in zip(rank["hidden"], expected, strict=True):
            torch.testing.assert_close(hidden, want, atol=TOLERANCE, rtol=TOLERANCE)
    assert speaking == CASES[name].world // CASES[name].sizes.pipeline_parallel
