"""Which rows a draft pass is scored on (SEMANTICS.md section 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_spec.draft.base import DraftInputs


def pass_depth(positions: Tensor, sampled: Tensor, stop: Tensor, num_passes: int, max_positions: int) -> Tensor:
    """How many passes each row takes part in: V[t, i] = (depth[t] > i).

    V[t,i] holds when x_{t+1} .. x_{t+1+i} all lie in row t's document, were all sampled by the policy, and none of them
    ended generation. It is a running product, hence one number a row. Rows whose teacher would stand past
    `max_positions` are excluded.

    Args:
        positions: int64 [T], position inside the document (documents are contiguous).
        sampled, stop: bool [T], token-aligned.

    Returns:
        int64 [T], between 0 and num_passes.
    """
    t = positions.numel()
    good = sampled & ~stop & (positions < max_positions)
    depth = torch.zeros_like(positions)
    alive = torch.ones(t, dtype=torch.bool, device=positions.device)
    for ahead in range(1, min(num_passes, t - 1) + 1):
        # Same document exactly when the position grew by as many steps as the row did.
        here = positions[ahead:] == positions[:-ahead] + ahead
        alive = alive[: t - ahead] & good[ahead:] & here
        depth[: t - ahead] += alive
    return depth


def pass_counts(depth: Tensor, num_passes: int) -> Tensor:
    """int64 [num_passes], the number of valid rows of each pass."""
    passes = torch.arange(num_passes, device=depth.device)
    return (depth[None, :] > passes[:, None]).sum(1)


def next_tokens(tokens: Tensor, positions: Tensor, sampled: Tensor) -> Tensor:
    """int64 [T], the token that the policy sampled after each row; -1 where it sampled none. Arguments [T], as in
    `pass_depth`."""
    labels = torch.full_like(tokens, -1)
    good = sampled[1:] & (positions[1:] == positions[:-1] + 1)
    labels[:-1] = torch.where(good, tokens[1:], -1)
    return labels


def pass_labels(x: DraftInputs, rows: Tensor, passes: Tensor) -> Tensor:
    """int64 [R], the rollout's token x_{t+2+i} that pass i of anchor t predicts; -1 where there is none.

    Args:
        rows, passes: int64 [R], t (global) and i, within the depth of `pass_depth`: row t + 1 + i exists.
    """
    return next_tokens(x.tokens, x.positions, x.sampled)[rows + 1 + passes]
