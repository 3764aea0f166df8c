"""The whole training step (policy, draft, features between them) is the single-process one in every layout.

A few steps of packed micro-batches of different lengths in worlds of two, four and eight processes, all layouts of a
world in one start of it; every drafter under each kind of parallelism.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import layout_worker  # noqa: E402
from launch import start  # noqa: E402
from layout_worker import LAYOUTS, Layout  # noqa: E402

from lightning_spec.batch import StepBatch  # noqa: E402
from tests.module.conftest import CONFIG, write_weights  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1500)]

DENSE = {**CONFIG, "num_hidden_layers": 4}
POLICIES: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "tied": {**DENSE, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True, "vocab_size": 49},
    "experts": {
        **DENSE,
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
}
WHOLE = [name for name, layout in LAYOUTS.items() if not layout.resumes and layout.draft is not None]
EXACT = [name for name in WHOLE if LAYOUTS[name].dtype is torch.float64]


def params(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if LAYOUTS[name].slow else ()) for name in names]


class Results:
    """What the ranks of every layout found, and what one process finds with the same settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "one").mkdir()
        self._one: dict[str, dict[str, Any]] = {}
        self._started: set[bool] = set()

    def one(self, name: str) -> dict[str, Any]:
        layout = LAYOUTS[name]
        if layout.problem not in self._one:
            resumed = next((n for n, one in LAYOUTS.items() if one.resumes and one.problem == layout.problem), None)
            self._one[layout.problem] = layout_worker.run(
                resumed or name,
                self.folder,
                self.folder / "one",
                alone=True,
                save=resumed is not None,
                scored=self.scored(layout),
            )
            if self.scored(layout) is None:
                torch.save(self._one[layout.problem]["batches"], self._file(layout))
        return self._one[layout.problem]

    def scored(self, layout: Layout) -> list[StepBatch] | None:
        """The rollouts with their log-probs, where a run has made them."""
        return torch.load(self._file(layout), weights_only=False) if self._file(layout).exists() else None

    def _file(self, layout: Layout) -> Path:
        return self.folder / "one" / f"{layout.data}.pt"

    def ranks(self, name: str) -> list[dict[str, Any]]:
        slow = LAYOUTS[name].slow
        if slow not in self._started:
            self._started.add(slow)
            names = [name for name, layout in LAYOUTS.items() if layout.slow == slow]
            for one in names:
                if LAYOUTS[one].resumes or self.scored(LAYOUTS[one]) is None:
                    self.one(one)
            start(self.folder, 1, "layout_worker.py", str(self.folder), *names, timeout_s=900)
        files = [self.folder / f"{name}-{rank}.pt" for rank in range(LAYOUTS[name].ranks)]
        return [torch.load(file, weights_only=False) for file in files]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("layouts")
    for name, config in POLICIES.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        write_weights(folder / name)
    return Results(folder)


def whole(held: list[list[tuple[str, Any]]]) -> dict[str, Tensor]:
    """Whole tensors of the parts that ranks hold; parts that several ranks hold must be equal."""
    out: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for name, (part, offset, shape) in (one for rank in held for one in rank):
        if name not in out:
            out[name] = part.new_zeros(shape)
            seen[name] = torch.zeros(shape, dtype=torch.bool)
        where = tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))
        known = seen[name][where]
        torch.testing.assert_close(part[known], out[name][where][known], rtol=1e-9, atol=1e-12)
        out[name][where] = part
        seen[name][where] = True
    assert all(mask.all() for mask in seen.values()), "a part is on no rank"
    return out


@pytest.mark.parametrize("name", params(EXACT))
def test_every_gradient_is_the_single_process_one(results: Results, name: str) -> None:
    ranks, expected = results.ranks(name), results.one(name)["gradients"]
    for step in range(len(expected)):
        got = whole([rank["gradients"][step] for rank in ranks])
        wanted = whole([expected[step]])
        assert set(got) == set(wanted)
        for model in ("draft.",) if LAYOUTS[name].frozen else ("draft.", "model."):
            assert any(tensor.any() for key, tensor in wanted.items() if key.startswith(model))
        for key, tensor in wanted.items():
            assert torch.allclose(got[key], tensor, rtol=1e-8, atol=1e-10), f"step {step}: {key}"


