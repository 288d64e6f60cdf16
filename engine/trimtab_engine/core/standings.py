"""When the standing of a request changes (savable → late → overdue): a heap of moments, looked at once a step.

Owned by `core.lifecycle`. What the moments are is `core.policy_sla`'s affair; this keeps them in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from trimtab_engine.core.policy_sla import Standing, next_move_s
from trimtab_engine.core.request import Request, RequestState


class Standings:
    """Lazy: an entry counts only while the request is alive, has no token, and moves at the entry's moment."""

    __slots__ = ("_heap", "_order")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._order = 0

    def watch(self, request: Request) -> None:
        """Note the request's next move, if it has one."""
        at_s = next_move_s(request)
        if at_s != float("inf"):
            self._order += 1
            heappush(self._heap, (at_s, self._order, request))

    def due(self, now: float) -> Iterator[Request]:
        """Requests whose move is due, earliest first. The caller moves each before it asks for the next.

        A running prompt does not become late: it has started. A late one becomes overdue, so that it does not starve.
        """
        heap = self._heap
        while heap and heap[0][0] <= now:
            at_s, _, request = heappop(heap)
            if request.state is RequestState.FINISHED or next_move_s(request) != at_s:
                continue
            if request.state is RequestState.RUNNING and request.standing is Standing.SAVABLE:
                continue
            yield request

    def clear(self) -> None:
        """Forget all: the policy has no deadlines."""
        self._heap.clear()
