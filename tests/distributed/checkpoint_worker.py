"""One rank of test_checkpoint_layouts.py: `python checkpoint_worker.py OUT`.

Gradients are made up: each tensor's is drawn from its name and the step, and every rank that holds a share of it gets
an equal one. So a plain AdamW over whole tensors says what weights, moments and norms must be in any layout. Writes
OUT/NAME.pt for every state of every case, as whole tensors put together from the ranks' pieces.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_spec.errors import CheckpointError
from lightning_spec.optim import OptimConfig
from lightning_spec.parallel.cpu_stand_in import cpu_stand_in
from lightning_spec.parallel.groups import (
    DataParallel,
    LayerRanks,
    ParallelSizes,
    PipelineParallel,
    TensorParallel,
    initialise_groups,
)
from lightning_spec.parallel.optimizer import JointOptimizer, ModelOptimizer
from lightning_spec.parallel.placement import Placement
from lightning_spec.parallel.sharded import Piece, save_pieces
from lightning_spec.policy import PolicyModel, build_policy, new_policy_config, placements
from lightning_spec.shapes import PolicyShape
from strategies.checkpoints import CheckpointedStrategy
from strategies.wrap import Wrapped, parts_of

DENSE: dict[str, Any] = {
    **new_policy_config(
        "qwen2", vocab_size=97, hidden_size=16, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=24
    ),
    "initializer_range": 0.2,
}
SPARSE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
POLICIES: dict[str, dict[str, Any]] = {
    "tied": DENSE,
    "untied": {**DENSE, "model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 8},
    "sparse": {**DENSE, "model_type": "qwen3_moe", "head_dim": 8, **SPARSE},
}
OPTIM = {
    "policy": OptimConfig(lr=1e-2, weight_decay=0.1, clip_norm=0.5),
    "draft": OptimConfig(lr=3e-2, weight_decay=0.2, clip_norm=0.3, betas=(0.8, 0.9)),
}


@dataclass
class Layout:
    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    distributed: bool = False
    sequence_parallel: bool = False
    layers: list[int] | None = None
    draft: bool = True


LAYOUTS = {
    "one": Layout(),
    "tp2-pp2": Layout(ParallelSizes(2, 2)),
    "dp4-sharded": Layout(distributed=True),
    "pp2-vpp2-dp2-sharded": Layout(ParallelSizes(1, 2, 2), distributed=True),
    "pp4-uneven": Layout(ParallelSizes(1, 4), layers=[2, 1, 1, 0]),
    "tp4-sp": Layout(ParallelSizes(4), sequence_parallel=True),
    "tp2-dp2-sharded": Layout(ParallelSizes(2), distributed=True),
    "tp2-cp2-sharded": Layout(ParallelSizes(2, context_parallel=2), distributed=True),
    "tp2-dp2-ep4-sharded": Layout(ParallelSizes(2, expert_parallel=4), distributed=True, sequence_parallel=True),
    "pp2-dp2-ep2": Layout(ParallelSizes(1, 2, expert_parallel=2)),
    "no-draft": Layout(ParallelSizes(1, 2), draft=False),
}


@dataclass
class Case:
    policy: str
    saved: str
    loaded: tuple[str, ...]
    dtype: torch.dtype = torch.float32


CASES = {
    "tied": Case("tied", "tp2-pp2", ("dp4-sharded", "pp2-vpp2-dp2-sharded")),
    "untied": Case("untied", "pp2-vpp2-dp2-sharded", ("tp2-pp2", "tp4-sp")),
    "bf16": Case("tied", "tp2-dp2-sharded", ("pp4-uneven",), torch.bfloat16),
    "sparse": Case("sparse", "tp2-dp2-ep4-sharded", ("pp2-dp2-ep2", "pp4-uneven")),
    "from-one": Case("tied", "one", ("tp2-cp2-sharded",)),
}


# ---- what is trained -------------------------------------------------------------------------------------------------


class Draft(nn.Module):
    """Whole on the ranks of the last stage, empty elsewhere."""

    def __init__(self, seed: int, resident: bool) -> None:
        super().__init__()
        self.resident = resident
        if resident:
            generator = torch.Generator().manual_seed(seed)
            self.fc = nn.Parameter(torch.randn(6, 10, generator=generator))
            self.kernel = nn.Parameter(torch.randn(3, 2, 5, generator=generator))
            self.norm = nn.Parameter(torch.randn(7, generator=generator))
            self.register_buffer("map", torch.randint(0, 50, (9,), generator=generator))

    def placements(self) -> dict[str, list[Placement]]:
        return {name: [Placement.whole(name, tuple(param.shape))] for name, param in self.named_parameters()}


class Module(nn.Module):
    def __init__(self, name: str, policy: nn.Module, draft: nn.Module | None) -> None:
        super().__init__()
        self.name, self.policy, self.draft = name, policy, draft

    def fingerprint(self) -> dict[str, Any]:
        return {"policy": self.name}


class Run:
    """A policy and its draft in one layout, trained and saved as the strategy does it."""

    def __init__(self, case: Case, layout: Layout, seed: int) -> None:
        relayout(layout.sizes)
        policy = build_policy(
            PolicyShape.from_hf(POLICIES[case.policy], key="test"),
            seed=seed,
            sizes=layout.sizes,
            sequence_parallel=layout.sequence_parallel,
            layout=layout.layers,
        ).to(case.dtype)
        draft = Draft(seed, PipelineParallel().last).to(case.dtype) if layout.draft else None
        self.module = Module(case.policy, policy, draft)
        self.wrapped = Wrapped()
        options = {
            "grad_reduce_in_fp32": case.dtype is torch.bfloat16,
            "use_distributed_optimizer": layout.distributed,
            "overlap_grad_reduce": False,
        }
        models = {"policy": parts_of(policy), "draft": parts_of(draft)}
        self.wrapped.wrap(models, parts_of(policy)[0].config, options, LayerRanks())
        held = {
            name: ModelOptimizer(
                self.wrapped.chunks(name), OPTIM[name], distributed=layout.distributed, replicated=name == "draft"
            )
            for name in sorted(self.wrapped.names)
        }
        elsewhere = {"draft"} - set(held) if layout.draft else set()
        self.joint = JointOptimizer(held, {name: OPTIM[name] for name in elsewhere})
        self.strategy = Strategy(layout.sizes, self.module, self.joint)

    def step(self, step: int, *, broken: bool = False) -> dict[str, float]:
        """One step; `broken`: one element of the policy's gradient on the last stage is infinite. Returns metrics."""
        self.joint.zero_grad()
        self.wrapped.zero()
        for part in self.wrapped.get("policy"):
            _set_policy_gradients(part.module, step)
        for part in self.wrapped.get("draft"):
            named: dict[str, Any] = dict(part.module.named_parameters())
            for name, param in named.items():
                param.main_grad.copy_(gradient(f"draft.{name}", tuple(param.shape), step) / LayerRanks().size)
        if broken and PipelineParallel().last and TensorParallel().rank == 0:
            first: Any = next(self.module.policy.parameters())
            first.main_grad.view(-1)[3] = float("inf")
        for name in sorted(self.wrapped.names, reverse=True):
            for part in self.wrapped.get(name):
                part.finish_grad_sync()
        metrics = self.joint.measure().values()
        self.joint.step()
        return metrics

    def state(self) -> dict[str, Tensor] | None:
        """Every tensor of a checkpoint, whole, on rank 0.

        Raises:
            AssertionError: a rank's copy differs from another's, or nobody holds an element.
        """
        pieces = self.strategy._pieces(optimizer=True)
        index = [(name, piece.offset, piece.shape, piece.tensor.shape, piece.tensor.dtype) for name, piece in pieces]
        # One tensor for each dtype: many small ones are slow to send.
        data = {
            dtype: torch.cat([piece.tensor.reshape(-1) for _, piece in pieces if piece.tensor.dtype == dtype])
            for dtype in {entry[-1] for entry in index}
        }
        every: list[Any] = [None] * dist.get_world_size()
        dist.gather_object((index, data), every if dist.get_rank() == 0 else None)
        if dist.get_rank() != 0:
            return None
        whole: dict[str, Tensor] = {}
        seen: dict[str, Tensor] = {}
        for index, data in every:
            rest = dict(data)
            for name, offset, shape, size, dtype in index:
                tensor, rest[dtype] = rest[dtype][: size.numel()].view(size), rest[dtype][size.numel() :]
                place = tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))
                target = whole.setdefault(name, torch.zeros(shape, dtype=dtype))
                mark = seen.setdefault(name, torch.zeros(shape, dtype=torch.bool))
                known = mark[place]
                assert torch.equal(target[place][known], tensor[known]), f"{name}: copies differ"
                target[place], mark[place] = tensor, True
        assert all(mark.all() for mark in seen.values())
        return whole


