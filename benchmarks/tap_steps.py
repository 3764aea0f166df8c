"""One training step of a pipelined policy, for benchmarks/tap.py, with features travelling in several ways."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_spec.batch import Completion, Prompt, Rollout, StepBatch
from lightning_spec.data import SizedLoader
from lightning_spec.draft import Eagle3
from lightning_spec.loss import GRPO
from lightning_spec.metrics import MetricBag
from lightning_spec.module import SpecGRPO
from lightning_spec.optim import OptimConfig
from lightning_spec.parallel.cpu_stand_in import cpu_stand_in
from lightning_spec.policy import PolicySource, new_policy_config
from strategies import MegatronStrategy
from strategies.steps import MicroSteps
from strategies.taps import PipelineTaps

VOCABULARY = 2048


class Reads(SpecGRPO):
    """Looks at the features instead of learning from them: what is left is what it costs to bring them."""

    def draft_step(self, draft: Any, micro: Any, features: Any, totals: Any, *, train: bool) -> Any:
        return SimpleNamespace(loss=features.features.sum() * 0.0, metrics=MetricBag())


class ByHand(PipelineTaps):
    """The plain ways: each source hands its block over inside its forward, and waits until that is done."""

    def begin(self, micro: Any) -> None:
        super().begin(micro)
        self.step = self._schedules

    def finish(self) -> MetricBag:
        for channel in self.channels.values():
            channel.finish()
        return MetricBag()

    def send(self, chunk: Any, index: int, step: Any) -> None:
        stage = self._stage(chunk)
        blocks = self.layout.blocks(stage, hidden=False)
        if blocks:
            self.hand_over(
                stage, index, torch.cat([self._block(block, step) for block in blocks], -1)[: self._rows[index]]
            )

    def _receive(self, source: Any, index: int, rows: int) -> Tensor:
        return self.take(source, index, rows)

    def hand_over(self, stage: int, index: int, block: Tensor) -> None:
        raise NotImplementedError

    def take(self, source: Any, index: int, rows: int) -> Tensor:
        raise NotImplementedError


class Blocking(ByHand):
    """dist.send in the source's forward, dist.recv in the host's, on a group of their own."""

    group: Any = None

    def hand_over(self, stage: int, index: int, block: Tensor) -> None:
        host = self.place.hosts[0]
        if self.pipeline.rank == host:
            self.own = getattr(self, "own", {})
            self.own[stage, index] = block
        else:
            dist.send(block.contiguous(), host, group=self.group)

    def take(self, source: Any, index: int, rows: int) -> Tensor:
        if source.rank == self.pipeline.rank:
            return self.own.pop((source.stage, index))
        block = torch.empty(rows, source.width)
        dist.recv(block, source.rank, group=self.group)
        return block


class Pickled(ByHand):
    """A file for each block."""

    folder = Path(tempfile.gettempdir())

    def _path(self, stage: int, index: int) -> Path:
        return self.folder / f"taps-{os.environ['MASTER_PORT']}-{self.step}-{stage}-{index}.pkl"

    def hand_over(self, stage: int, index: int, block: Tensor) -> None:
        path = self._path(stage, index)
        with open(path.with_suffix(".part"), "wb") as file:
            pickle.dump(block, file)
        path.with_suffix(".part").rename(path)

    def take(self, source: Any, index: int, rows: int) -> Tensor:
        path = self._path(source.stage, index)
        while not path.exists():
            time.sleep(1e-4)
        block = pickle.loads(path.read_bytes())
        path.unlink()
        return block


class _Data(L.LightningDataModule):
    def __init__(self, batch: StepBatch) -> None:
        super().__init__()
        self.batch = batch

    def train_dataloader(self) -> SizedLoader:
        return SizedLoader(1, lambda _: self.batch)


def _rollouts(micro: int, tokens: int) -> list[Rollout]:
    """`micro` rollouts, each of which fills a micro-batch."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for number in range(micro):
        row = tuple(torch.randint(3, VOCABULARY, (tokens,), generator=generator).tolist())
        done = Completion(row[32:], (-3.0,) * (tokens - 32), "length")
        out.append(
            Rollout(Prompt(str(number), row[:32], ""), done, f"g{number}", 1.0, advantage=1.0 - 2.0 * (number % 2))
        )
    return out


