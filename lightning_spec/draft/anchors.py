"""Which rows a block drafter puts its blocks behind, and how many slots of each block are scored (SEMANTICS.md 2).

Slot s counts predicted slots, from 0. At anchor a it predicts x_{a+1+s} and is taught by row a + s. (With o counting
all slots of the block: o = s + 1 in DFlash, whose slot 0 is context, and o = s in DSpark.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spec.draft.plan import choose
from lightning_spec.draft.validity import pass_counts


def slot_depth(positions: Tensor, sampled: Tensor, stop: Tensor, slots: int, max_positions: int) -> Tensor:
    """How many slots each row is scored on as an anchor: slot s when s < depth[a], so validity is a prefix.

    Slot s of anchor a is scored when x_a .. x_{a+1+s} lie in one document, were all sampled by the policy, none of them
    but the last ended generation, and the last stands before `max_positions`. The first row of a document is no anchor:
    there is no trunk before it.

    Args:
        positions: int64 [T], position inside the document (documents are contiguous).
        sampled, stop: bool [T], token-aligned.

    Returns:
        int64 [T], between 0 and `slots`.
    """
    t = positions.numel()
    good = sampled & (positions < max_positions)
    depth = torch.zeros_like(positions)
    alive = good & ~stop & (positions >= 1)
    for ahead in range(1, min(slots, t - 1) + 1):
        # Same document exactly when the position grew by as many steps as the row did.
        here = positions[ahead:] == positions[:-ahead] + ahead
        alive = alive[: t - ahead] & good[ahead:] & here
        depth[: t - ahead] += alive
        alive = alive & ~stop[ahead:]
    return depth


@dataclass(frozen=True, slots=True)
class Anchors:
    """The anchors of a micro-batch, decided from global masks: every rank that shares it decides alike."""

    rows: Tensor
    """int64 [A], ascending, global, on the CPU."""
    depth: Tensor
    """int64 [A], scored slots of each, at least 1, on the CPU."""
    slots: int
    """Predicted slots of a block."""

    @classmethod
    def choose(
        cls,
        depth: Tensor,
        lengths: Sequence[int],
        slots: int,
        per_document: int | None,
        seeds: Sequence[int] | None,
        seed: int,
    ) -> Anchors:
        """All rows with a scored slot, or a uniform sample of them in each document.

        Args:
            depth: int64 [T], of `slot_depth`.
            per_document: anchors of a document at most, drawn without replacement; None: all.
            seeds: of each document's draw. None, or none at all: made from `seed` and the document's place.

        Raises:
            ValueError: not as many seeds as documents.
        """
        depth = depth.cpu()
        rows = (depth > 0).nonzero().flatten()
        if per_document is not None:
            seeds = seeds or [seed * 1_000_003 + place for place in range(len(lengths))]
            if len(seeds) != len(lengths):
                raise ValueError(f"{len(seeds)} seeds for {len(lengths)} documents")
            starts = torch.tensor([0, *itertools.accumulate(lengths)])
            ends = torch.searchsorted(rows, starts).tolist()
            parts = [torch.zeros(0, dtype=torch.int64)]
            for (first, last), one in zip(itertools.pairwise(ends), seeds, strict=True):
                count = min(per_document, last - first)
                parts.append(first + choose(last - first, count, one % 2**63))
            rows = rows[torch.cat(parts)]
        return cls(rows, depth[rows], slots)

    def counts(self) -> Tensor:
        """int64 [slots], anchors that each slot is scored at."""
        return pass_counts(self.depth, self.slots)
