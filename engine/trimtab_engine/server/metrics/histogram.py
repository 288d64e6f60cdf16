"""A histogram that is cheap to feed: bisection over constant bounds, no locks, no label lookups.

`prometheus_client.Histogram` scans its bounds one by one, which at 121 bounds and 256 tokens a step would be visible
in the very latency that it measures. Rendering still goes through `prometheus_client`. Single-threaded by contract.
"""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Counts per bound (`le`, inclusive), plus sum; values in the family's base unit."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Book `value` `times` times; a value on a bound belongs to that bound, as in Prometheus."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """(`le`, cumulative count) pairs ending with +Inf, as `HistogramMetricFamily` wants them."""
        pairs: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            pairs.append(("+Inf" if bound == float("inf") else repr(bound), float(running)))
        return pairs
