"""Requests that hold KV: those that decode and those whose prompt (or recomputation) is still under way.

Owned by `core.scheduler`. Keeps the two apart, so that a step's passes filter nothing, and each in service order.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from trimtab_engine.core.request import Request


def _rank(request: Request) -> tuple[float, ...]:
    return request.rank


class RunningSet:
    """`decodes` need one token each and have their prompt computed; `prefills`, kept by rank, are all others."""

    __slots__ = ("decodes", "prefills")

    def __init__(self) -> None:
        self.decodes: list[Request] = []
        self.prefills: list[Request] = []

    def __len__(self) -> int:
        return len(self.decodes) + len(self.prefills)

    def __iter__(self) -> Iterator[Request]:
        yield from self.decodes
        yield from self.prefills

    def admit(self, request: Request) -> None:
        """A new one; it has at least one token to compute before it can decode."""
        insort(self.prefills, request, key=_rank)

    def promote(self, request: Request) -> None:
        """The prompt is computed: from now on one token a step."""
        self.prefills.remove(request)
        self.decodes.append(request)

    def remove(self, request: Request) -> None:
        """It was preempted or has ended."""
        if request in self.decodes:
            self.decodes.remove(request)
        else:
            self.prefills.remove(request)

    def remove_decodes(self, ended: set[str]) -> None:
        """Take out many at once (one pass over the list, not one each)."""
        self.decodes = [request for request in self.decodes if request.id not in ended]

    def rerank(self, rank_of: Callable[[Request], tuple[float, ...]]) -> None:
        """New ranks after a change of policy; nobody leaves."""
        for request in self:
            request.rank = rank_of(request)
        self.sort()

    def sort(self) -> None:
        """Ranks have changed."""
        self.prefills.sort(key=_rank)
