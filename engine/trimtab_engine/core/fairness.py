"""Fairness between tenants: whose turn it is to have a request admitted, by virtual token counters.

Owned by `core.lifecycle` in place of the plain waiting queue when `--fair-tenants` is on. Knows tenants' names and token
counts; within a tenant the policy's ranks decide, so it combines with every policy.

Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), algorithm 2: each tenant has a counter of the service it
got, PROMPT_WEIGHT a computed prompt token and OUTPUT_WEIGHT an output token; the waiting tenant of smallest counter is next.
A tenant that comes back after an idle time is lifted to the smallest counter among those that wait: idleness earns no credit.
Two tenants that both always have requests waiting get service that differs by no more than one batch holds, for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trimtab_engine.core.request import Request
from trimtab_engine.core.waiting import WaitingQueue

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2  # as in the paper
# Counters of tenants that are not here are kept up to this number; beyond, those that a return would lift anyway go.
MAX_COUNTERS = 4096

Tenant = str | None


class FairQueue:
    """The interface of `WaitingQueue`, one such queue per tenant, and the counters."""

    __slots__ = ("_counters", "_head", "_last_left", "_queues")

    def __init__(self) -> None:
        self._queues: dict[Tenant, WaitingQueue] = {}  # never an empty one
        self._counters: dict[Tenant, float] = {}
        self._last_left: float = 0.0  # counter of the tenant whose queue was emptied last
        self._head: Request | None = None  # memo of `peek`

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Request]:
        for queue in self._queues.values():
            yield from queue

    def __contains__(self, request: Request) -> bool:
        queue = self._queues.get(request.tenant)
        return queue is not None and request in queue

    def counter(self, tenant: Tenant) -> float:
        """Service that the tenant counts as having got."""
        return self._counters.get(tenant, 0.0)

    def push(self, request: Request) -> None:
        """Queue the request at `request.rank`. A tenant that was not waiting is lifted; one that was preempted is not."""
        self._head = None
        tenant = request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            if request.num_preemptions == 0:
                self._counters[tenant] = max(self.counter(tenant), self._floor())
                if len(self._counters) > MAX_COUNTERS:
                    self._forget()
            queue = self._queues[tenant] = WaitingQueue()
        queue.push(request)

    def peek(self) -> Request | None:
        """The head of the tenant with the smallest counter, ties by the heads' ranks; None when nobody waits."""
        if self._head is None:
            best: tuple[float, tuple[float, ...]] | None = None
            for tenant, queue in self._queues.items():
                head = queue.peek()
                assert head is not None, "an empty queue is dropped"
                place = (self.counter(tenant), head.rank)
                if best is None or place < best:
                    best, self._head = place, head
        return self._head

    def remove(self, request: Request) -> None:
        """Take a member out, wherever it stands."""
        self._head = None
        queue = self._queues[request.tenant]
        queue.remove(request)
        if not len(queue):
            del self._queues[request.tenant]
            self._last_left = self.counter(request.tenant)

    def charge(self, tenant: Tenant, service: float) -> None:
        """The tenant got (or, below 0, gave back) weighted tokens."""
        self._head = None
        self._counters[tenant] = self.counter(tenant) + service

    def rerank(self, rank_of: Callable[[Request], tuple[float, ...]] | None = None) -> None:
        """New ranks within each tenant. Counters stay."""
        self._head = None
        for queue in self._queues.values():
            queue.rerank(rank_of)

    def oldest_arrival_s(self) -> float | None:
        """Arrival of the member that has been here longest, or None."""
        arrivals = [a for queue in self._queues.values() if (a := queue.oldest_arrival_s()) is not None]
        return min(arrivals, default=None)

    def _floor(self) -> float:
        """What a tenant that begins to wait is lifted to."""
        return min((self.counter(tenant) for tenant in self._queues), default=self._last_left)

    def _forget(self) -> None:
        floor = self._floor()
        for tenant in [t for t, c in self._counters.items() if c <= floor and t not in self._queues]:
            del self._counters[tenant]
