"""Ranks that are threads of this process: enough of `Ranks` to make a channel between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class _Group:
    def __init__(self) -> None:
        self._store = dist.HashStore()

    def get_group_store(self) -> dist.Store:
        return self._store


class ThreadRanks:
    """One rank; `team(n)` makes n that belong together."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Any], group: _Group) -> None:
        self.rank, self.size, self.cpu_group = rank, size, group
        self._barrier, self._board = barrier, board

    def gather(self, value: T) -> list[T]:
        self._board[self.rank] = value
        self._barrier.wait(20)
        everyone = list(self._board)
        self._barrier.wait(20)
        return everyone


def team(size: int) -> list[Any]:
    barrier, board, group = threading.Barrier(size), [None] * size, _Group()
    return [ThreadRanks(rank, size, barrier, board, group) for rank in range(size)]


def run(size: int, work: Callable[[Any], T], timeout_s: float = 30.0) -> list[T | BaseException]:
    """`work(ranks)` on `size` threads; what each returned or raised, in rank order. None outlives the call."""
    results: list[Any] = [None] * size

    def body(ranks: Any) -> None:
        try:
            results[ranks.rank] = work(ranks)
        except BaseException as error:
            results[ranks.rank] = error

    threads = [threading.Thread(target=body, args=(ranks,), daemon=True) for ranks in team(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
