"""Turns a window of snapshots into one Reading of one config generation, or says why it cannot: Unknown.

Called by the evaluator, the guardrails and the diagnosis; fed by either source. Fails closed: a target that is missing,
stale, restarted or on another generation, a NaN, or too few requests make the whole reading Unknown, never a zero.
Exact numbers come from the SLO counters (per request); quantiles are for display.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab_tuner.metrics.names import Names
from trimtab_tuner.metrics.snapshot import Histogram, Window

SLOS = ("ttft", "itl")
# Finished reasons that are the server's fault. Client aborts are not: people close tabs.
FAULTS = ("error", "timeout", "server_abort")


@dataclass(frozen=True, slots=True)
class Unknown:
    """No number can be given; `reason` says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class SloCount:
    """Requests of one class judged against one target."""

    met: int
    violated: int

    @property
    def n(self) -> int:
        """Requests judged."""
        return self.met + self.violated

    @property
    def violated_fraction(self) -> float:
        """Share that violated; 0 without any request (check `n` first)."""
        return self.violated / self.n if self.n else 0.0


@dataclass(frozen=True, slots=True)
class Block:
    """One time block of a window: verdicts booked in it, over all classes."""

    violated: int  # TTFT verdicts + ITL verdicts
    n: int  # requests judged on TTFT
    tokens: float = 0.0  # generated, and
    seconds: float = 0.0  # the time that took, both 0 where nobody measured it; see `pace`


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything read from one window under one generation. Ratios are of 1, times seconds; None: not exported or no data."""

    generation: int
    start_s: float
    end_s: float
    counts: Mapping[tuple[str, str], SloCount]  # (class, slo) → count
    finished: float = 0.0
    faults: float = 0.0  # errors, timeouts, server aborts, rejections
    preemptions: float = 0.0
    generation_tokens: float = 0.0
    prompt_tokens_computed: float = 0.0
    steps: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # kind → (count, seconds)
    step_tokens: float | None = None
    schedule_s: float | None = None
    share_over_half_budget: float | None = None
    queue_mean_s: float | None = None
    prefill_mean_s: float | None = None
    decode_mean_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None
    itl_mean_s: float | None = None
    kv_p95: float | None = None
    running_mean: float | None = None
    waiting_capacity_mean: float | None = None
    waiting_capacity_share: float | None = None  # share of scrapes with at least one waiting for capacity
    waiting_deferred_mean: float | None = None
    oldest_waiting_s: float | None = None  # largest seen
    longest_gap_s: float | None = None  # largest seen
    targets: int = 1

    @property
    def wall_s(self) -> float:
        """Length of the window."""
        return self.end_s - self.start_s

    def slo(self, slo: str) -> SloCount:
        """Counts of one SLO over all classes."""
        chosen = [count for (_, name), count in self.counts.items() if name == slo]
        return SloCount(sum(c.met for c in chosen), sum(c.violated for c in chosen))

    @property
    def n(self) -> int:
        """Requests judged: the larger of both SLOs, since a request may have no gap to judge."""
        return max(self.slo(name).n for name in SLOS)

    @property
    def violated(self) -> int:
        """Violated verdicts of both SLOs (a request that breaks both counts twice)."""
        return sum(self.slo(name).violated for name in SLOS)

    @property
    def fault_fraction(self) -> float:
        """Requests that the server failed, of all that ended or were refused."""
        ended = self.finished + self.faults
        return self.faults / ended if ended else 0.0

    @property
    def preemptions_per_request(self) -> float:
        """Preemptions for each request judged."""
        return self.preemptions / max(1, self.n)


def check(window: Window, *, names: Names, generation: int | None, max_age_s: float) -> str | None:
    """Why a window cannot be read, or None. `max_age_s`: how old the newest sample may be, and the longest hole."""
    if len(window.snapshots) < 2:
        return "fewer than two samples"
    expected = window.targets
    if not expected:
        return "no target gave a sample: " + "; ".join(
            f"{t}: {why}" for t, why in window.snapshots[-1].failures
        )
    for where, snapshot in (("start", window.snapshots[0]), ("end", window.snapshots[-1])):
        missing = sorted(expected - {s.target for s in snapshot.samples})
        if missing or snapshot.failures:
            causes = "; ".join(f"{t}: {why}" for t, why in snapshot.failures)
            return f"no sample at the window's {where} from {', '.join(missing) or 'a target'}" + (
                f" ({causes})" if causes else ""
            )
        for sample in snapshot.samples:
            if snapshot.taken_s - sample.taken_s > max_age_s:
                return (
                    f"{sample.target} is stale: its sample is {snapshot.taken_s - sample.taken_s:.1f} s old"
                )
    for target in sorted(expected):
        times = [s.taken_s for snap in window.snapshots for s in snap.samples if s.target == target]
        hole = max((b - a for a, b in itertools.pairwise(times)), default=0.0)
        if hole > max(max_age_s, 0.0) and len(window.snapshots) > 2:
            return f"{target} gave no sample for {hole:.1f} s"
    if restarted := window.restarts():
        return f"{', '.join(restarted)} restarted inside the window"
    if generation is not None and names.generation is not None:
        # The first sample may come from before the change: only what follows counts.
        for snapshot in window.snapshots[1:]:
            for sample in snapshot.samples:
                for value in sample.series.get(names.generation, {}).values():
                    if value != generation:
                        return (
                            f"{sample.target} ran generation {value:g}, not {generation}, inside the window"
                        )
    return None


def running(window: Window, names: Names, generation: int) -> frozenset[str]:
    """Targets that ran this generation at some sample after the first: those that try a candidate."""
    if names.generation is None:
        return window.targets
    return frozenset(
        sample.target
        for snapshot in window.snapshots[1:]
        for sample in snapshot.samples
        if generation in sample.series.get(names.generation, {}).values()
    )


def counts(window: Window, names: Names, generation: int) -> dict[tuple[str, str], SloCount] | Unknown:
    """Requests judged in the window under one generation, by (class, slo)."""
    if names.slo_requests is None:
        return Unknown("this runtime does not count requests against SLOs")
    gained = window.increase_by(names.slo_requests, "slo_class", "slo", "outcome", generation=str(generation))
    if not gained:
        return Unknown(f"no {names.slo_requests} of generation {generation}")
    if any(math.isnan(value) for value in gained.values()):
        return Unknown(f"{names.slo_requests} is NaN")
    found: dict[tuple[str, str], SloCount] = {}
    for slo_class, slo, _ in gained:
        met = gained.get((slo_class, slo, "met"), 0.0)
        violated = gained.get((slo_class, slo, "violated"), 0.0)
        found[slo_class, slo] = SloCount(round(met), round(violated))
    return found


def blocks(window: Window, names: Names, generation: int, edges_s: Sequence[float]) -> tuple[Block, ...]:
    """Verdicts by time block; `edges_s` are Unix times, n + 1 for n blocks, read at the last sample before each.

    Verdicts before the first edge fall into the first block, those after the last edge into the last one: none is lost.
    """
    found: list[Block] = []
    for index in range(len(edges_s) - 1):
        part = window
        if index > 0:
            part = part.since(edges_s[index])
        if index < len(edges_s) - 2:
            part = part.until(edges_s[index + 1])
        counted = counts(part, names, generation)
        if isinstance(counted, Unknown):
            found.append(Block(0, 0))
            continue
        violated = sum(count.violated for count in counted.values())
        judged = sum(count.n for (_, slo), count in counted.items() if slo == "ttft")
        found.append(Block(violated, judged))
    return tuple(found)


def read(
    window: Window,
    *,
    names: Names,
    generation: int,
    min_requests: int,
    max_age_s: float,
) -> Reading | Unknown:
    """The whole reading. `min_requests`: below that many judged requests it is Unknown."""
    if reason := check(window, names=names, generation=generation, max_age_s=max_age_s):
        return Unknown(reason)
    counted = counts(window, names, generation)
    if isinstance(counted, Unknown):
        return counted
    reading = _numbers(window, names, generation, counted)
    if any(isinstance(v, float) and math.isnan(v) for v in _values(reading)):
        return Unknown("a metric is NaN")
    if reading.n < min_requests:
        return Unknown(f"only {reading.n} requests were judged, at least {min_requests} are needed")
    return reading


def _numbers(
    window: Window, names: Names, generation: int, counted: Mapping[tuple[str, str], SloCount]
) -> Reading:
    ttft, itl = window.histogram(names.ttft), window.histogram(names.itl)
    steps: dict[str, tuple[float, float]] = {}
    if names.step_duration is not None:
        for (kind,), count in window.increase_by(names.step_duration + "_count", "kind").items():
            steps[kind] = (count, window.increase(names.step_duration + "_sum", kind=kind) or 0.0)
    used = _histogram(window, names.budget_used)
    capacity = window.gauge(names.waiting_by_reason, reason="capacity")
    deferred = window.gauge(names.waiting_by_reason, reason="deferred")
    by_reason = window.increase_by(names.finished, "finished_reason")
    by_reason = {k: v for k, v in by_reason.items() if not k[0].startswith("rejected")}  # counted below
    faults = sum(by_reason.get((reason,), 0.0) for reason in FAULTS)
    return Reading(
        generation=generation,
        start_s=window.start_s,
        end_s=window.end_s,
        counts=counted,
        finished=sum(by_reason.values()) - faults,
        faults=faults + (_increase(window, names.rejections) or 0.0),
        preemptions=window.increase(names.preemptions) or 0.0,
        generation_tokens=window.increase(names.generation_tokens) or 0.0,
        prompt_tokens_computed=max(
            0.0,
            (window.increase(names.prompt_tokens) or 0.0)
            - (window.increase(names.prompt_tokens_cached) or 0.0),
        ),
        steps=steps,
        step_tokens=_increase(window, names.step_tokens and names.step_tokens + "_sum"),
        schedule_s=_increase(window, names.schedule_duration and names.schedule_duration + "_sum"),
        share_over_half_budget=used.share_above(0.5) if used else None,
        queue_mean_s=_mean(window, names.queue_time),
        prefill_mean_s=_mean(window, names.prefill_time),
        decode_mean_s=_mean(window, names.decode_time),
        ttft_p50_s=ttft.quantile(0.50) if ttft else None,
        ttft_p99_s=ttft.quantile(0.99) if ttft else None,
        itl_p50_s=itl.quantile(0.50) if itl else None,
        itl_p99_s=itl.quantile(0.99) if itl else None,
        itl_mean_s=itl.mean() if itl else None,
        kv_p95=_quantile(window.gauge(names.kv_usage), 0.95),
        running_mean=_average(window.gauge(names.running)),
        waiting_capacity_mean=_average(capacity),
        waiting_capacity_share=_average([float(value >= 1) for value in capacity]),
        waiting_deferred_mean=_average(deferred),
        oldest_waiting_s=_largest(window, names.oldest_waiting),
        longest_gap_s=_largest(window, names.longest_gap),
        targets=max(1, len(window.targets)),
    )


def _values(reading: Reading) -> list[object]:
    return [getattr(reading, name) for name in reading.__dataclass_fields__]


def _increase(window: Window, name: str | None) -> float | None:
    return None if name is None else window.increase(name)


def _histogram(window: Window, name: str | None) -> Histogram | None:
    return None if name is None else window.histogram(name)


def _mean(window: Window, name: str) -> float | None:
    count, total = window.increase(name + "_count"), window.increase(name + "_sum")
    return total / count if count and total is not None else None


def _largest(window: Window, name: str | None) -> float | None:
    values = window.gauge(name) if name is not None else ()
    return max(values, default=None) if not any(map(math.isnan, values)) else math.nan


def _average(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _quantile(values: Sequence[float], q: float) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)]
