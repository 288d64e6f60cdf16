"""Samples of many targets at one moment, and windows of them: increases, gauges, histograms.

Filled by `scrape` and `promapi`, read by `reading`. Pure: no clock, no network. A counter series that was absent counts
as zero (a series starts at 0 and is read as a total), a counter that fell began again at zero, and a process that
restarted is remembered: whoever reads the window decides that it is void.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trimtab_tuner.metrics.exposition import Labels, Series

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class TargetSample:
    """What one target exported at one moment. Times are Unix seconds; `process_start_s` None: it exports none."""

    target: str
    taken_s: float
    process_start_s: float | None
    series: Series


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One round over all targets. `failures` are (target, cause) pairs of those that gave no sample."""

    taken_s: float
    samples: tuple[TargetSample, ...]
    failures: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Histogram:
    """Increase of a classic histogram: `bounds` ascending with +Inf last, `cumulative` counts at each bound."""

    bounds: tuple[float, ...]
    cumulative: tuple[float, ...]
    total: float  # sum of observed values

    @property
    def count(self) -> float:
        """Observations in the window."""
        return self.cumulative[-1] if self.cumulative else 0.0

    def mean(self) -> float | None:
        """Mean of the observations, exact; None without any."""
        return self.total / self.count if self.count > 0 else None

    def share_above(self, bound: float) -> float | None:
        """Share of observations above `bound`, exact where it is a bucket bound, else from the next lower bound."""
        if self.count <= 0:
            return None
        index = bisect.bisect_right(self.bounds, bound * (1 + 1e-9)) - 1
        below = self.cumulative[index] if index >= 0 else 0.0
        return 1.0 - below / self.count

    def quantile(self, q: float) -> float | None:
        """Prometheus' `histogram_quantile`: linear inside a bucket, the last finite bound beyond it. For display only."""
        if self.count <= 0:
            return None
        rank = q * self.count
        index = next(i for i, c in enumerate(self.cumulative) if c >= rank - 1e-9)
        if math.isinf(self.bounds[index]):
            return self.bounds[index - 1] if index > 0 else None
        low = self.bounds[index - 1] if index > 0 else 0.0
        before = self.cumulative[index - 1] if index > 0 else 0.0
        inside = self.cumulative[index] - before
        if inside <= 0:
            return self.bounds[index]
        return low + (self.bounds[index] - low) * (rank - before) / inside


class Window:
    """A run of snapshots in time order; the first is the start, the last the end."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self.snapshots = tuple(snapshots)

    @property
    def start_s(self) -> float:
        """Unix time of the first snapshot."""
        return self.snapshots[0].taken_s

    @property
    def end_s(self) -> float:
        """Unix time of the last snapshot."""
        return self.snapshots[-1].taken_s

    @property
    def targets(self) -> frozenset[str]:
        """Every target that gave at least one sample."""
        return frozenset(sample.target for snapshot in self.snapshots for sample in snapshot.samples)

    def until(self, end_s: float) -> Window:
        """The snapshots taken no later than `end_s`, the first one always."""
        kept = [s for s in self.snapshots if s.taken_s <= end_s + 1e-9]
        return Window(kept or self.snapshots[:1])

    def since(self, start_s: float) -> Window:
        """From the last snapshot taken no later than `start_s` on."""
        index = max((i for i, s in enumerate(self.snapshots) if s.taken_s <= start_s + 1e-9), default=0)
        return Window(self.snapshots[index:])

    def only(self, targets: frozenset[str]) -> Window:
        """The samples of these targets alone."""
        return Window(
            [
                dataclasses.replace(s, samples=tuple(x for x in s.samples if x.target in targets))
                for s in self.snapshots
            ]
        )

    def restarts(self) -> tuple[str, ...]:
        """Targets whose process started anew inside the window."""
        starts: dict[str, float] = {}
        found: list[str] = []
        for sample in self._samples():
            if sample.process_start_s is None:
                continue
            before = starts.get(sample.target)
            # Prometheus stores the start time as written; clocks that are read once never drift.
            if (
                before is not None
                and abs(before - sample.process_start_s) > 0.5
                and sample.target not in found
            ):
                found.append(sample.target)
            starts[sample.target] = sample.process_start_s
        return tuple(found)

    def increase(self, name: str, **where: str) -> float | None:
        """Sum over targets and matching series of what a counter gained; None when no such metric was seen at all."""
        gains = self._gains(name, where, lambda _: "")
        return None if gains is None else sum(gains.values())

    def increase_by(self, name: str, *labels: str, **where: str) -> dict[tuple[str, ...], float]:
        """`increase` apart by the values of `labels` (missing label: empty string)."""

        def key(pairs: Labels) -> tuple[str, ...]:
            found = dict(pairs)
            return tuple(found.get(label, "") for label in labels)

        return self._gains(name, where, key) or {}

    def histogram(self, name: str, **where: str) -> Histogram | None:
        """Increase of a histogram, summed over targets and matching series; None when it was not seen at all."""
        buckets = self._gains(name + "_bucket", where, lambda pairs: float(dict(pairs).get("le", "nan")))
        if buckets is None:
            return None
        bounds = tuple(sorted(b for b in buckets if not math.isnan(b)))
        total = self.increase(name + "_sum", **where)
        return Histogram(bounds, tuple(buckets[b] for b in bounds), total or 0.0)

    def gauge(self, name: str, **where: str) -> tuple[float, ...]:
        """A gauge's values, one per snapshot that has it: summed over series of a target, largest over targets."""
        found: list[float] = []
        for snapshot in self.snapshots:
            values = [
                sum(value for labels, value in sample.series[name].items() if _matches(labels, where))
                for sample in snapshot.samples
                if name in sample.series
            ]
            if values:
                found.append(math.nan if any(map(math.isnan, values)) else max(values))
        return tuple(found)

    def _samples(self) -> Iterator[TargetSample]:
        for snapshot in self.snapshots:
            yield from snapshot.samples

    def _gains(
        self, name: str, where: Mapping[str, str], key: Callable[[Labels], K]
    ) -> dict[K, float] | None:
        gains: dict[K, float] = {}
        last: dict[str, Mapping[Labels, float]] = {}
        starts: dict[str, float | None] = {}
        seen = False
        for sample in self._samples():
            series = sample.series.get(name, {})
            seen = seen or name in sample.series
            before = last.get(sample.target)
            restarted = before is not None and starts[sample.target] != sample.process_start_s
            for labels, value in series.items():
                if not _matches(labels, where):
                    continue
                if before is None:
                    gains.setdefault(key(labels), 0.0)  # the first sample is where counting starts
                    continue
                base = 0.0 if restarted else before.get(labels, 0.0)
                gained = value if value < base else value - base
                gains[key(labels)] = gains.get(key(labels), 0.0) + gained
            last[sample.target] = series
            starts[sample.target] = sample.process_start_s
        return gains if seen else None


def nearest_before(snapshots: Iterable[Snapshot], moment_s: float) -> Snapshot | None:
    """The last snapshot taken no later than `moment_s`."""
    best: Snapshot | None = None
    for snapshot in snapshots:
        if snapshot.taken_s <= moment_s + 1e-9:
            best = snapshot
    return best


def _matches(labels: Labels, where: Mapping[str, str]) -> bool:
    if not where:
        return True
    found = dict(labels)
    return all(found.get(label) == value for label, value in where.items())
