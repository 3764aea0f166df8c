"""The policy's rows that anchors look ahead to: inputs t + 1 .. t + N and teachers t + 1 .. t + N of anchor t."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_spec.attention.exchange import RowExchange
from lightning_spec.attention.zigzag import Shard
from lightning_spec.draft.base import DraftInputs


class Ahead:
    """Rows of the policy's embeddings and hidden states by their global index.

    Where one rank holds all rows this is a view of the inputs. Else the rows wanted come in one exchange, in which
    every rank of the shard's group must take part; they are constants to the draft, so no gradient returns.

    Args:
        want: for each rank, the ascending global rows it wants. Equal on all ranks.
        teachers: whether hidden states are wanted, too.
    """

    def __init__(self, x: DraftInputs, want: Sequence[Tensor] | None, teachers: bool = True) -> None:
        self.last = x.tokens.numel() - 1
        self.rows: Tensor | None = None
        self.embeddings, self.hidden, self.tokens = x.embeddings, x.hidden, x.tokens
        shard = x.split
        if shard is not None and want is not None:
            self.rows = want[shard.rank]
            self.tokens = x.tokens[self.rows]
            wanted = [x.embeddings, x.hidden] if teachers else [x.embeddings]
            self.embeddings, self.hidden = (*fetch(wanted, want, shard), x.hidden)[:2]

    def index(self, rows: Tensor) -> Tensor:
        """Where the global `rows` stand here. Rows past the end, and rows that were not wanted, give some other row:
        they are asked for by rows of a pass that are not scored in it."""
        if self.rows is None:
            return rows.clamp(max=self.last)
        return torch.searchsorted(self.rows, rows).clamp(max=max(self.rows.numel() - 1, 0))


def fetch(tensors: Sequence[Tensor], want: Sequence[Tensor], shard: Shard) -> list[Tensor]:
    """The global rows `want[rank]` of tensors [T_r, X] whose rows lie as in `shard`, in one message a pair of ranks
    (where the tensors have one dtype)."""
    have = [shard.layout.rows(rank) for rank in range(shard.size)]
    exchange = RowExchange(have, want, shard.context)
    if len({x.dtype for x in tensors}) > 1:
        return [exchange.apply(x.detach()) for x in tensors]
    return list(exchange.apply(torch.cat([x.detach() for x in tensors], 1)).split([x.shape[1] for x in tensors], 1))


def wanted(rows: Sequence[Tensor], depth: Tensor, passes: int, always: int = 0) -> list[Tensor]:
    """For each rank's anchors (global rows), the rows ahead that their passes read, ascending.

    Args:
        depth: int64 [T], global: anchor t reads t + 1 .. t + depth[t].
        always: rows ahead that every anchor reads.
    """
    last, lists = depth.numel() - 1, []
    for anchors in rows:
        found = torch.zeros(depth.numel(), dtype=torch.bool, device=depth.device)
        for ahead in range(1, passes + 1):
            some = anchors if ahead <= always else anchors[depth[anchors] >= ahead]
            found[(some + ahead).clamp(max=last)] = True
        lists.append(found.nonzero().flatten())
    return lists
