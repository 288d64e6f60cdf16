"""How many requests met and missed their targets → the verdict of condition SLOMet. Pure.

The unit is the request, as the engine books it: a request misses a target once, whoever was late. What is said is about the
window that has passed, no inference: of at least MIN_REQUESTS requests, was the share that met a target at least the objective?
Used by `cluster.slo`, which asks Prometheus for the counts, and by `plan.status`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trimtab_operator import names
from trimtab_operator.api.service import Slo

SloVerdict = Literal["Met", "Violated", "Unknown"]
MIN_REQUESTS = 20  # fewer say nothing, neither good nor bad
TARGETS = ("ttft", "itl")


@dataclass(frozen=True, slots=True)
class Attainment:
    """The verdict, and reason and message of the condition. No numbers in it: they would be a write at each look."""

    verdict: SloVerdict
    reason: str
    message: str = ""


UNASKED = Attainment("Unknown", names.NOT_ENOUGH_SAMPLES, "Prometheus has not been asked yet")
NO_PROMETHEUS = Attainment(
    "Unknown",
    names.METRICS_UNAVAILABLE,
    "no Prometheus is given (in a cluster: --prometheus-url, or prometheus.url of the chart)",
)


class Counts(NamedTuple):
    """Requests of one class and target within the window; fractions, since `increase` extrapolates."""

    met: float = 0.0
    violated: float = 0.0


def judge(slo: Slo, counts: Mapping[tuple[str, str], Counts]) -> Attainment:
    """`counts` by class and target (`ttft`, `itl`)."""
    judged, missed = 0, []
    for slo_class in slo.resolved_classes():
        for target in TARGETS:
            met, violated = counts.get((slo_class.name, target), Counts())
            if met + violated < MIN_REQUESTS:
                continue
            judged += 1
            if 100 * met / (met + violated) < slo_class.objective - 1e-9:
                missed.append(f"{target} of class {slo_class.name}")
    if missed:
        return Attainment("Violated", names.TARGETS_MISSED, ", ".join(missed))
    if judged:
        return Attainment("Met", names.TARGETS_MET)
    return Attainment(
        "Unknown", names.NOT_ENOUGH_SAMPLES, f"fewer than {MIN_REQUESTS} requests within spec.slo.window"
    )
