"""What a source of metrics offers: one snapshot of all targets. `scrape` and `promapi` are the two sources."""

from __future__ import annotations

from typing import Protocol

from trimtab_tuner.metrics.snapshot import Snapshot


class MetricsSource(Protocol):
    """Gives snapshots; keeps no history (the evaluator does, so that raw samples can be stored with a trial)."""

    @property
    def interval_s(self) -> float:
        """How often a new sample can be had, in seconds."""

    async def snapshot(self, not_before_s: float | None = None) -> Snapshot:
        """The newest sample of every target, and a failure for each that gave none; never raises for one target.

        With `not_before_s` (Unix time) it waits until every sample is at least that new, or gives up and says so in
        `failures`.
        """