class Strategy(CheckpointedStrategy):
    """The checkpoint half of the strategy around models that were built by hand."""

    def __init__(self, sizes: ParallelSizes, module: nn.Module, joint: JointOptimizer) -> None:
        super().__init__(sizes, 60.0)
        self._lightning_module = module  # type: ignore[assignment]
        self.optimizers = [joint]
        self._step_seed = 7
        self._ranks[DataParallel] = DataParallel()

    def model_to_device(self) -> None:
        """On a CPU they are there already."""

    def save(self, folder: Path) -> None:
        self.save_checkpoint(
            {
                "global_step": 3,
                "optimizer_states": [self.optimizer_state(self._joint)],
                "callbacks": {"position": self.data.rank},
            },
            folder,
        )


def _set_policy_gradients(chunk: nn.Module, step: int) -> None:
    from megatron.core import parallel_state

    assert isinstance(chunk, PolicyModel)
    parameters = dict(chunk.named_parameters())
    for name, places in placements(chunk).items():
        param = parameters[name]
        dense = getattr(param, "allreduce", True)
        group = (
            parallel_state.get_data_parallel_group(with_context_parallel=True)
            if dense
            else parallel_state.get_expert_data_parallel_group()
        )
        for place in places:
            whole = gradient(place.name, place.shape, step) / group.size()
            for piece in place.pieces(param.main_grad):
                part = tuple(slice(at, at + size) for at, size in zip(piece.offset, piece.tensor.shape, strict=True))
                piece.tensor.copy_(whole[part])


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(f"{name}/{step}".encode()).digest()[:6], "little")
    return 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relayout(sizes: ParallelSizes) -> None:
    """Cut the running world anew. A run never does this: its layout is fixed."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    initialise_groups(sizes, timeout_s=60)


# ---- cases -----------------------------------------------------------------------------------------------------------


def train_and_save(name: str, out: Path) -> None:
    """Three steps, of which the policy skips the last, and a checkpoint at OUT/NAME-checkpoint."""
    case = CASES[name]
    run = Run(case, LAYOUTS[case.saved], seed=1)
    metrics = [run.step(0), run.step(1), run.step(2, broken=True)]
    write(run, out / f"{name}-saved.pt", metrics)
    run.strategy.save(out / f"{name}-checkpoint")


def load_and_go_on(name: str, layout: str, out: Path) -> None:
    run = Run(CASES[name], LAYOUTS[layout], seed=2)
    rest = run.strategy.load_checkpoint(out / f"{name}-checkpoint")
    groups = [{key: group[key] for key in ("name", "lr", "weight_decay")} for group in run.joint.param_groups]
    position = (rest["callbacks"]["position"], DataParallel().rank, run.strategy._resumed_random_states is not None)
    write(run, out / f"{name}-{layout}-loaded.pt", [position, groups])
    write(run, out / f"{name}-{layout}-next.pt", [run.step(3)])


def write(run: Run, path: Path, notes: list[Any]) -> None:
    tensors = run.state()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, notes)
    if dist.get_rank() == 0:
        torch.save({"tensors": tensors, "notes": every}, path)


def refusals(out: Path) -> Iterator[tuple[str, str]]:
    """What every rank is told of checkpoints and pieces that do not fit."""

    def told(of: str, action: Any) -> tuple[str, str]:
        try:
            action()
        except CheckpointError as error:
            return of, str(error)
        return of, "nothing"

    tied = CASES["tied"]
    bare = Run(tied, LAYOUTS["no-draft"], seed=3)
    yield told("surplus", lambda: bare.strategy.load_checkpoint(out / "tied-checkpoint"))
    bare.strategy.save(out / "bare-checkpoint")
    full = Run(tied, LAYOUTS["tp2-pp2"], seed=3)
    yield told("missing", lambda: full.strategy.load_checkpoint(out / "bare-checkpoint"))
    yield told("other policy", lambda: full.strategy.load_checkpoint(out / "untied-checkpoint"))
    rank = dist.get_rank()
    cut = Piece(torch.zeros(2 + rank % 2), (0,), (3,))
    yield told("other cuts", lambda: save_pieces(out / "cuts", [("x", cut)]))
    hole = Piece(torch.zeros(1), (rank,), (5,))
    yield told("hole", lambda: save_pieces(out / "hole", [("x", hole)]))


def main() -> None:
    torch.set_num_threads(1)
    out, world, rank = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    with cpu_stand_in():
        for name, case in CASES.items():
            if case.saved != "one":
                train_and_save(name, out)
            for layout in case.loaded:
                load_and_go_on(name, layout, out)
        torch.save(dict(refusals(out)), out / f"refusals-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