def make(
    mode: str,
    *,
    pipeline: int,
    layers: int,
    hidden: int,
    micro: int,
    tokens: int,
    passes: int = 3,
    layout: list[int] | str | None = None,
    stage: str = "last",
    transport: str = "auto",
    virtual: int = 1,
) -> Callable[[], dict[str, Any]]:
    """A case of `benchmarks.common`.

    Args:
        mode: `none` (no draft, no taps), `read` (features arrive and are looked at), `blocking`, `pickle` (the same by
            hand), `draft` (the draft learns).
    """
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "NODE_RANK": "0"}
    config = new_policy_config(
        vocab_size=VOCABULARY, hidden_size=hidden, num_layers=layers, num_heads=hidden // 64, max_positions=tokens
    )
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    kind = SpecGRPO if mode in ("draft", "none") else Reads
    optim = OptimConfig(lr=1e-6)
    draft = None if mode == "none" else Eagle3(num_passes=passes)
    module = kind(PolicySource(str(folder)), GRPO(), optim, draft, None, None if draft is None else optim)
    strategy = MegatronStrategy(
        token_budget=tokens,
        pipeline_parallel=pipeline,
        virtual_pipeline=virtual,
        pipeline_layout=layout,  # type: ignore[arg-type]
        draft_stage=stage,  # type: ignore[arg-type]
        tap_transport=transport,  # type: ignore[arg-type]
        timeout_s=120,
    )
    batch = StepBatch(_rollouts(micro, tokens))
    trainer = L.Trainer(
        max_steps=1, max_epochs=-1, accelerator="cpu", devices=pipeline, strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, _Data(batch))
    strategy._make_steps()
    steps = strategy._steps
    assert steps is not None
    if mode in ("blocking", "pickle"):
        assert isinstance(steps.taps, PipelineTaps)
        steps.taps = by_hand(steps.taps, mode, strategy.sequence_parallel)
    own = _Own()
    if isinstance(steps.taps, PipelineTaps):
        own.watch(steps.taps)
    return lambda: _step(strategy, steps, batch, own)


class _Own:
    """CPU seconds that a rank's main thread spends on bringing features, apart from the forwards around it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, taps: PipelineTaps) -> None:
        for name in ("begin", "send", "features", "finish"):
            setattr(taps, name, self._timed(getattr(taps, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def by_hand(taps: PipelineTaps, mode: str, sequence_parallel: bool) -> ByHand:
    kind = Blocking if mode == "blocking" else Pickled
    made = kind(
        taps.module,
        taps.layout,
        taps.channels,
        taps.place,
        taps.pipeline,
        taps.tensor,
        sequence_parallel=sequence_parallel,
    )
    if isinstance(made, Blocking):
        made.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    return made


def _step(strategy: Any, steps: MicroSteps, batch: StepBatch, own: _Own) -> dict[str, Any]:
    with cpu_stand_in():
        strategy._wrapped.zero()
        dist.barrier()
        own.seconds = 0.0
        began, cpu = time.perf_counter(), time.process_time()
        micro = strategy._micro_batches(batch)
        parts = steps.run(micro, strategy._totals(micro), step=0, train=True)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - began
        metrics = MetricBag()
        for _, bag in parts:
            metrics.update(bag)
        found = strategy.pipeline.gather(
            (wall, cpu, own.seconds, {k: v for k, v in metrics.values().items() if k.startswith("taps/")})
        )
    taps: dict[str, float] = {}
    for *_, values in found:
        for key, value in values.items():
            taps[key] = taps.get(key, 0.0) + value
    walls, cpus, owns, _ = zip(*found, strict=True)
    return {"wall": list(walls), "cpu": list(cpus), "own": list(owns), **taps}
