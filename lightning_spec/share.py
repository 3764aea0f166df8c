"""A rank's share of a micro-batch that the ranks of a context-parallel group hold together."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_spec.attention.context import Context
from lightning_spec.attention.zigzag import Shard, Zigzag
from lightning_spec.batch import PackedBatch
from lightning_spec.loss import Split


@dataclass(frozen=True, slots=True)
class Share:
    """The rows that this rank computes, and what it must know of the others' to do so."""

    rows: PackedBatch
    """This rank's rows; `lengths` are the whole micro-batch's."""
    shard: Shard | None = None
    """Which rows they are, for the attention; None: all of them."""
    split: Split | None = None
    """What the policy's loss needs of the whole documents; None: `rows` are whole documents."""

    @classmethod
    def of(cls, micro: PackedBatch, context: Context, *, split: bool = True) -> Share:
        """This rank's share of the whole micro-batch, which every rank of the group has.

        Args:
            split: whether a policy loss follows; only it needs `Share.split`.
        """
        shard = cls.shard_of(micro, context)
        if shard is None or context.group is None:
            return cls(micro)
        needs = Split.of(micro.loss_mask, micro.document, context.group, len(micro.lengths)) if split else None
        return cls(micro.take(shard.rows), shard, needs)

    @staticmethod
    def shard_of(micro: PackedBatch, context: Context) -> Shard | None:
        """Which rows of the micro-batch this rank computes; None: all. Made once a micro-batch."""
        if context.group is None:
            return None
        if micro.shard is None or micro.shard.context is not context:
            micro.shard = Shard(Zigzag(micro.lengths, context.size), context)
        return micro.shard
