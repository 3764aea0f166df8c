"""`attend(q, k, v, work) -> (out, lse)` and its backward: one interface over the kernels.

`Work` says which keys each query row sees: one interval a row, as rectangles and triangles where it can be (a flash
kernel then serves them), else as two numbers a row. Partial results over several sets of keys are merged with `merge_`;
the backward of each part takes the output and log-sum-exp of the *joint* softmax (SEMANTICS.md section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_spec.attention import kernels, layout, reference
from lightning_spec.attention.layout import Item, Run

_GATHERED = 8
"""Keys that flash items may copy, in multiples of the rows of q and k; beyond it the interval kernel reads in place."""


@dataclass(frozen=True, slots=True)
class Work:
    """Which of `keys` key rows each of `rows` query rows sees.

    `causal` and `full` items (q_first, q_count, k_first, k_count) pair query rows with key rows: a causal item has
    equal counts and its row r sees its keys 0..r; a full item's rows see all its keys. A query row is in at most one
    item of each kind, and the keys it sees are one interval. Rows in no item see nothing.
    """

    rows: int
    keys: int
    causal: tuple[Item, ...] = ()
    full: tuple[Item, ...] = ()
    given: tuple[Tensor, Tensor] | None = field(default=None, compare=False)
    """(low, high), int64 [rows] each on the CPU, where the intervals are no such items (windows, scattered rows)."""
    plans: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What a kernel worked out for this work, kept with it."""

    @classmethod
    def of_runs(cls, runs: Sequence[Run], keys: int, offset: int = 0, window: int | None = None) -> Work:
        """Causal attention of `runs` over a trunk of `keys` rows: row t sees rows s <= t of its document, and with a
        window only those with (t + offset) - s < window."""
        rows = sum(run.count for run in runs)
        if window is not None and layout.longest_reach(runs) + offset >= window:
            return cls(rows, keys, given=layout.intervals(runs, offset, window))
        causal = tuple((run.query, run.count, run.row, run.count) for run in runs)
        full = tuple(
            (run.query, run.count, run.document, run.row - run.document) for run in runs if run.row > run.document
        )
        return cls(rows, keys, causal, full)

    @classmethod
    def of_intervals(cls, low: Tensor, high: Tensor, keys: int) -> Work:
        """Row r sees the keys [low[r], high[r]); an empty interval is one with high <= low."""
        return cls(low.numel(), keys, given=(low, torch.maximum(low, high)))

    @classmethod
    def among(cls, low: Tensor, high: Tensor, held: Tensor) -> Work:
        """Row r sees those of the rows `held` (int64, ascending) that lie in [low[r], high[r])."""
        return cls.of_intervals(torch.searchsorted(held, low), torch.searchsorted(held, high), held.numel())

    @property
    def empty(self) -> bool:
        """Whether no row sees any key."""
        if self.given is not None:
            return not bool((self.given[1] > self.given[0]).any())
        return not self.causal and not self.full

    def intervals(self) -> tuple[Tensor, Tensor]:
        """(low, high) of every row, int64 [rows] on the CPU."""
        if self.given is not None:
            return self.given
        low, high = torch.full((self.rows,), self.keys), torch.zeros(self.rows, dtype=torch.int64)
        for kind, items in (("causal", self.causal), ("full", self.full)):
            for q_first, q_count, k_first, k_count in items:
                rows = slice(q_first, q_first + q_count)
                low[rows] = low[rows].clamp(max=k_first)
                ends = torch.arange(k_first + 1, k_first + q_count + 1) if kind == "causal" else k_first + k_count
                high[rows] = torch.maximum(high[rows], torch.as_tensor(ends))
        return torch.minimum(low, high), high

    def as_items(self) -> bool:
        """Whether the flash kernels serve this work well: they need items, and copy keys that items share."""
        if self.given is not None:
            return False
        gathered = sum(item[3] for item in self.full) if len(self.full) > 1 else 0
        return gathered <= _GATHERED * (self.rows + self.keys)


def kernel_of(q: Tensor, work: Work) -> kernels.Kernel:
    """The kernel that `attend` and `attend_backward` use for the query rows `q` [R, H, D] of `work`."""
    return kernels.choose(q) if work.as_items() else kernels.choose_intervals(q)


