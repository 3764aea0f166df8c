"""What a strategy knows of the model's stages: who holds what, where the draft lives, and how features get there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_spec.errors import ConfigError
from lightning_spec.parallel.assemble import Assembler
from lightning_spec.parallel.groups import Ranks, World, strategy_key
from lightning_spec.parallel.tap_channel import TapChannel
from lightning_spec.parallel.tap_depth import slots, slots_drained
from lightning_spec.policy import local_tensors
from lightning_spec.policy.stage import stage_layers
from lightning_spec.policy.taps import tap_owner
from strategies.estimate import longest_micro_batch
from strategies.layout import PipelineLayout, RowCost, resolve_layout
from strategies.place import DraftStage, Place
from strategies.steps import Taps
from strategies.taps import DirectTaps, PipelineTaps, TapLayout

Transport = Literal["auto", "shared_memory", "group"]


@dataclass(slots=True)
class _Plans:
    """Plans of assemblies of one module: made once, used at every refit."""

    module: Any = None
    made: dict[str, Assembler] = field(default_factory=dict)


class Pipeline:
    """The layout of policy and draft over the strategy's ranks.

    Args:
        strategy: the MegatronStrategy; its sizes and groups.
        layout, stage, transport, tap_rows: its arguments `pipeline_layout`, `draft_stage`, `tap_transport`, `tap_rows`.

    Raises:
        ConfigError: no such transport; a place for the draft that the pipeline does not have.
    """

    def __init__(
        self, strategy: Any, layout: PipelineLayout, stage: DraftStage, transport: Transport, tap_rows: int | None
    ) -> None:
        if transport not in ("auto", "shared_memory", "group"):
            raise ConfigError(
                "unknown tap transport",
                found=transport,
                needed="auto, shared_memory or group",
                key=strategy_key("tap_transport"),
            )
        self.strategy, self.layout, self.stage = strategy, layout, stage
        self.transport, self.tap_rows = transport, tap_rows
        self.place = Place.of(stage, strategy.sizes.pipeline_parallel)
        self._plans = _Plans()

    # ---- who holds what ---------------------------------------------------------------------------------------------

    def policy_layout(self, module: Any) -> dict[str, Any]:
        """Arguments of `policy_from_folder`."""
        return {
            "sizes": self.strategy.sizes,
            "sequence_parallel": self.strategy.sequence_parallel,
            "layout": self.layers(module) if self.strategy.sizes.stages > 1 else None,
        }

    def layers(self, module: Any) -> tuple[int, ...]:
        """The policy's layers on each virtual stage, in order."""
        sizes, count = self.strategy.sizes, module.shape.num_layers
        cost = self._cost(module)
        # A draft that every rank takes its turn at makes no stage slower than another.
        extra = (cost.head + (cost.draft if self.place.now else 0.0)) / cost.layer
        return stage_layers(count, sizes, resolve_layout(self.layout, count, sizes, extra))

    def _cost(self, module: Any) -> RowCost:
        draft = module.draft if module.trains_draft else None
        recompute = bool(getattr(module.source, "recompute", False))
        return RowCost.of(module.shape, draft, trains_policy=module.trains_policy, recompute=recompute)

    @property
    def hosts_draft(self) -> bool:
        return self.strategy.pipeline.rank in self.place.hosts

    @property
    def draft_ranks(self) -> Ranks:
        """All ranks that hold the draft, each of which makes a share of its gradient."""
        if len(self.place.hosts) == 1:
            return self.strategy.layer_ranks
        return World()

    @property
    def split(self) -> bool:
        """Whether some rank lacks a part of the policy."""
        sizes = self.strategy.sizes
        return max(sizes.tensor_parallel, sizes.pipeline_parallel, sizes.expert_parallel) > 1

    def assembler(self, module: Any, name: str) -> Assembler | None:
        """Of the module's "policy" or "draft"; None where every rank has all of it. Collective the first time."""
        if not self.split:
            return None
        if self._plans.module is not module:
            self._plans = _Plans(module)
        if name not in self._plans.made:
            held = local_tensors(module.policy) if name == "policy" else module.draft.local_tensors()
            ranks = self.strategy.assembly
            self._plans.made[name] = Assembler(held, ranks, targets=ranks.targets)
        return self._plans.made[name]

    # ---- micro-batches and taps -------------------------------------------------------------------------------------

    def idle(self, count: int) -> int:
        """Idle micro-batches to add to a replica's `count`. All ranks call it.

        The interleaved schedule wants a multiple of the stages. Ranks that split experts meet in every layer of every
        micro-batch, whatever replica they belong to.
        """
        sizes = self.strategy.sizes
        most = max(self.strategy.tokens.gather(count)) if sizes.expert_parallel > 1 else count
        if sizes.virtual_pipeline > 1:
            most = -(-most // sizes.pipeline_parallel) * sizes.pipeline_parallel
        return most - count

    def taps(self, module: Any) -> Taps | None:
        """How the draft gets its features; None without a draft. Collective over the pipeline's ranks."""
        strategy = self.strategy
        if getattr(module, "draft", None) is None:
            return None
        if strategy.sizes.pipeline_parallel == 1:
            return DirectTaps(module, strategy.tensor, sequence_parallel=strategy.sequence_parallel)
        cost, layers = self._cost(module), self.layers(module)
        layout = TapLayout(
            owners=tap_owner(layers, module.draft.aux_layer_ids),
            stages=strategy.sizes.stages,
            pipeline=strategy.pipeline.size,
            hidden_size=module.shape.hidden_size,
        )
        place = Place.of(self.stage, strategy.pipeline.size, cost.lead * sum(layers) / strategy.pipeline.size)
        return PipelineTaps(
            module,
            layout,
            {host: self._channel(module, layout, host) for host in place.hosts},
            place,
            strategy.pipeline,
            strategy.tensor,
            sequence_parallel=strategy.sequence_parallel,
        )

    def _channel(self, module: Any, layout: TapLayout, host: int) -> TapChannel:
        sizes, strategy = self.strategy.sizes, self.strategy
        sources = layout.sources(hidden=not self.place.now)
        depth = {
            source.stage: slots(sizes.pipeline_parallel, sizes.virtual_pipeline, source.stage)
            if self.place.now
            else slots_drained(sizes.pipeline_parallel, sizes.virtual_pipeline, source.stage, host)
            for source in sources
        }
        return TapChannel(
            sources,
            host,
            strategy.pipeline,
            rows=self.tap_rows or self._rows(module),
            dtype=next(module.last_chunk.parameters()).dtype,
            depth=depth,
            bound_s=strategy.timeout_s,
            device=strategy.root_device,
            transport=self.transport,
        )

    def _rows(self, module: Any) -> int:
        """Rows of the largest block: a rank's share of the largest micro-batch."""
        tokens = longest_micro_batch(self.strategy.token_budget, module.trainer)
        context = self.strategy.sizes.context_parallel
        if context > 1:
            # A document's halves are rounded up, so short documents make shares uneven.
            tokens = min(tokens, tokens // context + tokens // 8 + 64)
        return -(-tokens // self.strategy.sizes.tensor_parallel)
