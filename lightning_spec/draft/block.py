"""What DFlash and DSpark share: blocks of masked slots behind anchors, over a trunk of policy states (SEMANTICS 2)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_spec.attention.rope import RotaryEmbedding
from lightning_spec.batch import PackedBatch
from lightning_spec.draft.anchors import Anchors, slot_depth
from lightning_spec.draft.base import AttentionMode, Draft, DraftInputs, DraftOutput, need_built
from lightning_spec.draft.block_config import BlockConfig, new_block_config
from lightning_spec.draft.block_layers import Attend, BlockLayer, ConfidenceHead, MarkovHead
from lightning_spec.draft.block_propose import propose
from lightning_spec.draft.block_run import MoreLoss, run_blocks
from lightning_spec.draft.checkpoint import assign, canonical_name, read_tensors, tensor_names, write_checkpoint
from lightning_spec.draft.config import KEY, agree, read_config, rotary, with_positions
from lightning_spec.draft.layers import Linear, RMSNorm
from lightning_spec.draft.step_memory import LayerSizes, block_step
from lightning_spec.draft.tally import Tally, nothing
from lightning_spec.errors import ConfigError
from lightning_spec.loss.position import PositionWeights, UniformPositions
from lightning_spec.shapes import PolicyShape

_SLOTS = 4096
"""Slots computed at a time by default."""


class BlockDraft(Draft):
    """A draft that proposes a whole block in one pass. Head and mask embedding are the policy's live ones, detached.

    See `DFlash` for the arguments.
    """

    kind: Literal["dflash", "dspark"]
    rope: RotaryEmbedding
    """Made by `build`, as are the modules."""
    fc: Linear
    hidden_norm: RMSNorm
    norm: RMSNorm
    layers: nn.ModuleList
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None

    def __init__(
        self,
        given: Mapping[str, Any],
        path: str | None,
        anchors_per_sequence: int | None,
        token_budget: int | None,
        slot_weights: PositionWeights | None,
        seed: int,
    ) -> None:
        super().__init__()
        for name, value, unit in (
            ("anchors_per_sequence", anchors_per_sequence, "anchor"),
            ("token_budget", token_budget, "slot"),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"bad {name}", found=value, needed=f"at least 1 {unit}", key=f"{KEY}.{name}")
        self.path, self.seed = path, seed
        self.anchors_per_sequence, self.token_budget = anchors_per_sequence, token_budget or _SLOTS
        self.slot_weights = UniformPositions() if slot_weights is None else slot_weights
        self._given = dict(given)
        self.config: BlockConfig | None = None

    # ---- building ---------------------------------------------------------------------------------------------------

    def build(self, shape: PolicyShape, *, dtype: torch.dtype = torch.float32, seed: int | None = None) -> None:
        if self.config is not None:
            return
        config = new_block_config(self.kind, self._given, shape) if self.path is None else self._stored(shape)
        config.check(shape)
        self._policy_layers = shape.num_layers
        self.aux_layer_ids, self.embedding_ids = config.aux_layer_ids, (config.mask_token_id,)
        self.rope = rotary(config.rope, config.head_dim, config.max_positions)
        self._make_parameters(config, dtype, torch.Generator().manual_seed(self.seed if seed is None else seed))
        self.config = config
        if self.path is not None:
            self.load_tensors(read_tensors(self.path), str(self.path))

    def _stored(self, shape: PolicyShape) -> BlockConfig:
        """Of the checkpoint in `path`; arguments that were given must agree with it."""
        assert self.path is not None
        raw, where = read_config(self.path)
        config = BlockConfig.from_json(raw, tensor_names(self.path), shape.num_layers, where, self.kind)
        for name, wanted in self._given.items():
            if wanted is None or name == "max_positions":
                continue
            held = getattr(config, {"sliding_window": "windows"}.get(name, name))
            every = tuple(wanted) if isinstance(wanted, list | tuple) else wanted
            if isinstance(held, tuple) and not isinstance(every, tuple):
                every = (wanted,) * config.num_layers
            if held != every:
                agree(name, wanted, held, where)
        return with_positions(config, self._given.get("max_positions"))

    def _make_parameters(self, config: BlockConfig, dtype: torch.dtype, generator: torch.Generator) -> None:
        hidden = config.hidden_size
        self.fc = Linear(len(config.aux_layer_ids) * hidden, hidden, dtype, generator)
        self.hidden_norm = RMSNorm(hidden, config.norm_eps, dtype)
        self.layers = nn.ModuleList(
            BlockLayer(
                hidden=hidden,
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                inner=config.intermediate_size,
                eps=config.norm_eps,
                dtype=dtype,
                generator=generator,
                out_gain=(2 * config.num_layers) ** -0.5,
            )
            for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(hidden, config.norm_eps, dtype)
        self.markov_head, self.confidence_head = None, None

    def built(self) -> BlockConfig:
        return need_built(self.config)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def decoder_layers(self) -> list[BlockLayer]:
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    # ---- arithmetic -------------------------------------------------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """[T, n*C] taps to [T, H], what every layer's trunk keys are made of."""
        return self.hidden_norm(self.fc(features.to(self.dtype)))

    def trunk(self, fused: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(k, v), [T, kv_heads, D] each, of each layer; k is rotated at positions [T] inside the document."""
        cos, sin = self.rope.cos_sin(positions, self.dtype)
        return [layer.trunk(fused, cos, sin) for layer in self.decoder_layers()]

    def slots(self, first: Tensor, mask: Tensor, count: int) -> Tensor:
        """[A, count, H], input embeddings of blocks: the anchors' own [A, H], then the mask token's [H]."""
        masks = mask.to(self.dtype).expand(first.shape[0], count - 1, -1)
        return torch.cat([first.to(self.dtype)[:, None], masks], 1)

    def blocks(self, embedded: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The last layer's output [A, B, H], before `norm`.

        Args:
            embedded: [A, B, H], of `slots`.
            positions: int64 [A], of the anchors inside their documents.
            attend: as `block_layers.Attend`.
        """
        places = positions[:, None] + torch.arange(embedded.shape[1], device=positions.device)
        cos, sin = self.rope.cos_sin(places.flatten(), self.dtype)
        hidden = embedded
        for number, layer in enumerate(self.decoder_layers()):
            hidden = layer(hidden, cos, sin, number, attend)
        return hidden

    # ---- training ---------------------------------------------------------------------------------------------------

    def set_attention(self, mode: AttentionMode, memory_limit: int | None = None) -> None:
        """As of any draft; `auto` and `stream` move queries to the ranks that hold the trunk, `ring` moves keys."""
        if mode == "ulysses":
            raise ConfigError(
                "a block drafter has no Ulysses attention",
                found=mode,
                needed="auto, stream or ring",
                key="draft_attention",
            )
        super().set_attention(mode, memory_limit)

    def row_products(self) -> float:
        config = self.built()
        width, kv = config.hidden_size, config.num_kv_heads * config.head_dim
        trunk = 3 * width * (len(config.aux_layer_ids) * width + config.num_layers * 2 * kv)
        layers = sum(p.numel() for layer in self.layers for p in layer.parameters())
        # The borrowed head gives no gradient of its own; a low-rank bias does.
        head = config.vocab_size * (2 * width + 3 * config.markov_rank)
        block = 3 * config.block_size * layers + config.proposals * head
        few = self.anchors_per_sequence
        return trunk + block * (1.0 if few is None else min(1.0, few / config.max_positions))

    def step_memory(self, tokens: int, context: int, bytes_per_element: int) -> int:
        config, rows = self.built(), -(-tokens // context)
        anchors = min(max(1, self.token_budget // config.block_size), rows)
        return block_step(
            LayerSizes.of(config, qk_norm=True),
            layers=config.num_layers,
            rows=rows,
            slots=anchors * config.block_size,
            scored=config.proposals / config.block_size,
            trunk_piece=self.token_budget,
            vocabulary=config.vocab_size,
            parameters=sum(parameter.numel() for parameter in self.parameters()),
            bytes_per_element=bytes_per_element,
        )

    def counts(self, batch: PackedBatch) -> dict[str, Tensor]:
        found = self._anchors(batch)
        return {f"draft_slot_{s}": count for s, count in enumerate(found.counts().to(torch.float64))}

    def forward(self, inputs: DraftInputs, loss: Any, totals: Mapping[str, Tensor | float]) -> DraftOutput:
        self.need_parameters()
        x = inputs.detached()
        anchors = self._anchors(x)
        if not anchors.rows.numel():  # on every rank alike
            tally, more = Tally(self.built().proposals, 1.0, x.hidden.device), self.more_loss()
            metrics = tally.metrics() | ({} if more is None else more.metrics())
            return DraftOutput(nothing(self.parameters(), x.hidden), metrics)
        return run_blocks(self, x, loss, anchors, totals)

    def _anchors(self, batch: DraftInputs | PackedBatch) -> Anchors:
        config = self.built()
        depth = slot_depth(batch.positions, batch.sampled, batch.stop, config.proposals, config.max_positions)
        seeds = batch.document_seeds
        return Anchors.choose(depth, batch.lengths, config.proposals, self.anchors_per_sequence, seeds, self.seed)

    def more_loss(self) -> MoreLoss | None:
        """What one micro-batch's objective has beside the draft loss."""
        return None

    # ---- serving ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def speculative_config(self, num_speculative_tokens: int) -> dict[str, Any]: ...

    propose = propose

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def load_tensors(self, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
        self.built()
        self.need_parameters()
        assign({canonical_name(name): held for name, held in self.state_dict().items()}, tensors, source)

    def export(self, folder: str | Path, tensors: Iterable[tuple[str, Tensor]] | None = None) -> Path:
        held = tensors if tensors is not None else self.engine_tensors()
        return write_checkpoint(folder, self.built().to_json(), dict(held))

    def load(self, folder: str | Path) -> None:
        raw, where = read_config(folder)
        config = self.built()
        config.same(BlockConfig.from_json(raw, tensor_names(folder), self._policy_layers, where, self.kind), where)
        self.load_tensors(read_tensors(folder), str(folder))

    def fingerprint(self) -> dict[str, Any]:
        return {"class": type(self).__name__, **self.built().to_json()}
