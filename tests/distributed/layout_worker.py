"""The ranks of test_layouts.py: `python layout_worker.py OUT FOLDERS LAYOUT ...`, one world after the other of as many
processes as the layouts have ranks. They are forks: what takes longest is to import.

Trains the real module for a few steps of recorded rollouts under every layout, writes OUT/LAYOUT-RANK.pt.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lightning as L
import torch
from context_worker import BUDGET, Recorded, Typed, disturbed, grpo, quiet, step_rollouts
from launch import free_port
from torch import Tensor

from callbacks.checkpoint import SpecCheckpoint
from lightning_spec import draft as drafts
from lightning_spec.batch import StepBatch
from lightning_spec.data import SizedLoader
from lightning_spec.draft import Draft
from lightning_spec.optim import OptimConfig
from lightning_spec.parallel.checkpoint import complete_checkpoints
from lightning_spec.parallel.groups import destroy_groups
from lightning_spec.policy import PolicySource, local_gradients, local_tensors
from strategies import MegatronStrategy, steps


@dataclass(frozen=True)
class Drafter:
    kind: str
    """Name in `lightning_spec.draft`."""
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Draft:
        made: Draft = getattr(drafts, self.kind)(**self.options)
        return made


EAGLE = Drafter("Eagle3", {"num_passes": 3, "aux_layer_ids": [1, 2, 3]})
OWN = Drafter("Eagle3", {**EAGLE.options, "own_head": True, "own_embedding": True})
MASKED = {"num_layers": 2, "aux_layer_ids": [1, 3], "mask_token_id": 40}
DFLASH = Drafter("DFlash", {**MASKED, "block_size": 4, "anchors_per_sequence": 3})
DSPARK = Drafter("DSpark", {**MASKED, "block_size": 3, "markov_rank": 4, "confidence": True})
# Reads what the last layer gives.
HEAD = Drafter("MTP", {"num_passes": 2, "reads": "residual"})
SMALL = Drafter("DraftModel", {"num_layers": 2})


@dataclass
class Layout:
    """How one run is laid out; nothing of `ranks`, `strategy` and `recompute` may change results."""

    ranks: int
    strategy: dict[str, Any] = field(default_factory=dict)
    policy: str = "dense"
    recompute: bool = False
    dtype: torch.dtype = torch.float64
    draft: Drafter | None = EAGLE
    frozen: bool = False
    steps: tuple[int, ...] = (0, 2)
    """Of `context_worker.step_rollouts`."""
    scores: bool = False
    """Whether the ranks make the rollouts' old log-probs, instead of taking those of one process."""
    saves: bool = False
    """Whether the run's checkpoints are kept."""
    resumes: bool = False
    """Goes on from the first checkpoint of the run in one process."""
    slow: bool = False

    @property
    def problem(self) -> str:
        """What results depend on."""
        return f"{self.data} {self.draft}"

    @property
    def data(self) -> str:
        """What the rollouts and their log-probs depend on."""
        return f"{self.policy} {self.dtype} {self.frozen} {self.steps}"


def pp(size: int, virtual: int = 1, **options: Any) -> dict[str, Any]:
    return {"pipeline_parallel": size, "virtual_pipeline": virtual, **options}


