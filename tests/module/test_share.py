"""A rank's rows of a micro-batch that several ranks share."""

from __future__ import annotations

from typing import Any

from lightning_spec.attention.context import Context
from lightning_spec.batch import pack_documents
from lightning_spec.share import Share
from tests.module.conftest import make_rollouts


def test_a_micro_batchs_rows_are_found_once_for_each_group() -> None:
    group: Any = object()  # nobody is talked to
    micro = pack_documents(make_rollouts(0), range(6))
    ranks = [Context(group, rank, 2) for rank in range(2)]
    shards = [Share.shard_of(micro, context) for context in (ranks[0], ranks[0], ranks[1])]
    first, again, other = shards
    assert first is again
    assert first is not None
    assert other is not None
    assert sorted([*first.rows.tolist(), *other.rows.tolist()]) == list(range(len(micro.tokens)))
    assert Share.shard_of(micro, Context.single()) is None
