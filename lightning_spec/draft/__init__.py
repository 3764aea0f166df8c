"""Drafts: speculators that are trained beside the policy and served by the engine."""

from lightning_spec.draft.base import Draft, DraftInputs, DraftMetrics, DraftOutput, Proposal
from lightning_spec.draft.dflash import DFlash
from lightning_spec.draft.dspark import DSpark
from lightning_spec.draft.eagle3 import Eagle3
from lightning_spec.draft.lm import DraftModel
from lightning_spec.draft.mtp import MTP
from lightning_spec.draft.vocab import VocabMap

__all__ = [
    "MTP",
    "DFlash",
    "DSpark",
    "Draft",
    "DraftInputs",
    "DraftMetrics",
    "DraftModel",
    "DraftOutput",
    "Eagle3",
    "Proposal",
    "VocabMap",
]
