"""The loop over passes that both engines share, and what is scored in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_spec.draft.chain import PassChain

if TYPE_CHECKING:
    from lightning_spec.draft.chained import ChainedDraft

_COMPACT = 0.75
"""Rows are compacted when fewer than this share is still valid: it copies every branch key, running on costs less."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The scored rows of all passes, pass by pass."""

    normed: Tensor
    """[R, H], what the head reads."""
    rows: Tensor
    """int64 [R], indices into the chain's rows."""
    passes: Tensor
    """int64 [R]."""
    counts: list[int]
    """Rows of each pass; they sum to R."""


def run_passes(
    draft: ChainedDraft,
    chain: PassChain,
    output: Tensor,
    depth: Tensor,
    alive: Sequence[int],
    embed: Callable[[Tensor, int], Tensor],
) -> Scored:
    """Passes 1, 2, ... after pass 0.

    Args:
        output: [R, H], pass 0's output at `chain.rows`.
        depth: int64, passes that each of the chain's rows takes part in.
        alive: rows of each pass on all ranks that must take the same steps; the loop ends at 0.
        embed: (indices into the chain's rows, pass) -> [R, H], the pass's input embeddings.
    """
    kept = alive[0]
    hidden = output
    normed_rows: list[Tensor] = []
    rows: list[Tensor] = []
    for i, size in enumerate(alive):
        if not size:
            break
        if i:
            if size < _COMPACT * kept:
                index = (depth[chain.rows] > i).nonzero().flatten()
                chain.keep(index)
                hidden, kept = hidden[index], size
            output = chain.step(hidden, embed(chain.rows, i))
        normed = draft.normed(output)
        hidden = draft.recycled(output, normed)
        here = depth[chain.rows] > i
        if bool(here.all()):
            normed_rows.append(normed)
            rows.append(chain.rows)
        else:
            index = here.nonzero().flatten()
            normed_rows.append(normed[index])
            rows.append(chain.rows[index])
    counts = [part.numel() for part in rows]
    passes = torch.arange(len(counts), device=depth.device).repeat_interleave(
        torch.tensor(counts, dtype=torch.int64, device=depth.device)
    )
    counts += [0] * (len(alive) - len(counts))
    return Scored(torch.cat(normed_rows), torch.cat(rows), passes, counts)
