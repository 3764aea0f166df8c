"""One pass over a step's micro-batches: the policy through Megatron's schedule, its taps to the draft, draft steps.

The draft's loss never enters the schedule. Its backward pass runs as soon as its forward has, so that its graph is gone
before the policy's backward begins, a frozen policy needs no backward at all, and the draft may run on any stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_spec.batch import PackedBatch
from lightning_spec.errors import TapError
from lightning_spec.metrics import MetricBag
from lightning_spec.parallel.schedule import run_forward, run_forward_backward

Part = tuple[Tensor, MetricBag]
"""A share of the step's loss, on the device and detached, and its metrics."""


class Taps(Protocol):
    """Brings what the draft reads of the policy to where the draft runs (strategies/taps.py)."""

    def begin(self, micro: Sequence[PackedBatch]) -> None: ...

    def send(self, chunk: nn.Module, index: int, step: Any) -> None:
        """Hand over what a chunk's forward made for a micro-batch."""

    def ready(self, chunk: nn.Module) -> bool:
        """Whether the draft's step of a micro-batch runs right after this chunk's forward."""

    def later(self) -> Sequence[int]:
        """The micro-batches whose draft step runs here after the schedule."""

    def features(self, index: int, hidden: Tensor | None) -> Any:
        """What the draft reads of a micro-batch."""

    def finish(self) -> MetricBag: ...

    def check(self) -> None:
        """Raise TapError where another stage has failed or died."""

    def describe(self) -> str:
        """How the features travel, for the log; empty where they do not."""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on."""

    def close(self) -> None: ...


class MicroSteps:
    """Runs micro-batches for training, validation and scores.

    Args:
        module: follows the protocol of `lightning_spec.module.SpecGRPO`.
        chunks: this rank's chunks of the policy, wrapped where they are trained.
        draft: the draft where it lives on this rank, wrapped where it is trained.
        taps: where there is a draft on any rank.
    """

    def __init__(self, module: Any, chunks: Sequence[nn.Module], draft: nn.Module | None, taps: Taps | None) -> None:
        self.module, self.chunks, self.draft, self.taps = module, chunks, draft, taps
        self._at = 0
        """The micro-batch of the last forward, for errors."""

    def run(self, micro: Sequence[PackedBatch], totals: dict[str, Tensor], *, step: int, train: bool) -> list[Part]:
        """Forward, and for `train` backward, of all micro-batches; this rank's shares of loss and metrics.

        Gradients are added up and not yet reduced over ranks. Collective over the model's ranks.
        """
        parts: list[Part] = []

        def forward(chunk: nn.Module, index: int, one: PackedBatch) -> tuple[Tensor, None]:
            self._at = index
            done = self.module.policy_step(chunk, one, totals)
            if done.hidden is not None:
                parts.append((done.output.detach().clone(), done.metrics))
            if self.taps is not None:
                self.taps.send(chunk, index, done)
                if self.taps.ready(chunk):
                    parts.extend(self._draft_step(index, one, totals, done.hidden, train))
            return done.output, None

        # Decided by the module's setting and not by this rank's parameters: all stages must run the same schedule.
        run = run_forward_backward if train and self.module.policy_optim is not None else run_forward
        if self.taps is None:
            run(self.chunks, micro, forward)
            return parts
        try:
            self.taps.begin(micro)
            run(self.chunks, micro, forward)
            for index in self.taps.later():
                parts.extend(self._draft_step(index, micro[index], totals, None, train))
            parts.append((torch.zeros(()), self.taps.finish()))
        except BaseException as error:
            self._end(error, step)
            raise
        return parts

    def _end(self, error: BaseException, step: int) -> None:
        """Tell the other stages why this one stops. Where another one has died or failed before, and all that was seen
        here is a broken connection, raise that instead."""
        assert self.taps is not None
        try:
            self.taps.check()
        except TapError as cause:
            if isinstance(error, TapError):
                return
            where = f"{cause}; this rank was in optimiser step {step + 1}, after the forward of micro-batch {self._at}"
            raise TapError(where) from error
        self.taps.fail(error)

    def _draft_step(
        self, index: int, one: PackedBatch, totals: dict[str, Tensor], hidden: Tensor | None, train: bool
    ) -> list[Part]:
        assert self.taps is not None
        assert self.draft is not None
        if not one.lengths:
            return []  # an idle micro-batch, which only fills the schedule
        done = self.module.draft_step(self.draft, one, self.taps.features(index, hidden), totals, train=train)
        if train and done.loss.requires_grad:
            done.loss.backward()
        return [(done.loss.detach().clone(), done.metrics)]

    @torch.no_grad()
    def score(self, micro: Sequence[PackedBatch]) -> list[Tensor]:
        """`module.score` of each micro-batch, on the last stage, on the CPU; nothing on the others."""

        def forward(chunk: nn.Module, index: int, one: PackedBatch) -> tuple[Tensor, Tensor]:
            output = self.module.score(chunk, one)
            return output, output.cpu()

        return run_forward(self.chunks, micro, forward)
