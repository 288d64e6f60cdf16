"""The phases a server goes through, and which of them take requests. Pure.

loading → ready → leaving → refusing → stopped, and dead from everywhere. Leaving: `/ready` says no, so that load
balancers look elsewhere, while requests are still served. Refusing: new ones get 503, what runs finishes. A hold (a lease that
the operator renews while nobody else is ready) makes leaving last longer, with `/ready` saying yes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

from trimtab_engine.sizes import size_text


class Phase(StrEnum):
    """Where the server stands; see the module."""

    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"
    REFUSING = "refusing"
    STOPPED = "stopped"
    DEAD = "dead"


_ORDER = tuple(Phase)
LINGER_S = 1.0  # without a request: then endpoints have forgotten us


class Lifecycle:
    """The current phase with its reason and start-up progress. Phases only move forward."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._leaving_since_s = 0.0
        self._hold_until_s = 0.0
        self._refusing_since_s = 0.0
        self._refused_s = 0.0  # the last time
        self.phase = Phase.LOADING
        self.loaded = False
        self.reason: str | None = None  # of DEAD
        self.stage = "start"  # of LOADING: start | import | download | convert | load | warm | text
        self.fraction = 0.0
        self.total_bytes: int | None = None  # of a download
        self.waiting_for: str | None = None  # what holds it up

    def advance(self, phase: Phase, reason: str | None = None) -> bool:
        """Move forward to `phase`; False (and nothing changed) when it is not ahead."""
        if _ORDER.index(phase) <= _ORDER.index(self.phase):
            return False
        if phase is Phase.READY:
            self.loaded = True
        if phase is Phase.LEAVING:
            self._leaving_since_s = self._now()
        if phase is Phase.REFUSING:
            self._refusing_since_s = self._now()
        self.phase = phase
        self.reason = reason
        return True

    def leave(self) -> bool:
        """Turn `/ready` off while requests are still served; False when that has begun before."""
        return self.advance(Phase.LEAVING)

    def hold(self, duration_s: float) -> bool:
        """Go on serving for so long although it is to leave; 0 ends an earlier hold. False when requests are refused already."""
        if _ORDER.index(self.phase) >= _ORDER.index(Phase.REFUSING):
            return False
        end_s = self._now() + duration_s
        self._hold_until_s = end_s if duration_s > 0 else min(self._hold_until_s, end_s)
        return True

    @property
    def held(self) -> bool:
        """Whether leaving is put off just now."""
        return self.phase is Phase.LEAVING and self._now() < self._hold_until_s

    def leaves_for_s(self, leaving_time_s: float) -> float:
        """How long new requests are still served, if nothing is held further: `leaving_time_s` with `/ready` saying no."""
        return max(self._leaving_since_s, self._hold_until_s) + leaving_time_s - self._now()

    def refused(self) -> None:
        """Note that somebody came and was refused."""
        self._refused_s = self._now()

    def lingers_for_s(self, leaving_time_s: float) -> float:
        """How long to stay when nothing runs any more: while somebody is still sent here, a 503 is better than a door that closes
        in the middle of a request. No longer than `leaving_time_s` after the first refusal."""
        nobody_since_s = max(self._refusing_since_s, self._refused_s)
        return min(self._refusing_since_s + leaving_time_s, nobody_since_s + LINGER_S) - self._now()

    def progress(
        self,
        stage: str,
        fraction: float,
        total_bytes: int | None = None,
        waiting_for: str | None = None,
    ) -> None:
        """Note how far loading is."""
        self.stage, self.fraction = stage, fraction
        self.total_bytes, self.waiting_for = total_bytes or None, waiting_for

    @property
    def ready(self) -> bool:
        """Whether load balancers shall send traffic here."""
        return self.phase is Phase.READY or self.held

    @property
    def takes_requests(self) -> bool:
        """Whether a request that arrives now is served."""
        return self.loaded and self.phase in (Phase.READY, Phase.LEAVING)

    @property
    def going_away(self) -> bool:
        """Whether clients should open their next connection elsewhere."""
        return self.phase in (Phase.LEAVING, Phase.REFUSING, Phase.STOPPED)

    def to_json(self) -> dict[str, object]:
        """Body of `/ready`."""
        body: dict[str, object] = {"ready": self.ready, "phase": self.phase.value}
        if self.phase is Phase.LOADING:
            body |= {"stage": self.stage, "fraction": round(self.fraction, 3)}
            if self.total_bytes is not None:
                done = (
                    f"{size_text(round(self.fraction * self.total_bytes))} of {size_text(self.total_bytes)}"
                )
                body |= {"total_bytes": self.total_bytes, "detail": f"{self.fraction:.0%} ({done})"}
            if self.waiting_for is not None:
                body["waiting_for"] = self.waiting_for
        if self.held:
            body["held"] = True
        if self.reason is not None:
            body["reason"] = self.reason
        return body
