"""DFlash: a block of masked slots filled in one pass (SEMANTICS.md section 2; arXiv 2602.06036), as vLLM serves it."""

from __future__ import annotations

from typing import Any

from lightning_spec.draft.block import BlockDraft
from lightning_spec.loss.position import PositionWeights


class DFlash(BlockDraft):
    """Slot 0 of a block holds the last token, slots 1 .. B - 1 the mask token; slot o predicts the token at its place.

    Arguments left at null are read from `path`'s config.json, or without a path follow the policy. Given ones must
    agree with the checkpoint.

    Args:
        path: folder of a draft to start from, in vLLM's format; null starts a new one.
        block_size: B, slots of a block with the context one: trained for B - 1 proposals.
        num_layers: decoder layers.
        intermediate_size, num_heads, num_kv_heads, head_dim: sizes of the layers. The width is the policy's.
        aux_layer_ids: taps, as transformers counts hidden_states.
        mask_token_id: a token of the vocabulary that never occurs, whose embedding marks empty slots. A new draft needs
            it.
        sliding_window: of the layers: a slot sees trunk rows less than this far away. Null: all rows.
        causal: whether a slot sees the slots of its block up to itself only, instead of all.
        max_positions: longest context; rollouts longer than this are refused. May raise a checkpoint's.
        anchors_per_sequence: blocks of a document in a step, drawn uniformly anew in every step. Null: one behind every
            sampled token.
        token_budget: slots computed at a time (4096 by default), so that memory does not grow with the anchors.
            Tensor-parallel ranks divide them.
        slot_weights: how slots weigh in the loss (`lightning_spec.loss.PositionWeights`); uniform by default.
        seed: of the initial weights, and of the draws of anchors where no document has a seed of its own.
    """

    kind = "dflash"

    def __init__(
        self,
        path: str | None = None,
        block_size: int | None = None,
        num_layers: int | None = None,
        intermediate_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        aux_layer_ids: list[int] | None = None,
        mask_token_id: int | None = None,
        sliding_window: int | None = None,
        causal: bool | None = None,
        max_positions: int | None = None,
        anchors_per_sequence: int | None = None,
        token_budget: int | None = None,
        slot_weights: PositionWeights | None = None,
        seed: int = 0,
    ) -> None:
        given = {
            "block_size": block_size,
            "num_layers": num_layers,
            "intermediate_size": intermediate_size,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "aux_layer_ids": None if aux_layer_ids is None else tuple(aux_layer_ids),
            "mask_token_id": mask_token_id,
            "sliding_window": sliding_window,
            "causal": causal,
            "max_positions": max_positions,
        }
        super().__init__(given, path, anchors_per_sequence, token_budget, slot_weights, seed)

    def speculative_config(self, num_speculative_tokens: int) -> dict[str, Any]:
        return {"method": "dflash", "num_speculative_tokens": num_speculative_tokens}
