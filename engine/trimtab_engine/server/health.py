"""Liveness as progress: an engine that has work and finishes no step is not alive, whatever its process table says.

`client` reports what happens, `/health` asks. Pure: the caller passes monotonic seconds.
"""

from __future__ import annotations


class Progress:
    """Remembers since when something is owed by the engine: a step for open requests, an answer to a message."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._owed_since_s: float | None = None

    def owes(self, now: float) -> None:
        """The engine has been given something to do (again); an older debt keeps its date."""
        if self._owed_since_s is None:
            self._owed_since_s = now

    def heard(self, now: float, still_owes: bool) -> None:
        """The engine has said something; `still_owes`: work is left after it."""
        self._owed_since_s = now if still_owes else None

    def stall(self, now: float) -> str | None:
        """What is wrong, in words, for `/health` and for the last line of the log; None while all is well."""
        stalled_s = self.stalled_for_s(now)
        if stalled_s is None:
            return None
        return f"engine stalled: it has work and has finished no step for {stalled_s:.1f} s"

    def stalled_for_s(self, now: float) -> float | None:
        """How long nothing has come, once that is longer than the stall timeout; None while all is well."""
        if self._owed_since_s is None or now - self._owed_since_s <= self._stall_timeout_s:
            return None
        return now - self._owed_since_s