def attend(q: Tensor, k: Tensor, v: Tensor, work: Work, *, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of the query rows over the keys that `work` gives them.

    Args:
        q: [R, H, D];  k, v: [T, K, D], K divides H (kv heads are never expanded).
        scale: factor on the logits.

    Returns:
        out [R, H, D], possibly wider than q and a view, and lse [R, H] in the accumulation dtype; rows that see nothing
        have out = 0 and lse = -inf.
    """
    kernel = kernel_of(q, work)
    if kernel == "triton":
        out, lse = triton().attend(q, k, v, work, scale=scale)
        return out, lse
    if kernel != "flash":
        by_intervals = reference.attend if kernel == "reference" else kernels.interval_attend
        return by_intervals(q, k, v, *work.intervals(), scale=scale)
    acc = kernels.accumulation_dtype(q.dtype)
    buckets = layout.buckets(work.causal, work.full, mask_keys=not q.is_cuda)
    alone = len(buckets) == 1 and len(buckets[0].queries(q.device)) == q.shape[0]
    out, lse = torch.empty(0), torch.empty(0)
    if not alone:
        out = q.new_zeros(q.shape, dtype=acc)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=acc)
    for bucket in buckets:
        rows, keys = bucket.queries(q.device), bucket.keys(q.device)
        part, part_lse = kernels.flash_attend(
            rows.pad(q), keys.pad(k), keys.pad(v), scale=scale, causal=bucket.causal, key_mask=keys.mask(bucket)
        )
        part, part_lse = rows.unpad(part), rows.unpad(part_lse[..., None])[..., 0]
        if alone:
            return part, part_lse
        if bucket.causal:  # these come first, and no row is in two of them
            out[rows.index], lse[rows.index] = part.to(acc), part_lse
        else:
            merge_(out, lse, part, part_lse, rows.index)
    return out, lse


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    work: Work,
    *,
    scale: float,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [R, H, D], dk, dv [T, K, D]) through the keys of `work`, in the accumulation dtype.

    Args:
        grad, out: [R, H, D] and lse: [R, H], of the joint softmax that this work is a part of.
        into: (dk, dv) to add to and return, which saves tensors of all keys where only few rows look back; the
            accumulation dtype, any strides.
    """
    kernel = kernel_of(q, work)
    if kernel != "flash":
        if kernel == "triton":
            dq, *found, _ = triton().attend_backward(grad, q, k, v, out, lse, work, scale=scale)
        else:
            by_intervals = reference.attend_backward if kernel == "reference" else kernels.interval_attend_backward
            dq, *found = by_intervals(grad, q, k, v, out, lse, *work.intervals(), scale=scale)
        dk, dv = found if into is None else [total.add_(part) for total, part in zip(into, found, strict=True)]
        return dq, dk, dv
    acc = kernels.accumulation_dtype(q.dtype)
    buckets = layout.buckets(work.causal, work.full, mask_keys=not q.is_cuda)
    alone = len(buckets) == 1 and len(buckets[0].queries(q.device)) == q.shape[0]
    alone = alone and into is None and len(buckets[0].keys(q.device)) == k.shape[0]
    dq = q.new_zeros(0 if alone else q.shape, dtype=acc)
    dk, dv = into or (x.new_zeros(0 if alone else x.shape, dtype=acc) for x in (k, v))
    for bucket in buckets:
        rows, keys = bucket.queries(q.device), bucket.keys(q.device)
        parts = kernels.flash_attend_backward(
            rows.pad(grad, zero=True),
            rows.pad(q),
            keys.pad(k),
            keys.pad(v),
            rows.pad(out),
            rows.pad(lse[..., None])[..., 0],
            scale=scale,
            causal=bucket.causal,
            key_mask=keys.mask(bucket),
        )
        if alone:
            return rows.unpad(parts[0]).to(acc), keys.unpad(parts[1]).to(acc), keys.unpad(parts[2]).to(acc)
        rows.add(dq, parts[0])
        keys.add(dk, parts[1])
        keys.add(dv, parts[2])
    return dq, dk, dv


def triton() -> Any:
    """The module `triton_launch`, where "triton" was chosen."""
    launch = kernels.triton_launch()
    assert launch is not None  # else it was not chosen
    return launch


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | slice = slice(None)) -> None:
    """Merge a partial result into `out` [R, H, D] and `lse` [R, H] (accumulation dtype) in place, at `rows`.

    Rows that saw nothing in one of the two (lse = -inf) take the other's; in both, they stay as they are.
    """
    old = lse[rows]
    joint = torch.logaddexp(old, part_lse)
    safe = torch.where(joint == -torch.inf, torch.zeros_like(joint), joint)
    kept = out[rows] * (old - safe).exp()[..., None]
    out[rows] = kept.add_(part * (part_lse - safe).exp()[..., None])
    lse[rows] = joint
