"""Checkpoints that four processes save in one layout and load in others, against AdamW over whole tensors."""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import checkpoint_worker as worker  # noqa: E402
from launch import start  # noqa: E402

from lightning_spec.parallel.cpu_stand_in import cpu_stand_in  # noqa: E402
from lightning_spec.parallel.groups import (  # noqa: E402
    ParallelSizes,
    initialise_groups,
    start_single_process_world,
)
from lightning_spec.policy import build_policy, hf_tensors  # noqa: E402
from lightning_spec.shapes import PolicyShape  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

LOADED = [(name, layout) for name, case in worker.CASES.items() for layout in case.loaded]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The worker's files; one process has saved a case of its own before, and loads the others' after."""
    folder = tmp_path_factory.mktemp("layouts")
    start_single_process_world(60)
    initialise_groups(ParallelSizes(), timeout_s=60)
    with cpu_stand_in():
        worker.train_and_save("from-one", folder)
        start(folder, 4, "checkpoint_worker.py")
        for name, case in worker.CASES.items():
            if case.saved != "one":
                worker.load_and_go_on(name, "one", folder)
    return folder


def read(path: Path) -> Any:
    return torch.load(path, weights_only=False)


class Reference:
    """AdamW over a case's whole tensors, with the norm over all of them."""

    def __init__(self, case: worker.Case) -> None:
        shape = PolicyShape.from_hf(worker.POLICIES[case.policy], key="test")
        with cpu_stand_in():
            policy = dict(hf_tensors(build_policy(shape, seed=1)))
        draft = worker.Draft(1, True)
        self.buffer = draft.get_buffer("map")
        self.dtype = case.dtype
        weights = {"policy": policy, "draft": dict(draft.named_parameters())}
        # Main weights begin as what the weights were rounded to.
        self.main = {
            model: {name: tensor.detach().to(case.dtype).float().clone() for name, tensor in tensors.items()}
            for model, tensors in weights.items()
        }
        self.moments = {
            model: {name: (torch.zeros_like(t), torch.zeros_like(t)) for name, t in tensors.items()}
            for model, tensors in self.main.items()
        }
        self.steps = {"policy": 0, "draft": 0}

    def norm(self, model: str, step: int) -> float:
        return math.sqrt(sum(float(g.double().square().sum()) for g in self.gradients(model, step).values()))

    def gradients(self, model: str, step: int) -> dict[str, Tensor]:
        prefix = "draft." if model == "draft" else ""
        return {n: worker.gradient(prefix + n, tuple(t.shape), step) for n, t in self.main[model].items()}

    def step(self, model: str, step: int) -> None:
        config = worker.OPTIM[model]
        self.steps[model] += 1
        count, (beta1, beta2) = self.steps[model], config.betas
        factor = min(1.0, config.clip_norm / (self.norm(model, step) + 1e-6))
        for name, gradient in self.gradients(model, step).items():
            main, (first, second) = self.main[model][name], self.moments[model][name]
            gradient = gradient * factor
            main *= 1 - config.lr * (config.weight_decay if main.ndim > 1 else 0.0)
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            scale = (second / (1 - beta2**count)).sqrt() + config.eps
            main -= config.lr / (1 - beta1**count) * first / scale

    def tensors(self) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {"model.draft.map": self.buffer}
        for model, mains in self.main.items():
            out[f"optimizer.{model}.steps"] = torch.tensor(self.steps[model])
            for name, main in mains.items():
                out[f"model.{model}.{name}"] = main.to(self.dtype)
                flat = (len(main), -1) if main.ndim > 2 else main.shape
                state = dict(zip(("exp_avg", "exp_avg_sq"), self.moments[model][name], strict=True))
                if self.dtype is not torch.float32:
                    state["master"] = main
                for kind, tensor in state.items():
                    out[f"optimizer.{model}.{kind}.{name}"] = tensor.view(flat)
        return out


