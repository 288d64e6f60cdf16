"""When a simulation may end early: as soon as it is certain that a capacity rule is broken. Exact, never a guess.

Sarathi's rule allows a share of late gaps and a median scheduling delay. Both totals are known before the first event (the
trace says how many tokens come), so an overloaded run need not be simulated to its end. Used by `replica.py`, `fleet.py`
and `benchmarks/capacity.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class StopRule:
    """Counts gaps longer than `gap_s` and scheduling delays longer than `delay_s`; `broken` once either count is too high."""

    gap_s: float
    late_gaps_allowed: int
    delay_s: float
    late_starts_allowed: int
    late_gaps: int = 0
    late_starts: int = 0
    _started: int = field(default=0, repr=False)
    _due: int = field(default=0, repr=False)  # arrived so long ago that a start now would be late

    def started(self, arrival_s: float, now: float) -> None:
        """A request was scheduled for the first time."""
        self._started += 1
        if now - arrival_s > self.delay_s:
            self.late_starts += 1

    def arrived(self, arrivals_s: Sequence[float], now: float) -> None:
        """Look at who has been waiting too long; `arrivals_s` are all of the trace's, in order."""
        self._due = bisect_left(arrivals_s, now - self.delay_s)

    @property
    def broken(self) -> bool:
        """Whether the rule cannot be kept any more."""
        # Whoever was due and has not started is late for certain. Starts of later arrivals are counted as if they were
        # among them, so this is a lower bound under any policy. A late start is no longer overdue: it counts once.
        overdue = max(0, self._due - self._started)
        return (
            self.late_gaps > self.late_gaps_allowed or self.late_starts + overdue > self.late_starts_allowed
        )
