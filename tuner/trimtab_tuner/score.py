"""From a reading to what the study minimises and what it must respect. Pure.

Called by `run` for each measured config. The objective is violated verdicts per judged request; every target of every
class is a constraint, told as a violation (≤ 0: kept), as are faults, preemptions and the predicted step time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trimtab_engine.core.live import Slo
from trimtab_tuner.metrics.reading import Reading

# What a config is told as when it broke the service: worse than any measured one (two verdicts a request at most).
BROKEN = 4.0


@dataclass(frozen=True, slots=True)
class Score:
    """`objective`: smaller is better. `constraints`: name → violation, kept when ≤ 0."""

    objective: float
    constraints: Mapping[str, float]

    @property
    def feasible(self) -> bool:
        """Every constraint is kept."""
        return all(value <= 0 for value in self.constraints.values())

    def with_constraint(self, name: str, violation: float) -> Score:
        """The same with one constraint more."""
        return Score(self.objective, {**self.constraints, name: violation})


def score(reading: Reading, slo: Slo, *, step_time_ratio: float | None = None) -> Score:
    """Objective and constraints of one reading. `step_time_ratio`: predicted step time over what the targets allow."""
    constraints: dict[str, float] = {}
    for (slo_class, name), count in sorted(reading.counts.items()):
        target = slo.by_name(slo_class)
        if target is not None and count.n:
            constraints[f"{name}:{slo_class}"] = count.violated_fraction - (1 - target.objective / 100)
    constraints["faults"] = reading.fault_fraction
    constraints["preemptions"] = reading.preemptions_per_request - 0.01  # 1 % of requests already sits in p99
    if step_time_ratio is not None:
        constraints["step_time"] = step_time_ratio - 1.0
    return Score(reading.violated / max(1, reading.n), constraints)


def broken(reason: str) -> Score:
    """Score of a config whose measurement a guardrail ended: complete and far from feasible, so that it teaches."""
    return Score(BROKEN, {reason: 1.0})
