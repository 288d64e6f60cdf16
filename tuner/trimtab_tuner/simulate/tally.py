"""What a simulated engine's steps add up to: the sums that a real one exports and a diagnosis reads.

Filled by `replica.py` step by step, read by `measured.py`. Gauges are weighted by the time for which they held, where a scrape would
take samples. Knows nothing of requests' latencies: results have those.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab_engine.core.stats import SchedulerStats
from trimtab_engine.core.step import Step

KV_PARTS = 100


@dataclass(slots=True)
class Tally:
    """Of one replica, over the steps that began at `from_s` or later."""

    from_s: float = 0.0
    decode_steps: int = 0
    decode_s: float = 0.0
    mixed_steps: int = 0  # with prompt rows
    mixed_s: float = 0.0
    tokens: int = 0
    over_half_budget: int = 0  # steps
    running: float = 0.0  # requests × seconds, as are the next two
    waiting_capacity: float = 0.0
    waiting_deferred: float = 0.0
    held_back_s: float = 0.0  # with at least one waiting for capacity
    _kv_s: list[float] = field(default_factory=lambda: [0.0] * (KV_PARTS + 1), repr=False)

    def step(self, step: Step, stats: SchedulerStats, now: float, seconds: float) -> None:
        """A step was planned; `stats` are the scheduler's right after."""
        if now < self.from_s:
            return
        rows = len(step.requests)
        if rows > step.num_decodes:
            self.mixed_steps += 1
            self.mixed_s += seconds
        else:
            self.decode_steps += 1
            self.decode_s += seconds
        self.tokens += step.num_tokens
        self.over_half_budget += 2 * step.num_tokens > step.budget
        self.running += rows * seconds
        self.waiting_capacity += stats.waiting_capacity * seconds
        self.waiting_deferred += stats.waiting_deferred * seconds
        self.held_back_s += seconds if stats.waiting_capacity else 0.0
        self._kv_s[round(stats.kv_used_fraction * KV_PARTS)] += seconds

    def decodes(
        self, rows: int, budget: int, kv_used_fraction: float, now: float, count: int, seconds: float
    ) -> None:
        """`count` steps of nothing but `rows` decodes, with nobody waiting, were skipped over from `now` on."""
        if now < self.from_s:
            return
        self.decode_steps += count
        self.decode_s += seconds
        self.tokens += rows * count
        self.over_half_budget += count if 2 * rows > budget else 0
        self.running += rows * seconds
        self._kv_s[round(kv_used_fraction * KV_PARTS)] += seconds

    def kv_p95(self, wall_s: float) -> float:
        """The share of KV in use that was exceeded for no more than a twentieth of `wall_s`; idle times count as 0."""
        above = 0.05 * wall_s
        for part in range(KV_PARTS, 0, -1):
            above -= self._kv_s[part]
            if above < 0:
                return part / KV_PARTS
        return 0.0
