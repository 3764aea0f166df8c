"""DSpark: DFlash's block with a sequential low-rank bias and a confidence head, as vLLM serves it (SEMANTICS.md 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_spec.draft.base import DraftMetrics
from lightning_spec.draft.block import BlockDraft
from lightning_spec.draft.block_config import BlockConfig
from lightning_spec.draft.block_layers import ConfidenceHead, MarkovHead
from lightning_spec.draft.config import KEY
from lightning_spec.errors import ConfigError
from lightning_spec.loss.confidence import calibration, confidence_loss
from lightning_spec.loss.position import PositionWeights


class DSpark(BlockDraft):
    """Every slot of a block predicts the next token: slot o, which stands at a + o, the one at a + o + 1. Its logits
    have a bias from the token before that one (in training the rollout's), of low rank.

    The confidence head learns the chance sum min(p, q) that a proposal is accepted, by binary cross-entropy; the
    published objective is 0.1 HardCrossEntropy + 0.9 TotalVariation (a `Weighted` draft loss) + 1.0 of that.

    Arguments as in `DFlash`, and

    Args:
        block_size: B, slots of a block: trained for B proposals.
        markov_rank: r, rank of the bias.
        confidence: whether there is a confidence head.
        confidence_with_markov: whether it reads the Markov embedding of the token before, too.
        confidence_weight: of its term in the objective.
    """

    kind = "dspark"
    confidence_threshold: float | None = None
    """Set by an engine that ends a proposal before the first token of less confidence."""

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
        markov_rank: int | None = None,
        confidence: bool | None = None,
        confidence_with_markov: bool | None = None,
        confidence_weight: float = 1.0,
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
            "markov_rank": markov_rank,
            "confidence": confidence,
            "confidence_with_markov": confidence_with_markov,
        }
        super().__init__(given, path, anchors_per_sequence, token_budget, slot_weights, seed)
        if not 0.0 <= confidence_weight < float("inf"):
            raise ConfigError(
                "bad confidence_weight",
                found=confidence_weight,
                needed="a number of at least 0",
                key=f"{KEY}.confidence_weight",
            )
        self.confidence_weight = confidence_weight

    def _make_parameters(self, config: BlockConfig, dtype: torch.dtype, generator: torch.Generator) -> None:
        super()._make_parameters(config, dtype, generator)
        rank = config.markov_rank
        if rank:
            self.markov_head = MarkovHead(config.vocab_size, rank, dtype, generator)
        if config.confidence:
            read = rank if config.confidence_with_markov else 0
            self.confidence_head = ConfidenceHead(config.hidden_size, read, dtype, generator)

    def more_loss(self) -> _Confidence | None:
        return None if self.confidence_head is None else _Confidence(self.confidence_head, self.confidence_weight)

    def speculative_config(self, num_speculative_tokens: int) -> dict[str, Any]:
        return {"method": "dspark", "num_speculative_tokens": num_speculative_tokens}


class _Confidence:
    """The confidence head's term of one micro-batch, and how well its chances are calibrated.

    Metrics are means over scored rows: the Brier score, and for each tenth b of chances `draft/confidence_error_<b>`,
    the excess of chance over sum min(p, q) of the rows in it. The expected calibration error is the sum of their
    absolute values; each is a plain sum over rows, so they reduce over micro-batches and ranks.
    """

    def __init__(self, head: ConfidenceHead, weight: float) -> None:
        self.head, self.weight = head, weight
        nobody = torch.zeros(0, device=head.proj.weight.device)
        self.sums = calibration(nobody, nobody, nobody.bool())

    def __call__(self, normed: Tensor, markov: Tensor | None, alpha: Tensor, weight: Tensor) -> Tensor:
        logits = self.head(normed, markov)
        for name, value in calibration(logits.sigmoid(), alpha, torch.ones_like(alpha, dtype=torch.bool)).items():
            self.sums[name] += value
        return self.weight * confidence_loss(logits, alpha, weight)

    def metrics(self) -> DraftMetrics:
        rows = self.sums["rows"]
        found: DraftMetrics = {"draft/confidence_brier": (self.sums["brier"], rows, "mean")}
        for b, error in enumerate(self.sums["bin_confidence"] - self.sums["bin_target"]):
            found[f"draft/confidence_error_{b}"] = (error, rows, "mean")
        return found
