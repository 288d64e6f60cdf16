"""Requests that are not running: a heap by policy rank, siblings held back for a shared prefix, and who is oldest.

Owned by `core.scheduler`. Knows ranks and groups; nothing of blocks, budgets or which policy made the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from trimtab_engine.core.request import Request

Entry = tuple[tuple[float, ...], Request]


class WaitingQueue:
    """Smallest rank first. Ranks end in the unique `sequence`, so two requests never compare further.

    Removal is lazy: an entry counts only while the request is a member and its rank is the entry's.
    """

    __slots__ = ("_by_arrival", "_heap", "_members")

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._members: dict[str, Request] = {}
        self._by_arrival: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())

    def __contains__(self, request: Request) -> bool:
        return request.id in self._members

    def push(self, request: Request) -> None:
        """Queue the request at `request.rank`."""
        self._members[request.id] = request
        heappush(self._heap, (request.rank, request))
        heappush(self._by_arrival, (request.arrival_s, request.sequence, request))

    def peek(self) -> Request | None:
        """Who is next, or None. It stays queued."""
        heap, members = self._heap, self._members
        while heap:
            rank, request = heap[0]
            if members.get(request.id) is request and request.rank == rank:
                return request
            heappop(heap)
        return None

    def remove(self, request: Request) -> None:
        """Take a member out, wherever it stands."""
        del self._members[request.id]
        if len(self._heap) > 2 * len(self._members) + 64:
            self.rerank()

    def rerank(self, rank_of: Callable[[Request], tuple[float, ...]] | None = None) -> None:
        """Rebuild the order, with new ranks when `rank_of` is given (the policy changed). Members stay the same."""
        if rank_of is not None:
            for request in self._members.values():
                request.rank = rank_of(request)
        self._heap = [(request.rank, request) for request in self._members.values()]
        heapify(self._heap)
        self._by_arrival = [(r.arrival_s, r.sequence, r) for r in self._members.values()]
        heapify(self._by_arrival)

    def oldest_arrival_s(self) -> float | None:
        """Arrival of the member that has been here longest, or None."""
        heap, members = self._by_arrival, self._members
        while heap:
            arrival_s, _, request = heap[0]
            if members.get(request.id) is request:
                return arrival_s
            heappop(heap)
        return None


@dataclass(slots=True)
class _Group:
    leader: Request
    members: set[str]
    is_open: bool = False  # the leader has published its prefix
    held_back: dict[str, Request] = field(default_factory=dict)


class SiblingGroups:
    """Siblings of one n > 1 request: all but a leader are held back until the leader has published the shared prompt.

    Otherwise n identical prompts admitted in one step would each be computed. When the leader ends before it published,
    the next sibling leads.
    """

    __slots__ = ("_groups", "_num_held_back")

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._num_held_back = 0

    @property
    def num_held_back(self) -> int:
        """How many siblings wait for their leader."""
        return self._num_held_back

    def held_back(self) -> Iterator[Request]:
        """All of them."""
        for group in self._groups.values():
            yield from group.held_back.values()

    def join(self, request: Request) -> bool:
        """Enter the request's group; whether it is held back."""
        assert request.group is not None
        group = self._groups.get(request.group)
        if group is None:
            self._groups[request.group] = _Group(leader=request, members={request.id})
            return False
        group.members.add(request.id)
        if group.is_open:
            return False
        group.held_back[request.id] = request
        self._num_held_back += 1
        return True

    def published(self, request: Request, num_blocks: int) -> list[Request]:
        """The request has `num_blocks` leading blocks published or all it can; returns siblings to be queued now."""
        group = self._groups.get(request.group) if request.group is not None else None
        if group is None or group.is_open or group.leader is not request:
            return []
        if request.num_published < num_blocks:
            return []
        group.is_open = True
        return self._release(group)

    def leave(self, request: Request) -> list[Request]:
        """The request has ended; returns siblings to be queued now."""
        group = self._groups.get(request.group) if request.group is not None else None
        if group is None or request.group is None or request.id not in group.members:
            return []
        group.members.remove(request.id)
        if group.held_back.pop(request.id, None) is not None:
            self._num_held_back -= 1
        if not group.members:
            del self._groups[request.group]
            return []
        if group.leader is request and not group.is_open:
            heir = next(iter(group.held_back.values()))
            del group.held_back[heir.id]
            self._num_held_back -= 1
            group.leader = heir
            return [heir]
        return []

    def _release(self, group: _Group) -> list[Request]:
        released = list(group.held_back.values())
        group.held_back.clear()
        self._num_held_back -= len(released)
        return released