@functools.cache
def after(name: str, *, next_step: bool) -> Reference:
    """Where a case's training must have come to, with or without the step after its checkpoint."""
    reference = Reference(worker.CASES[name])
    for step in (0, 1):
        reference.step("policy", step)
        reference.step("draft", step)
    reference.step("draft", 2)
    if next_step:
        reference.step("policy", 3)
        reference.step("draft", 3)
    return reference


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        # A bf16 weight may be rounded to either side.
        tolerance = {"rtol": 8e-3, "atol": 1e-5} if tensor.dtype is torch.bfloat16 else {"rtol": 2e-5, "atol": 2e-7}
        torch.testing.assert_close(found[name], tensor, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", list(worker.CASES))
def test_a_checkpoint_names_whole_tensors_whatever_the_layout_that_trained_them(name: str, out: Path) -> None:
    saved = read(out / f"{name}-saved.pt")["tensors"]
    compare(saved, after(name, next_step=False).tensors())


@pytest.mark.parametrize("name", list(worker.CASES))
def test_norms_are_those_of_the_whole_gradient_and_a_broken_one_stops_its_model_only(name: str, out: Path) -> None:
    """Copies on tensor-parallel ranks, tied heads on another stage, experts and shares of them: each counts once."""
    case = worker.CASES[name]
    reference, steps = Reference(case), read(out / f"{name}-saved.pt")["notes"]
    hosts = 0
    for of_rank in steps:
        hosts += "draft/grad_norm" in of_rank[0]
        for step, metrics in enumerate(of_rank):
            if step < 2:
                assert metrics["policy/grad_norm"] == pytest.approx(reference.norm("policy", step), rel=1e-6)
                assert metrics["policy/clip_factor"] < 1
            else:
                assert (metrics["policy/grad_norm"], metrics["policy/skipped_steps"]) == (math.inf, 1.0)
            if "draft/grad_norm" in metrics:
                assert metrics["draft/grad_norm"] == pytest.approx(reference.norm("draft", step), rel=1e-6)
                assert metrics["draft/skipped_steps"] == 0
    assert hosts == len(steps) // worker.LAYOUTS[case.saved].sizes.pipeline_parallel


ALL = [*LOADED, *((name, "one") for name, case in worker.CASES.items() if case.saved != "one")]


@pytest.mark.parametrize(("name", "layout"), ALL)
def test_another_layout_loads_every_tensor_bit_for_bit(name: str, layout: str, out: Path) -> None:
    saved, loaded = read(out / f"{name}-saved.pt")["tensors"], read(out / f"{name}-{layout}-loaded.pt")["tensors"]
    assert sorted(saved) == sorted(loaded)
    for key, tensor in saved.items():
        assert torch.equal(loaded[key], tensor), key


@pytest.mark.parametrize(("name", "layout"), ALL)
def test_another_layout_goes_on_as_the_first_would_have(name: str, layout: str, out: Path) -> None:
    following = read(out / f"{name}-{layout}-next.pt")
    reference = after(name, next_step=True)
    compare(following["tensors"], reference.tensors())
    for (metrics,) in following["notes"]:
        assert metrics["policy/grad_norm"] == pytest.approx(reference.norm("policy", 3), rel=1e-6)


@pytest.mark.parametrize(("name", "layout"), ALL)
def test_every_rank_shows_the_learning_rates_of_both_models(name: str, layout: str, out: Path) -> None:
    for _, groups in read(out / f"{name}-{layout}-loaded.pt")["notes"]:
        rates = {group["name"]: (group["lr"], group["weight_decay"]) for group in groups}
        wanted = {
            f"{m}/{k}": (c.lr, c.weight_decay if k == "decay" else 0.0)
            for m, c in worker.OPTIM.items()
            for k in ("decay", "no_decay")
        }
        assert rates == wanted


@pytest.mark.parametrize(("name", "layout"), ALL)
def test_a_data_rank_s_position_and_generators_are_kept_where_there_are_as_many_data_ranks(
    name: str, layout: str, out: Path
) -> None:
    """Whatever the other sizes. Elsewhere all get the first rank's position, and generators of their own."""

    def data_ranks(of: str) -> int:
        return worker.LAYOUTS[of].sizes.data_parallel(1 if of == "one" else 4)

    same = data_ranks(worker.CASES[name].saved) == data_ranks(layout)
    for (position, rank, generators), _ in read(out / f"{name}-{layout}-loaded.pt")["notes"]:
        assert position == (rank if same else 0)
        assert generators == same


@pytest.mark.parametrize("policy", list(worker.POLICIES))
def test_a_policy_has_nothing_to_save_but_parameters(policy: str, out: Path) -> None:
    """Checkpoints know a policy by the places of its parameters; a buffer of its own would be left out."""
    with cpu_stand_in():
        model = build_policy(PolicyShape.from_hf(worker.POLICIES[policy], key="test"))
    saved = {name for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    assert saved == {name for name, _ in model.named_parameters()}


def test_every_rank_is_told_what_does_not_fit(out: Path) -> None:
    told = [read(out / f"refusals-{rank}.pt") for rank in range(4)]
    assert all(one == told[0] for one in told)
    assert "surplus model.draft.fc" in told[0]["surplus"]
    assert "missing model.draft.fc" in told[0]["missing"]
    assert "policy is 'untied' in the checkpoint, 'tied' here" in told[0]["other policy"]
    assert "x: pieces of (2,) and of (3,) overlap at (0,)" in told[0]["other cuts"]
    assert "x: the ranks hold 4 of 5 elements" in told[0]["hole"]


def test_replicas_are_written_once(out: Path) -> None:
    """Four ranks write as many bytes as one."""

    def size(name: str) -> int:
        return sum(path.stat().st_size for path in (out / f"{name}-checkpoint" / "tensors").iterdir())

    assert size("tied") < 1.3 * size("from-one")
