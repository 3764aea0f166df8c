"""One rank of test_layouts.py: `python layout_worker.py OUT FOLDERS LAYOUT ...`, a world of as many processes as
each layout has ranks.

Trains the real module for three steps of recorded rollouts under every layout, writes OUT/LAYOUT-RANK.pt.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lightning as L
import torch
from context_worker import BUDGET, Recorded, Typed, disturbed, grpo, quiet
from launch import free_port
from torch import Tensor

from callbacks.checkpoint import SpecCheckpoint
from lightning_spec.batch import StepBatch
from lightning_spec.draft import Eagle3
from lightning_spec.module import PolicySource
from lightning_spec.optim import OptimConfig
from lightning_spec.parallel.checkpoint import complete_checkpoints
from lightning_spec.parallel.groups import destroy_groups
from lightning_spec.policy import local_gradients, local_tensors
from strategies import MegatronStrategy, steps


@dataclass
class Layout:
    """How one run is laid out; nothing of `ranks`, `strategy` and `recompute` may change results."""

    ranks: int
    strategy: dict[str, Any] = field(default_factory=dict)
    policy: str = "dense"
    recompute: bool = False
    dtype: torch.dtype = torch.float64
    draft: dict[str, Any] | None = field(default_factory=dict)
    """Arguments of the draft; None: without one."""
    frozen: bool = False
    resumes: bool = False
    """Goes on from the second checkpoint of the run in one process."""


def pp(size: int, virtual: int = 1, **options: Any) -> dict[str, Any]:
    return {"pipeline_parallel": size, "virtual_pipeline": virtual, **options}


TP2, SP2 = {"tensor_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}
OWN = {"own_head": True, "own_embedding": True}
LAYOUTS = {
    "tp2": Layout(2, TP2, draft=OWN),
    "tp2_sp": Layout(2, {**SP2, "draft_attention": "ring"}, policy="tied", recompute=True),
    "pp2": Layout(2, pp(2, pipeline_layout=[5, 3]), draft=OWN),
    "pp2_tied": Layout(2, pp(2, pipeline_layout="auto"), policy="tied", recompute=True),
    "pp2_vp2": Layout(2, pp(2, 2, tap_transport="group")),
    "pp2_vp2_silent": Layout(2, pp(2, 2), draft=None),
    "pp2_first": Layout(2, pp(2, draft_stage=0)),
    "pp2_spread": Layout(2, pp(2, draft_stage="spread")),
    "pp2_frozen": Layout(2, pp(2), frozen=True),
    "pp2_sharded": Layout(2, pp(2, distributed_optimizer=True), dtype=torch.float32),
    "tp2_resumed": Layout(2, SP2, draft=OWN, resumes=True),
    "tp2_experts": Layout(2, SP2, policy="experts"),
    "ep2": Layout(2, {"expert_parallel": 2}, policy="experts"),
    "pp4": Layout(4, pp(4, pipeline_layout=[3, 2, 2, 1])),
    "tp2_pp2": Layout(4, {**SP2, **pp(2)}, policy="tied"),
    "tp2_pp2_vp2_spread": Layout(4, {**SP2, **pp(2, 2, draft_stage="spread")}, policy="tied"),
    "pp2_cp2": Layout(4, {"context_parallel": 2, **pp(2)}),
    "pp2_dp2": Layout(4, pp(2, distributed_optimizer=True), dtype=torch.float32),
    "tp2_ep2": Layout(4, {**SP2, "expert_parallel": 2}, policy="experts"),
    "tp2_pp2_cp2": Layout(8, {**SP2, **pp(2), "context_parallel": 2}),
}


class Spy:
    """The calls that the main thread makes to torch.distributed while a training schedule runs."""

    NAMES = ("isend", "irecv", "send", "recv", "batch_isend_irecv", "all_reduce", "broadcast", "all_gather_into_tensor")

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.listening = False

    def __enter__(self) -> Spy:
        self._real = {name: getattr(torch.distributed, name) for name in self.NAMES}
        self._set({name: self._wrapped(name) for name in self.NAMES})
        self._schedule = steps.run_forward_backward
        steps.run_forward_backward = self._run
        return self

    def __exit__(self, *exc: object) -> None:
        self._set(self._real)
        steps.run_forward_backward = self._schedule

    @staticmethod
    def _set(functions: dict[str, Any]) -> None:
        for name, function in functions.items():
            # In both places: a P2POp takes no other functions than those of its own module.
            setattr(torch.distributed, name, function)
            setattr(torch.distributed.distributed_c10d, name, function)

    def _run(self, *args: Any) -> Any:
        self.listening = True
        try:
            return self._schedule(*args)
        finally:
            self.listening = False

    def _wrapped(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.listening and threading.current_thread() is threading.main_thread():
                first = args[0] if args else next(iter(kwargs.values()))
                self.calls.append((name, tuple(first.shape) if isinstance(first, Tensor) else len(first)))
            return self._real[name](*args, **kwargs)

        return call


class Watch(L.Callback):
    """Metrics and gradients of each step, and the features that the draft was given in the first.

    Args:
        scored: batches of an earlier run, with log-probs of the weights that it started from.
    """

    def __init__(self, scored: list[StepBatch] | None = None) -> None:
        self.scored = scored
        self.metrics: list[dict[str, float]] = []
        self.gradients: list[list[tuple[str, Any]]] = []
        self.features: dict[int, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        trainer.datamodule.make()
        trainer.datamodule.batches = self.scored or [
            StepBatch([disturbed(rollout) for rollout in scored.rollouts], metrics=scored.metrics)
            for scored in module.prepare_rollouts(trainer.datamodule.batches, 2)
        ]
        taps = trainer.strategy._steps.taps
        if taps is None:
            return
        receive = taps.features

        def features(index: int, hidden: Tensor | None) -> Any:
            found = receive(index, hidden)
            if trainer.global_step == 0:
                self.features[index] = torch.cat((found.embeddings, found.features, found.hidden), -1)
            return found

        taps.features = features

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self.gradients.append(
            pieces(local_gradients(module.policy))
            + [
                (f"draft.{name}", (param.main_grad.clone(), (0,) * param.ndim, tuple(param.shape)))
                for name, param in draft_weights(module)
                if getattr(param, "main_grad", None) is not None
            ]
        )

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.metrics.append(
            {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith(("time/", "taps/"))}
        )


def pieces(held: Any) -> list[tuple[str, tuple[Tensor, tuple[int, ...], tuple[int, ...]]]]:
    """(name, (part, offset, whole shape)) of everything that this rank holds."""
    return [
        (place.name, (piece.tensor.clone(), piece.offset, piece.shape))
        for place, tensor in held
        for piece in place.pieces(tensor)
    ]


def run(
    name: str,
    folders: Path,
    out: Path,
    *,
    devices: int = 1,
    alone: bool = False,
    resume: Path | None = None,
    scored: list[StepBatch] | None = None,
) -> dict[str, Any]:
    """Everything that must not depend on the layout. `alone`: the same settings, in one process."""
    layout = LAYOUTS[name]
    # A large eps: Adam would make weights of the rounding noise in gradients near zero.
    optim = OptimConfig(lr=1e-2, clip_norm=0.5, eps=1e-3)
    source = PolicySource(str(folders / layout.policy), init_seed=3, recompute=layout.recompute and not alone)
    loss = None if layout.frozen else grpo()()
    draft = None if layout.draft is None else Eagle3(num_passes=3, **layout.draft)
    module = Typed(source, loss, None if layout.frozen else optim, draft, None, None if layout.draft is None else optim)
    module.build_dtype = layout.dtype
    watch = Watch(scored)
    options = {} if alone else layout.strategy
    strategy = MegatronStrategy(token_budget=BUDGET, timeout_s=120, **options)
    saves = SpecCheckpoint(str(out / f"{name}-checkpoints"), every_n_steps=1, keep=0)
    trainer = quiet(strategy, devices, [watch, saves])
    data = Recorded()
    with Spy() as spy:
        trainer.fit(module, datamodule=data, ckpt_path=str(resume) if resume else None)
    trainer.limit_val_batches = 1
    (validated,) = trainer.validate(module, datamodule=data, verbose=False)
    sharded = options.get("distributed_optimizer", False)
    return {
        "metrics": watch.metrics,
        "gradients": [] if sharded else watch.gradients,
        "weights": pieces(local_tensors(module.policy))
        + [(f"draft.{n}", (p.detach().clone(), (0,) * p.ndim, tuple(p.shape))) for n, p in draft_weights(module)],
        "features": watch.features,
        "validated": {k: v for k, v in validated.items() if "taps/" not in k},
        "calls": spy.calls,
        "batches": data.batches,
    }


def draft_weights(module: Any) -> list[tuple[str, Tensor]]:
    return list(module.draft.named_parameters()) if module.draft is not None and module.draft.resident else []


def earlier(folders: Path, name: str, layout: str | None = None) -> dict[str, Any]:
    """Where to go on from: the second checkpoint of a run, that of one process unless `layout` says; its batches."""
    one = folders / "one"
    folder = one / f"{name}-checkpoints" if layout is None else folders / f"{layout}-checkpoints"
    return {
        "resume": complete_checkpoints(folder)[1],
        "scored": torch.load(one / f"{name}-batches.pt", weights_only=False),
    }


def main() -> None:
    torch.set_num_threads(1)
    out, folders = Path(sys.argv[1]), Path(sys.argv[2])
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    for name in sys.argv[3:]:
        print(name, flush=True)
        options = earlier(folders, name) if LAYOUTS[name].resumes else {}
        torch.save(run(name, folders, out, devices=world, **options), out / f"{name}-{rank}.pt")
        # The next layout has other groups, on a world that is made anew, at another port: the old one may linger.
        port = [free_port()]
        torch.distributed.broadcast_object_list(port)
        torch.distributed.barrier()
        destroy_groups()
        os.environ["MASTER_PORT"] = str(port[0])


if __name__ == "__main__":
    main()
