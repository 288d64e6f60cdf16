"""Live runs in a cluster: candidates as leases on running engines, on real traffic as it comes, or on a trace replayed on top.

Called by `evaluators`. Engines' series are per generation, so in mode Canary the pods that try a candidate tell themselves apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab_tuner import trace as traces
from trimtab_tuner.cluster import metrics
from trimtab_tuner.cluster.metrics import Engines, PodFinder
from trimtab_tuner.cluster.plan import Plan, Work
from trimtab_tuner.errors import InputError
from trimtab_tuner.evaluate import LiveEvaluator, ObserveWorkload
from trimtab_tuner.guardrails import Limits
from trimtab_tuner.metrics.names import TRIMTAB
from trimtab_tuner.replay import ReplayOptions
from trimtab_tuner.run import RunOptions
from trimtab_tuner.units import span_text
from trimtab_tuner.workload import ReplayWorkload

LEASE_S = 30.0
WASHOUT_S, WASHOUT_SHARE = (
    30.0,
    0.25,
)  # dropped after each change: this long, in short slices this share of one
# Five pairs with one clear sign reach an e-value of 20; one is to spare, more where there is time.
LEAST_PAIRS, PAIRS = 6, 8
LEAST_SLICE_S = 1.0
MIN_REQUESTS_TRACE, MIN_REQUESTS = 40, 300
FIRST_INTERVAL_S, LAST_INTERVAL_S, SAMPLES_A_SLICE = 0.25, 5.0, 60


async def make(work: Work) -> Plan:
    """The plan of a Live run. Raises InputError where spec leaves no room for one."""
    find = PodFinder(work.kube, work.namespace, work.service.name)
    if work.run.workload == "Trace":
        return await _on_trace(work, find)
    return await _on_real_traffic(work, find)


def options(work: Work, pairs: int = PAIRS) -> RunOptions:
    """How far to search: `maxTrials` candidates, besides the incumbent and the confirmation."""
    return RunOptions(
        max_trials=work.run.max_trials + 2,
        pairs=pairs,
        time_limit_s=work.time_left_s,
        count_refused=True,
    )


def limits(min_requests: int) -> Limits:
    """Guardrails on real traffic. No gate on the error budget: a run is wanted most when it is spent, by drift for one; what
    makes it worse is gone within seconds."""
    return Limits(min_requests=min_requests, error_budget_left=0.0)


def slices(work: Work) -> tuple[float, int]:
    """(length of a slice of real traffic in seconds, pairs of slices to confirm with): what fits into the time limit.

    spec.workload.slice, or else slo.window, or less where the time limit is short. Raises InputError when a slice that was asked
    for does not fit.
    """
    wanted_s = work.run.slice_s or work.service.window_s
    for pairs in range(PAIRS, LEAST_PAIRS - 1, -1):
        if _takes_s(wanted_s, pairs) <= work.time_left_s:
            return wanted_s, pairs
    fits_s = work.time_left_s / (_measurements(LEAST_PAIRS) * (1 + WASHOUT_SHARE))
    if work.run.slice_s is not None or fits_s < LEAST_SLICE_S:
        takes_s = _takes_s(max(wanted_s if work.run.slice_s else 0, LEAST_SLICE_S), LEAST_PAIRS)
        least = f"at least {span_text(takes_s)} for slices of {span_text(work.run.slice_s or LEAST_SLICE_S)}"
        if work.run.slice_s is not None and fits_s >= LEAST_SLICE_S:
            least += f"; slices of {int(fits_s)}s would fit"
        raise InputError("spec.timeLimit", f"{span_text(work.time_left_s)} left", least)
    return fits_s, LEAST_PAIRS


def washout_s(slice_s: float) -> float:
    """What is dropped after a change, before a slice."""
    return min(WASHOUT_S, WASHOUT_SHARE * slice_s)


def _measurements(pairs: int) -> int:
    """The incumbent, one candidate, and the pairs."""
    return 2 + 2 * pairs


def _takes_s(slice_s: float, pairs: int) -> float:
    return _measurements(pairs) * (slice_s + washout_s(slice_s))


async def source(work: Work, find: PodFinder, span_s: float) -> Engines:
    """The engines' numbers, about SAMPLES_A_SLICE times in `span_s` where a worker scrapes itself."""
    if work.prometheus is not None:
        return await metrics.prometheus(work.client, work.prometheus, find, work.namespace)
    interval_s = min(LAST_INTERVAL_S, max(FIRST_INTERVAL_S, span_s / SAMPLES_A_SLICE))
    return metrics.scraping(work.client, find, interval_s)


async def _on_real_traffic(work: Work, find: PodFinder) -> Plan:
    slice_s, pairs = slices(work)
    engines = await source(work, find, slice_s)
    slice_s = max(slice_s, 4 * engines.interval_s)  # fewer samples than that say nothing of a slice
    evaluator = LiveEvaluator(
        work.target,
        engines,
        ObserveWorkload(slice_s),
        names=TRIMTAB,
        limits=limits(MIN_REQUESTS),
        lease_s=LEASE_S,
        washout_s=washout_s(slice_s),
        min_requests=1,
        paused=work.paused,
        canary=work.service.mode == "Canary",
    )
    facts = {
        "workload": "real traffic",
        "slice_s": round(slice_s, 1),
        "pairs": pairs,
        **_facts(work, engines),
    }
    return Plan(evaluator, limits(MIN_REQUESTS), options(work, pairs), facts=facts)


async def _on_trace(work: Work, find: PodFinder) -> Plan:
    if work.trace is None:
        raise InputError("--trace", None, "the mounted trace of spec.workload.traceRef")
    trace = traces.load(work.trace)
    workload = ReplayWorkload(
        trace,
        work.url or f"http://{work.service.name}.{work.namespace}.svc:{work.service.port}",
        slo=work.incumbent.slo,
        options=ReplayOptions(api_key=work.api_key),
    )
    engines = await source(work, find, workload.span_s)
    evaluator = LiveEvaluator(
        work.target,
        engines,
        workload,
        names=TRIMTAB,
        limits=limits(MIN_REQUESTS_TRACE),
        lease_s=LEASE_S,
        washout_s=washout_s(workload.span_s),
        min_requests=MIN_REQUESTS_TRACE,
        paused=work.paused,
        canary=work.service.mode == "Canary",
    )
    facts = {"workload": "trace", "requests": workload.num_requests, "trace_hash": workload.trace_hash,
             **_facts(work, engines)}  # fmt: skip
    return Plan(evaluator, limits(MIN_REQUESTS_TRACE), options(work), facts=facts)


def _facts(work: Work, engines: Engines) -> Mapping[str, object]:
    return {
        "metrics": "scraping" if work.prometheus is None else "prometheus",
        "interval_s": round(engines.interval_s, 2),
    }
