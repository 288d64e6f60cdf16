"""The order of simulated events. Used by `fleet.py` only; knows times and kinds, not what happens.

Events at one instant are handled in the order of their kind, then of their number (replica or request):

    STEP_END    a step is committed first: what it frees and whom it ends, a router sees
    ARRIVAL     then requests arrive, in trace order: those who come at the very moment a step begins are part of it
    STEP_START  then replicas plan their next step, as the engine drains its messages before it schedules

Two events never compare equal: a replica has at most one start and one end pending, a request arrives once.
"""

from __future__ import annotations

from enum import IntEnum
from heapq import heappop, heappush


class Kind(IntEnum):
    """Kinds of events; the value is the order at one instant."""

    STEP_END = 0
    ARRIVAL = 1
    STEP_START = 2


Event = tuple[float, Kind, int]


class EventQueue:
    """Earliest event first. Time never goes back: pushing into the past is a bug of the caller."""

    __slots__ = ("_heap", "now")

    def __init__(self) -> None:
        self._heap: list[Event] = []
        self.now = float("-inf")

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, at_s: float, kind: Kind, number: int) -> None:
        """Plan an event for `at_s` seconds; `number` is the replica's or the request's."""
        assert at_s >= self.now, f"{kind.name} at {at_s} s is before now, {self.now} s"
        heappush(self._heap, (at_s, kind, number))

    def pop(self) -> Event:
        """Take the next event; `now` moves to it."""
        event = heappop(self._heap)
        self.now = event[0]
        return event