@pytest.mark.parametrize("name", params(WHOLE))
def test_losses_metrics_and_weights_are_the_single_process_ones(results: Results, name: str) -> None:
    expected = results.one(name)
    # Lightning keeps metrics in float32.
    rtol, read = (1e-8, 3e-7) if name in EXACT else (2e-4, 2e-4)
    ranks = results.ranks(name)
    for rank in ranks:
        assert len(rank["metrics"]) == len(LAYOUTS[name].steps)
        for got, wanted in zip(rank["metrics"], expected["metrics"], strict=True):
            assert set(got) == set(wanted)
            for key, value in wanted.items():
                assert got[key] == pytest.approx(value, rel=read, abs=read), key
        assert rank["validated"] == pytest.approx(expected["validated"], rel=read, abs=read)
    got = whole([rank["weights"] for rank in ranks])
    wanted = whole([expected["weights"]])
    assert set(got) == set(wanted)
    for key, tensor in wanted.items():
        assert torch.allclose(got[key], tensor, rtol=rtol, atol=rtol), key


@pytest.mark.parametrize(
    "name", params([name for name in WHOLE if "pp" in name and not {"cp2", "dp2", "ep2"} & {*name.split("_")}])
)
def test_the_draft_reads_the_features_of_an_unpipelined_policy(results: Results, name: str) -> None:
    """CASES C2: bit for bit where only the pipeline differs."""
    expected = results.one(name)["features"]
    found: dict[int, Tensor] = {}
    for rank in results.ranks(name):
        found |= rank["features"]
    real = {index: tensor for index, tensor in found.items() if len(tensor)}
    assert set(real) == set(expected)
    for index, tensor in expected.items():
        if "tp" in name:
            torch.testing.assert_close(real[index], tensor, rtol=1e-10, atol=1e-12)
        else:
            assert torch.equal(real[index], tensor)


@pytest.mark.parametrize("name", ["pp2", "tp2_pp2", "pp2_frozen"])
def test_the_draft_is_on_its_stage_only(results: Results, name: str) -> None:
    """CASES C6."""
    for number, rank in enumerate(results.ranks(name)):
        held = any(key.startswith("draft.") for key, _ in rank["weights"])
        assert held == (number >= LAYOUTS[name].ranks // 2)


def test_the_schedule_communicates_as_without_a_draft(results: Results) -> None:
    """Features have a channel of their own: the same calls, in the same order, with the same shapes."""
    for with_draft, silent in zip(results.ranks("pp2_vp2"), results.ranks("pp2_vp2_silent"), strict=True):
        assert len(silent["calls"]) > 30
        assert with_draft["calls"] == silent["calls"]


def test_a_run_in_one_process_goes_on_over_two_tensor_parallel_ranks(results: Results) -> None:
    expected = results.one("tp2_resumed")["metrics"][1]
    for rank in results.ranks("tp2_resumed"):
        (got,) = rank["metrics"]
        assert got == pytest.approx(expected, rel=3e-7, abs=3e-7)


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.saves])
def test_a_run_over_ranks_goes_on_in_one_process(results: Results, name: str, tmp_path: Path) -> None:
    """CASES G4: weights, optimiser states and steps of policy and draft."""
    results.ranks(name)
    uninterrupted = results.one(name)
    found = layout_worker.run(
        name,
        results.folder,
        tmp_path,
        alone=True,
        resume=layout_worker.first_checkpoint(results.folder, name),
        scored=results.scored(LAYOUTS[name]),
    )
    (got,) = found["metrics"]
    read = 3e-7 if name in EXACT else 2e-4
    assert got == pytest.approx(uninterrupted["metrics"][1], rel=read, abs=read)
