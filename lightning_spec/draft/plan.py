"""What a micro-batch's passes are scored on, decided from global masks: every context-parallel rank decides alike."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spec.draft.validity import pass_counts


@dataclass(frozen=True, slots=True)
class PassPlan:
    depth: Tensor
    """int64 [T], global: how many passes each row takes part in (0 where it was not sampled)."""
    sizes: list[int]
    """Valid rows of each pass, global."""
    weights: list[float]
    """Factor of a row's loss in each pass: pass weight, global normaliser, inverse sampling rate."""
    factor: float
    """Inverse sampling rate: what one row's metrics count for."""


def make_plan(
    depth: Tensor,
    pass_weights: Sequence[float],
    totals: Mapping[str, Tensor | float],
    rows_per_step: int | None,
    seed: int,
) -> PassPlan:
    """
    Args:
        depth: int64 [T], of `pass_depth`.
        totals: rows of pass i over the whole step under "draft_pass_<i>".
        rows_per_step: None, or about how many rows of a step carry loss: a uniform sample without replacement. Each
            micro-batch takes its share and at least one row; weights make up for it, so the gradient is unbiased.
        seed: of the sample; equal on ranks that hold parts of the same rows.
    """
    factor = 1.0
    if rows_per_step is not None:
        rows = (depth > 0).nonzero().flatten()
        count = share(rows.numel(), float(totals["draft_pass_0"]), rows_per_step)
        if count < rows.numel():
            factor = rows.numel() / count
            chosen = rows[choose(rows.numel(), count, seed).to(rows.device)]
            depth = torch.zeros_like(depth).index_copy_(0, chosen, depth[chosen])
    weights = []
    for i, weight in enumerate(pass_weights):
        total = float(totals[f"draft_pass_{i}"])
        weights.append(factor * weight / total if total else 0.0)
    return PassPlan(depth, pass_counts(depth, len(pass_weights)).tolist(), weights, factor)


def share(rows: int, step_rows: float, rows_per_step: int) -> int:
    """How many of a micro-batch's `rows` are sampled, when the step has `step_rows`."""
    return min(rows, max(1, round(rows_per_step * rows / max(step_rows, 1.0)))) if rows else 0


def choose(rows: int, count: int, seed: int) -> Tensor:
    """int64 [count], ascending: a uniform sample out of range(rows) without replacement."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def deal(depth: Tensor, positions: Tensor, size: int, fixed: float) -> list[Tensor]:
    """Assign the rows with depth > 0 to `size` ranks: consecutive pieces of about equal work, ascending, int64 each.

    Args:
        depth, positions: int64 [T], global.
        fixed: work of a row in one pass apart from attention, in keys attended to.
    """
    rows = (depth > 0).nonzero().flatten()
    return [rows[part] for part in cut(work_of(depth[rows], positions[rows], fixed), size)]


def work_of(depth: Tensor, positions: Tensor, fixed: float) -> Tensor:
    """float64 [R], work of rows in all their passes, in keys attended to. Arguments as in `deal`, [R] each.

    In whole 64ths, so that sums of it are exact in any order: the ranks that share rows must cut them alike, and sums
    on a GPU have no fixed order.
    """
    return (positions + 1 + round(64 * fixed) / 64) * depth.double()


def cut(work: Tensor, size: int) -> list[slice]:
    """`size` pieces of consecutive rows, of about equal `work` [R]; some are empty where rows are few."""
    middle = work.cumsum(0) - work / 2
    owner = (middle * (size / float(work.sum().clamp(min=1e-300)))).long().clamp(max=size - 1)
    ends = torch.searchsorted(owner, torch.arange(size + 1, device=work.device)).tolist()
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


def scored_rows(depth: Tensor, num_passes: int) -> tuple[Tensor, Tensor]:
    """(rows, passes), int64 [S] each: what rows of the given depth [R] are scored on, pass by pass, rows ascending."""
    passes, rows = (depth[None, :] > torch.arange(num_passes, device=depth.device)[:, None]).nonzero().unbind(1)
    return rows, passes
