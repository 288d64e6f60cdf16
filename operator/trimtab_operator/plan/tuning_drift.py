"""spec.tuning.drift: has the service missed its targets long enough for a tuning run, and which run is made for it? Pure.

(About objects that differ from what is wanted: `plan.drift`.) Used by `plan.cluster`; `cluster.reconcile` creates the run.

**How long.** A row begins when SLOMet turns False, at its lastTransitionTime, and must last `drift.windows` times `slo.window`.

**Unknown within a row.** A verdict speaks of the whole window before it. So when nothing was known for no longer than a window and
the next verdict is False again, that verdict covers the gap, and the row goes on: a Prometheus or an operator that restarts delays no
run. After a longer gap there is time of which nobody knows, and the row begins anew. True ends a row at once. While SLOMet is Unknown
no run is made. A row that began is kept in `status.tuning.drift`, since lastTransitionTime does not survive a gap.

**One run a row.** Its name is made of the row's beginning, so that two operators, or one that dies between two writes, make the same;
and the status keeps it, so that a run that a person deletes is not made again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trimtab_operator import names
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.api.status import DriftStatus, ServiceStatus
from trimtab_operator.plan import made_runs
from trimtab_operator.plan.live import Switch, switch
from trimtab_operator.plan.objects import Manifest
from trimtab_operator.plan.pods import rfc3339, unix
from trimtab_operator.plan.runs import FINISHED, created_s
from trimtab_operator.plan.slo import NO_PROMETHEUS, Attainment

COOL_DOWN_S = 3600.0  # after the end of the last drift run


@dataclass(frozen=True, slots=True)
class DriftVerdict:
    """Condition DriftDetected (`met` None: Unknown), what the status keeps, and the run to make now."""

    met: bool | None
    reason: str
    message: str
    kept: DriftStatus | None = None
    create: Manifest | None = None
    look_again_s: float | None = None


def verdict(
    service: InferenceService,
    previous: ServiceStatus,
    slo: Attainment,
    runs: Iterable[TuningRun],
    fleet: Switch,
    now: float,
) -> DriftVerdict | None:
    """What is so now; None where drift is not enabled."""
    drift, window_s = service.spec.tuning.drift, service.spec.slo.window_s
    if not drift.enabled:
        return None
    if slo == NO_PROMETHEUS:
        return DriftVerdict(None, slo.reason, slo.message)
    began = row(previous, slo, window_s, now)
    if began is None:
        met = None if slo.verdict == "Unknown" else False
        return DriftVerdict(met, slo.reason, slo.message)
    since, name = rfc3339(began), names.drift_run(service.name, began)
    listed = [run for run in runs if not run.deleting]
    missed = f"targets are missed since {since}"
    known = previous.tuning.drift
    if (known is not None and known.run == name) or any(run.name == name for run in listed):
        kept = DriftStatus(since, name)
        return DriftVerdict(True, names.RUN_CREATED, f"{missed}: TuningRun {name} was made for it", kept)
    due, kept = began + drift.windows * window_s, DriftStatus(since)
    if slo.verdict == "Unknown":
        return DriftVerdict(None, slo.reason, f"{missed}, and now nothing is known", kept)
    if now < due:
        message = f"{missed}; a TuningRun is made when that has lasted until {rfc3339(due)}"
        return DriftVerdict(False, names.TARGETS_MISSED, message, kept, look_again_s=due)
    halt = switch(service.metadata.annotations, fleet)
    if halt.state != "active":
        reason = names.TUNING_PAUSED if halt.state == "paused" else names.TUNING_REVERTED
        return DriftVerdict(True, reason, f"{missed}; {halt.by} is {halt.state}, so no run is made", kept)
    busy = sorted(run.name for run in listed if run.status.phase not in FINISHED)
    if busy:
        message = f"{missed}; a run is made once TuningRun {busy[0]} is over"
        return DriftVerdict(True, names.WAITING_FOR_RUN, message, kept)
    cool_s = max(
        (min(_ended_s(r), now) + COOL_DOWN_S for r in listed if made_runs.origin(r) == made_runs.DRIFT),
        default=0.0,
    )
    if now < cool_s:
        message = f"{missed}; a run is made after {rfc3339(cool_s)}, an hour after the last drift run ended"
        return DriftVerdict(True, names.COOLING_DOWN, message, kept, look_again_s=cool_s)
    made = DriftStatus(since, name)
    message = f"{missed}: TuningRun {name} was made for it"
    return DriftVerdict(True, names.RUN_CREATED, message, made, _run(service, name))


def row(previous: ServiceStatus, slo: Attainment, window_s: float, now: float) -> float | None:
    """Since when (Unix) targets are missed in a row, None when they are not; see the module."""
    was, known = previous.condition(names.SLO_MET), previous.tuning.drift
    changed = now if was is None else min(unix(was.last_transition_time) or now, now)
    began = None if known is None else unix(known.since) or None
    if began is None and was is not None and was.status == "False":
        began = changed
    if was is None or was.status == "True":
        began = None  # nobody has judged, or the last word was a good one
    if slo.verdict == "Met":
        return None
    in_the_dark_s = now - changed if was is not None and was.status == "Unknown" else 0.0
    if in_the_dark_s > window_s:
        began = None
    if slo.verdict == "Unknown" or (began is not None and began <= now):
        return began
    return float(int(now))


def failed(found: DriftVerdict, reason: str, message: str) -> DriftVerdict:
    """The same when the API server did not take the run."""
    kept = None if found.kept is None else DriftStatus(found.kept.since)
    return DriftVerdict(True, reason, f"the TuningRun was not made: {message}", kept)


def _ended_s(run: TuningRun) -> float:
    """When it came to its end, Unix; of one that is not over, when it last changed."""
    return max(created_s(run), *(unix(c.last_transition_time) for c in run.status.conditions), 0.0)


def _run(service: InferenceService, name: str) -> Manifest:
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": names.SERVICE_KIND,
        "name": service.name,
        "uid": service.metadata.uid,
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.RUN_KIND,
        "metadata": {
            "name": name,
            "namespace": service.namespace,
            "labels": {names.LABEL_SERVICE: service.name, names.LABEL_ORIGIN: made_runs.DRIFT},
            "ownerReferences": [owner],
        },
        "spec": {"service": service.name, "evaluator": made_runs.evaluator(service)},
    }
