"""Drafts: speculators that are trained beside the policy and served by the engine."""

from lightning_spec.draft.base import Draft, DraftInputs, DraftMetrics, DraftOutput, Proposal
from lightning_spec.draft.eagle3 import Eagle3
from lightning_spec.draft.vocab import VocabMap

__all__ = ["Draft", "DraftInputs", "DraftMetrics", "DraftOutput", "Eagle3", "Proposal", "VocabMap"]
