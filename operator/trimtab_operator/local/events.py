"""What happened, newest last: the local counterpart of Kubernetes events.

Written by `reconcile` and `control`, shown by `view` and in `/status`. Equal events in a row are counted, not repeated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_KEPT = 200


@dataclass(slots=True)
class Event:
    """One thing that happened; `type` is Normal or Warning, `reason` one CamelCase word."""

    type: str
    reason: str
    message: str
    time: float  # Unix, of the last occurrence
    count: int = 1

    def to_json(self) -> dict[str, object]:
        """Plain JSON form."""
        return {
            "type": self.type,
            "reason": self.reason,
            "message": self.message,
            "time": self.time,
            "count": self.count,
        }


class EventLog:
    """The last events. `listener` hears each occurrence that is news."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self.listener: Callable[[Event], None] | None = None

    def normal(self, reason: str, message: str) -> None:
        """Record something expected."""
        self._add("Normal", reason, message)

    def warning(self, reason: str, message: str) -> None:
        """Record something a person should look at."""
        self._add("Warning", reason, message)

    def last(self, count: int) -> list[Event]:
        """The newest `count`, oldest first."""
        return list(self._events)[-count:]

    def _add(self, kind: str, reason: str, message: str) -> None:
        newest = self._events[-1] if self._events else None
        if newest is not None and (newest.type, newest.reason, newest.message) == (kind, reason, message):
            newest.count += 1
            newest.time = time.time()
            return
        event = Event(kind, reason, message, time.time())
        self._events.append(event)
        if self.listener is not None:
            self.listener(event)
