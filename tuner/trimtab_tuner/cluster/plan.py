"""What a run needs before it can measure, and what an evaluator answers with: `Work` in, `Plan` out.

`worker` makes the Work, `evaluators` picks who makes the Plan (by spec.evaluator and spec.workload.type). A factory reads what it
needs at once (workload records, a trace) and raises InputError or ServerError with a reason that a person can act on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from trimtab_engine.core.live import LiveConfig
from trimtab_tuner.cluster.kube import Kube
from trimtab_tuner.cluster.objects import Run, Service
from trimtab_tuner.evaluate import Evaluator
from trimtab_tuner.guardrails import Limits
from trimtab_tuner.run import RunOptions
from trimtab_tuner.target import ServiceTarget


@dataclass(frozen=True, slots=True)
class Engines:
    """Those that a Shadow run has of its own: the address of their Service, and how many there are."""

    url: str
    replicas: int


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that is known when a worker begins."""

    namespace: str
    run: Run
    service: Service
    incumbent: LiveConfig
    kube: Kube
    client: httpx.AsyncClient  # for engines and Prometheus; no base URL
    target: ServiceTarget  # puts candidates in force through the run's status
    paused: Callable[[], Awaitable[str | None]]  # why a candidate may not be in force now
    time_left_s: float
    prometheus: str | None = None
    trace: Path | None = None
    url: str | None = None  # the service's address in the cluster, where it is known
    tokens: Mapping[str, str] = field(default_factory=dict)  # read tokens by pod UID
    api_key: str | None = None  # of whom a replay asks: the service, or the run's own engines
    engines: Engines | None = None  # of a Shadow run
    say: Callable[[str, str], None] = lambda label, text: None  # one line to the log


@dataclass(frozen=True, slots=True)
class Plan:
    """How candidates are measured. `touches_engines` False: nothing is put in force, so neither mode nor a pause forbids it."""

    evaluator: Evaluator
    limits: Limits
    options: RunOptions
    touches_engines: bool = True
    confirmer: Evaluator | None = None  # these three: see `run.TuningRun`
    doubt: Callable[[LiveConfig], Awaitable[str | None]] | None = None
    caveat: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)  # for the log: what is measured with
    waited_s: Callable[[], float] = lambda: 0.0  # how long measurements have waited for something to measure


Factory = Callable[[Work], Awaitable[Plan]]
