"""What the draft reads of the policy, from the stages that make it to the rank that runs the draft.

Without a pipeline it is at hand. With one it travels through a TapChannel beside the schedule: each virtual stage that
has taps (or the embeddings) sends one block a micro-batch. Under tensor parallelism each rank sends its part of the
rows to its own peer, and the host puts them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_spec.batch import PackedBatch
from lightning_spec.metrics import MetricBag
from lightning_spec.parallel.groups import PipelineParallel, TensorParallel
from lightning_spec.parallel.tap_channel import TapChannel, TapSource
from lightning_spec.policy import head_weight, unwrap, vocab_shard
from lightning_spec.policy.taps import side_by_side
from lightning_spec.share import Share
from lightning_spec.steps import DraftFeatures
from strategies.place import Place


class DirectTaps:
    """The whole policy is on this rank: nothing travels but rows between tensor-parallel ranks."""

    def __init__(self, module: Any, tensor: TensorParallel, *, sequence_parallel: bool) -> None:
        self.module, self.tensor, self.sequence_parallel = module, tensor, sequence_parallel
        self._taps: dict[int, Any] = {}
        self._special: Tensor | None = None

    def begin(self, micro: Sequence[PackedBatch]) -> None:
        self._taps.clear()
        self._special = self.module.special_embeddings() if micro else None

    def send(self, chunk: nn.Module, index: int, step: Any) -> None:
        self._taps[index] = step.taps

    def ready(self, chunk: nn.Module) -> bool:
        return True

    def later(self) -> Sequence[int]:
        return ()

    def features(self, index: int, hidden: Tensor | None) -> DraftFeatures:
        assert hidden is not None
        taps, rows = self._taps.pop(index), hidden.shape[0]
        parts = [*(taps.features[k] for k in sorted(taps.features)), taps.embeddings]
        if self.sequence_parallel:
            parts = [together(part, rows, self.tensor) for part in parts]
        *layers, embeddings = (part[:rows] for part in parts)  # idle rows are cut
        return DraftFeatures(
            features=side_by_side(layers, embeddings),
            embeddings=embeddings,
            hidden=hidden,
            special=self._special,
            **self.module.draft_head(),
        )

    def finish(self) -> MetricBag:
        return MetricBag()

    def check(self) -> None:
        """Nothing to check: nobody else is involved."""

    def describe(self) -> str:
        return ""

    def fail(self, error: BaseException) -> None:
        self._taps.clear()

    def close(self) -> None:
        self._taps.clear()


@dataclass(frozen=True, slots=True)
class TapLayout:
    """Which virtual stage makes which of the draft's features: the same on every rank, from the draft's own config."""

    owners: dict[int, int]
    """Virtual stage of each tapped layer."""
    stages: int
    pipeline: int
    hidden_size: int

    def layers(self, stage: int) -> list[int]:
        return sorted(layer for layer, owner in self.owners.items() if owner == stage)

    def blocks(self, stage: int, *, hidden: bool) -> list[tuple[str, int]]:
        """What a block of this virtual stage holds, side by side: ("embeddings", 0), ("layer", k), ("hidden", 0)."""
        found = [("embeddings", 0)] if stage == 0 else []
        found += [("layer", layer) for layer in self.layers(stage)]
        return found + ([("hidden", 0)] if hidden and stage == self.stages - 1 else [])

    def sources(self, *, hidden: bool) -> list[TapSource]:
        """
        Args:
            hidden: whether the final states travel too (a draft that does not run in the last stage's forward).
        """
        widths = [len(self.blocks(stage, hidden=hidden)) * self.hidden_size for stage in range(self.stages)]
        return [TapSource(stage, stage % self.pipeline, width) for stage, width in enumerate(widths) if width]


class PipelineTaps:
    """Taps through channels, one for each rank that hosts the draft.

    Args:
        module: the SpecGRPO.
        channels: by host's pipeline rank.
        place: which rank runs which micro-batch's draft, and when.
        sequence_parallel: the policy's stream holds each tensor-parallel rank's rows alone.
    """

    def __init__(
        self,
        module: Any,
        layout: TapLayout,
        channels: dict[int, TapChannel],
        place: Place,
        pipeline: PipelineParallel,
        tensor: TensorParallel,
        *,
        sequence_parallel: bool,
    ) -> None:
        self.module, self.layout, self.channels, self.place = module, layout, channels, place
        self.pipeline, self.tensor, self.sequence_parallel = pipeline, tensor, sequence_parallel
        self._schedules = 0
        self._rows: list[int] = []
        self._turns: list[int] = []
        self._head: dict[str, Any] = {}
        self._special: Tensor | None = None

    def begin(self, micro: Sequence[PackedBatch]) -> None:
        shards = [Share.shard_of(one, self.module.context) for one in micro]
        self._rows = [
            len(one.tokens) if shard is None else shard.rows.numel() for one, shard in zip(micro, shards, strict=True)
        ]
        self._turns = self.place.turns([len(one.tokens) for one in micro])
        self._head = self._heads() if micro else {}
        self._special = self._specials() if micro else None
        # The channel numbers schedules: several may run at one optimiser step (validation batches, then training).
        self._schedules += 1
        for channel in self.channels.values():
            channel.begin(self._schedules)

    def _heads(self) -> dict[str, Any]:
        """The policy's live head on every host: the last stage's own, and a copy where the draft runs elsewhere."""
        policy = self.module.last_chunk
        if self.place.now:
            return self.module.draft_head() if self.pipeline.last else {}
        vocab = vocab_shard(policy)
        if self.pipeline.last:
            head = head_weight(policy).detach().contiguous()
        else:
            shape = self.module.shape
            rows = shape.vocab_size if vocab is None else vocab.rows
            parameter = next(policy.parameters())
            head = torch.empty(rows, shape.hidden_size, dtype=parameter.dtype, device=parameter.device)
        source = dist.get_global_rank(self.pipeline.group, self.pipeline.size - 1)
        dist.broadcast(head, source, group=self.pipeline.group)
        return {"head": head, "vocab": vocab, "embedding": None}

    def _specials(self) -> Tensor | None:
        """The policy's live embeddings of the draft's special tokens on every stage, from the first, which has them."""
        ids = self.module.draft.embedding_ids
        if not ids:
            return None
        if self.pipeline.first:
            found = self.module.special_embeddings().contiguous()
        else:
            parameter = next(self.module.last_chunk.parameters())
            width = self.layout.hidden_size
            found = torch.empty(len(ids), width, dtype=parameter.dtype, device=parameter.device)
        dist.broadcast(found, dist.get_global_rank(self.pipeline.group, 0), group=self.pipeline.group)
        return found

    def send(self, chunk: nn.Module, index: int, step: Any) -> None:
        stage, rows, host = self._stage(chunk), self._rows[index], self._turns[index]
        blocks = self.layout.blocks(stage, hidden=not self.place.now)
        if blocks and rows:
            parts = [self._mine(self._block(block, step), block, rows) for block in blocks]
            self.channels[host].put(stage, index, parts)
        if not self.place.now and self.pipeline.rank in self.channels:
            # Nobody waits for these yet: make room for those that follow.
            self.channels[self.pipeline.rank].drain()

    @staticmethod
    def _block(block: tuple[str, int], step: Any) -> Tensor:
        kind, layer = block
        found = {"embeddings": step.taps.embeddings, "hidden": step.hidden}
        return step.taps.features[layer] if kind == "layer" else found[kind]

    def _mine(self, x: Tensor, block: tuple[str, int], rows: int) -> Tensor:
        """This tensor-parallel rank's part of the rows, padded to as many as every peer has."""
        if self.tensor.size == 1 or (self.sequence_parallel and block[0] != "hidden"):
            return x if self.tensor.size > 1 else x[:rows]
        each = -(-rows // self.tensor.size)
        part = x[self.tensor.rank * each : (self.tensor.rank + 1) * each]
        return part if part.shape[0] == each else torch.cat([part, part.new_zeros(each - part.shape[0], part.shape[1])])

    def _stage(self, chunk: nn.Module) -> int:
        return (unwrap(chunk).vp_stage or 0) * self.pipeline.size + self.pipeline.rank

    def ready(self, chunk: nn.Module) -> bool:
        return self.place.now and self._stage(chunk) == self.layout.stages - 1

    def later(self) -> Sequence[int]:
        if self.place.now:
            return ()
        return [index for index, host in enumerate(self._turns) if host == self.pipeline.rank]

    def features(self, index: int, hidden: Tensor | None) -> DraftFeatures:
        rows, width = self._rows[index], self.layout.hidden_size
        found: dict[tuple[str, int], Tensor] = {}
        for source in self.layout.sources(hidden=not self.place.now) if rows else ():
            block = self._receive(source, index, rows)
            kinds = self.layout.blocks(source.stage, hidden=not self.place.now)
            found |= dict(zip(kinds, block.split(width, -1), strict=True))
        if not rows:
            head = self._head["head"]
            found = dict.fromkeys(
                [("embeddings", 0), ("hidden", 0), *(("layer", k) for k in self.layout.owners)],
                head.new_zeros(0, width),
            )
        layers = [found["layer", k] for k in sorted(self.layout.owners)]
        return DraftFeatures(
            features=side_by_side(layers, found["embeddings", 0]),
            embeddings=found["embeddings", 0],
            hidden=found["hidden", 0] if hidden is None else hidden,
            special=self._special,
            **self._head,
        )

    def _receive(self, source: TapSource, index: int, rows: int) -> Tensor:
        each = -(-rows // self.tensor.size)
        block = self.channels[self.pipeline.rank].get(source.stage, index, each)
        return together(block, rows, self.tensor)

    def finish(self) -> MetricBag:
        metrics = MetricBag()
        for channel in self.channels.values():
            stats = channel.finish()
            metrics.add("taps/bytes", stats.bytes_sent, reduction="sum")
            metrics.add("taps/deferred", stats.blocks_deferred, reduction="sum")
            metrics.add("taps/seconds_waiting_credit", stats.seconds_waiting_credit, reduction="max")
            metrics.add("taps/seconds_waiting_data", stats.seconds_waiting_data, reduction="max")
        return metrics

    def describe(self) -> str:
        """All ranks of the pipeline call it."""
        held = self.pipeline.gather(sum(channel.memory for channel in self.channels.values()))
        lines = [
            f"The draft lives on pipeline rank {', '.join(map(str, self.place.hosts))}; landing slots there hold up to "
            f"{max(held) / 2**20:.1f} MiB."
        ]
        for source in self.layout.sources(hidden=not self.place.now):
            ways = sorted({channel.transports[source.stage] for channel in self.channels.values()})
            names = ["embeddings"] if source.stage == 0 else []
            names += [f"layer {layer}" for layer in self.layout.layers(source.stage)]
            names += ["final states"] if source.width > len(names) * self.layout.hidden_size else []
            lines.append(f"  virtual stage {source.stage}: {', '.join(names)} by {' or '.join(ways).replace('_', ' ')}")
        return "\n".join(lines)

    def check(self) -> None:
        for channel in self.channels.values():
            channel.check()

    def fail(self, error: BaseException) -> None:
        for channel in self.channels.values():
            channel.fail(error)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()


def together(part: Tensor, rows: int, tensor: TensorParallel) -> Tensor:
    """[rows, W] on every tensor-parallel rank, of the equal parts that each of them holds."""
    if tensor.size == 1:
        return part[:rows]
    whole = part.new_empty(tensor.size * part.shape[0], part.shape[1])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=tensor.group)
    return whole[:rows]