TP2, SP2 = {"tensor_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}
CP2 = {"context_parallel": 2}
EVERY = (0, 1, 2)
LAYOUTS = {
    "tp2": Layout(2, TP2, draft=OWN, scores=True, saves=True),
    "tp2_sp": Layout(2, {**SP2, "draft_attention": "ring"}, policy="tied", recompute=True),
    "pp2": Layout(2, pp(2, pipeline_layout=[3, 1]), draft=OWN, scores=True, saves=True),
    "pp2_vp2": Layout(2, pp(2, 2, tap_transport="group")),
    "pp2_vp2_silent": Layout(2, pp(2, 2), draft=None),
    "pp2_frozen": Layout(2, pp(2), frozen=True),
    "pp2_sharded": Layout(2, pp(2, distributed_optimizer=True), dtype=torch.float32, saves=True),
    "tp2_resumed": Layout(2, SP2, draft=OWN, resumes=True),
    "tp2_experts": Layout(2, SP2, policy="experts"),
    "ep2": Layout(2, {"expert_parallel": 2}, policy="experts", scores=True, saves=True),
    "tp2_dflash": Layout(2, SP2, draft=DFLASH),
    "pp2_dflash_spread": Layout(2, pp(2, draft_stage="spread"), draft=DFLASH, saves=True),
    "cp2_dflash": Layout(2, CP2, draft=DFLASH),
    "tp2_dspark": Layout(2, TP2, draft=DSPARK),
    "pp2_dspark_tied": Layout(2, pp(2, pipeline_layout="auto"), policy="tied", recompute=True, draft=DSPARK),
    "cp2_dspark": Layout(2, {**CP2, "draft_attention": "ring"}, draft=DSPARK),
    "tp2_mtp": Layout(2, TP2, draft=HEAD),
    "pp2_mtp_first": Layout(2, pp(2, draft_stage=0), draft=HEAD),
    "cp2_mtp": Layout(2, CP2, draft=HEAD),
    "tp2_model": Layout(2, SP2, draft=SMALL),
    "pp2_model_spread": Layout(2, pp(2, draft_stage="spread"), draft=SMALL),
    "cp2_model": Layout(2, CP2, draft=SMALL),
    "pp4": Layout(4, pp(4)),
    "tp2_pp2": Layout(4, {**SP2, **pp(2)}, policy="tied", draft=DSPARK, scores=True),
    "tp2_pp2_vp2_spread": Layout(4, {**SP2, **pp(2, 2, draft_stage="spread")}, policy="tied", slow=True),
    "pp2_cp2": Layout(4, {**CP2, **pp(2)}),
    "pp2_dp2": Layout(4, pp(2, distributed_optimizer=True), dtype=torch.float32, steps=EVERY, scores=True),
    "tp2_ep2": Layout(4, {**SP2, "expert_parallel": 2}, policy="experts", scores=True, slow=True),
    "tp2_pp2_cp2": Layout(8, {**SP2, **pp(2), **CP2}, slow=True),
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


class Steps(Recorded):
    """Rollouts of the given steps."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        super().__init__()
        self.steps = steps

    def make(self) -> None:
        data = self.trainer.strategy.data
        self.batches = [StepBatch(step_rollouts(step, data.rank, data.size)) for step in self.steps]
        for batch in self.batches:
            batch.metrics.add("rollouts", len(batch.rollouts), reduction="sum")

    def train_dataloader(self) -> SizedLoader:
        return SizedLoader(len(self.steps), lambda _: self.batches[self.trainer.global_step])


class Watch(L.Callback):
    """Metrics and gradients of each step, and the features that the draft was given in the first.

    Args:
        scored: batches with log-probs; None: the run makes them of the weights that it starts from.
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
    save: bool = False,
    resume: Path | None = None,
    scored: list[StepBatch] | None = None,
) -> dict[str, Any]:
    """Everything that must not depend on the layout. `alone`: the same settings, in one process."""
    layout = LAYOUTS[name]
    # A large eps: Adam would make weights of the rounding noise in gradients near zero.
    optim = OptimConfig(lr=1e-2, clip_norm=0.5, eps=1e-3)
    source = PolicySource(str(folders / layout.policy), init_seed=3, recompute=layout.recompute and not alone)
    loss = None if layout.frozen else grpo()()
    draft = None if layout.draft is None else layout.draft()
    module = Typed(source, loss, None if layout.frozen else optim, draft, None, None if draft is None else optim)
    module.build_dtype = layout.dtype
    watch = Watch(scored)
    options = {} if alone else layout.strategy
    strategy = MegatronStrategy(token_budget=BUDGET, timeout_s=120, **options)
    saves = [SpecCheckpoint(str(out / f"{name}-checkpoints"), every_n_steps=1, keep=0)] if save else []
    trainer = quiet(strategy, devices, [watch, *saves])
    trainer.fit_loop.epoch_loop.max_steps = len(layout.steps)
    data = Steps(layout.steps)
    torch.manual_seed(5)  # the run's: which anchors a draft takes
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


def first_checkpoint(folder: Path, name: str) -> Path:
    return complete_checkpoints(folder / f"{name}-checkpoints")[0]


def rank_main(out: Path, folders: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    one = folders / "one"
    for name in names:
        print(name, flush=True)
        layout = LAYOUTS[name]
        options: dict[str, Any] = {}
        if not layout.scores:
            options["scored"] = torch.load(one / f"{layout.data}.pt", weights_only=False)
        if layout.resumes:
            options["resume"] = first_checkpoint(one, name)
        torch.save(run(name, folders, out, devices=world, save=layout.saves, **options), out / f"{name}-{rank}.pt")
        # The next layout has other groups, on a world that is made anew, at another port: the old one may linger.
        port = [free_port()]
        torch.distributed.broadcast_object_list(port)
        torch.distributed.barrier()
        destroy_groups()
        os.environ["MASTER_PORT"] = str(port[0])


def fork_world(world: int, out: Path, work: Callable[[], None]) -> bool:
    """Run `work` on `world` ranks; whether all went well. Their logs are OUT/rank-WORLD-RANK.txt."""
    port, ranks = free_port(), {}
    for rank in range(world):
        pid = os.fork()
        if not pid:
            _rank(rank, world, port, out, work)
        ranks[pid] = rank
    failed = False
    while ranks and not failed:
        pid, status = os.wait()
        failed = status != 0
        ranks.pop(pid)
    for pid in ranks:
        # Its peer has failed; whatever it has to say of that comes with the peer's lost connection.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return not failed


def _rank(rank: int, world: int, port: int, out: Path, work: Callable[[], None]) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the one that was started
        log = os.open(out / f"rank-{world}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    out, folders, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    for world in sorted({LAYOUTS[name].ranks for name in names}):
        mine = [name for name in names if LAYOUTS[name].ranks == world]
        if not fork_world(world, out, partial(rank_main, out, folders, mine)):
            for log in sorted(out.glob(f"rank-{world}-*.txt")):
                print(f"--- {log.name}\n{log.read_text()[-2400 // world * 2 :]}")
            sys.exit(1)


if __name__ == "__main__":
    main()
