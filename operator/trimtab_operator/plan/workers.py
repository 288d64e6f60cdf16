"""A run's worker as the operator sees it: whether one may be made now, how it is, and which ones have to go. Pure.

The rules that keep a run from beginning stand in `obstacle`, and there alone. Used by `plan.cluster` and, for what is to be asked for,
by `cluster.workers`; how the objects look is `worker_job`'s business, what candidates do is `runs`'.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trimtab_operator import names
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.errors import Finding
from trimtab_operator.plan import pods
from trimtab_operator.plan.live import Switch, switch
from trimtab_operator.plan.quiet_times import Quiet

Json = Mapping[str, Any]
NO_WORKER = "none"  # value of the annotation
FINISHED = ("Succeeded", "Failed", "Stopped")
#: For a worker that has written its result, to end by itself: its log is then kept.
PARTING_S = 15.0
JOB_RETRY_S = 2.0  # the Job controller has not said yet what it makes of a pod
_CANDIDATES = ("Canary", "Apply")  # modes in which running engines may get candidates
_RESOURCES = "--worker-resources (the chart's worker.resources)"
_IMAGE = "--tuner-image (the chart's images.tuner)"
#: How an event recorder marks the last of many that are alike.
_COMBINED = "(combined from similar events): "


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a run does not go on. `stalled`: a person has to act; else it goes on by itself."""

    reason: str
    message: str
    stalled: bool = False


@dataclass(frozen=True, slots=True)
class Worker:
    """A run's Job, if there is one, its pods, and what kubelet or Job controller complain of."""

    job: Json | None = None
    pods: tuple[Json, ...] = ()
    complaint: str | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """How a worker is. `failure` is what a failed one said; `look_again` asks for another look soon; `stuck`: its pod does not get to
    start, or ended and is tried again as it was, so that one with other settings may do better."""

    state: Literal["none", "starting", "running", "ended", "failed"] = "none"
    obstacle: Obstacle | None = None
    failure: str = ""
    since: str | None = None  # when it was made
    look_again: bool = False
    stuck: bool = False


def wanted(run: TuningRun) -> bool:
    """Whether the run has a worker of ours; else somebody outside writes its status."""
    return run.metadata.annotations.get(names.ANNOTATION_WORKER) != NO_WORKER


def not_allowed(service: InferenceService, run: TuningRun) -> tuple[Finding, ...]:
    """What of the service's spec rules such a run out. A run that has begun is not judged by it: its candidates are."""
    if not wanted(run) or run.status.start_time is not None or run.status.candidate is not None:
        return ()
    tuning, evaluator, found = service.spec.tuning, run.spec.evaluator, list[Finding]()
    theirs = path_in(service)
    if evaluator == "Live" and tuning.mode not in _CANDIDATES:
        found.append(Finding(f"{theirs}.mode", tuning.mode, "Canary or Apply, for a run with evaluator Live"))
    if evaluator == "Shadow":
        if tuning.mode == "Off":
            found.append(Finding(f"{theirs}.mode", "Off", "any other, for a run with evaluator Shadow"))
        if tuning.limits.extra_replicas < 1:
            allowed = "at least 1, for a run with evaluator Shadow"
            found.append(Finding(f"{theirs}.limits.extraReplicas", tuning.limits.extra_replicas, allowed))
    known = [parameter.name for parameter in tuning.parameters]
    foreign = [(n, p.name) for n, p in enumerate(run.spec.parameters) if p.name not in known]
    allowed = f"one that the service lets be tuned: {theirs}.parameters has {', '.join(known) or 'none'}"
    found += [Finding(f"spec.parameters[{number}].name", name, allowed) for number, name in foreign]
    return tuple(found)


def path_in(service: InferenceService) -> str:
    """Where a run's reader finds what a service says of tuning: the run has a `spec` of its own."""
    return f"InferenceService {service.name}: spec.tuning"


def obstacle(
    service: InferenceService, run: TuningRun, fleet: Switch, ready: int, quiet: Quiet | None = None
) -> Obstacle | None:
    """Why no worker may be made for the run now. `ready`: engine pods that can serve; `quiet`: the quiet time that it is."""
    findings = not_allowed(service, run)
    if findings:
        return Obstacle(names.NOT_ALLOWED_BY_SERVICE, "; ".join(map(str, findings)), stalled=True)
    halt = switch(service.metadata.annotations, fleet)
    if halt.state != "active":
        reason = names.TUNING_PAUSED if halt.state == "paused" else names.TUNING_REVERTED
        return Obstacle(reason, f"{halt.by} is {halt.state}; the run begins afterwards")
    if quiet is not None:
        return Obstacle(names.QUIET_TIME, f"{quiet}; nothing is started or tried before its end")
    if ready == 0:
        message = f'InferenceService "{service.name}" has no ready pod; the run begins when it has one'
        return Obstacle(names.NO_READY_PODS, message)
    return None


def judge(run: TuningRun, worker: Worker) -> Account:
    """How the run's worker is."""
    job = worker.job
    if job is None:
        return Account()
    whose = ownership(run, job)
    if whose == "former" or job["metadata"].get("deletionTimestamp"):
        gone = Obstacle("Pending", "a former worker of that name is on its way out")
        return Account("starting", gone, look_again=True)
    if whose == "foreign":
        return Account("starting", taken(job))
    since = job["metadata"].get("creationTimestamp")
    mine = [pod for pod in worker.pods if _owner(pod).get("uid") == job["metadata"]["uid"]]
    failed = _condition(job, "Failed")
    if failed is not None:
        return Account("failed", failure=_last_words(mine) or _text(failed), since=since)
    if _condition(job, "Complete") is not None:
        without = "" if run.judged else "it ended without a result in status.result"
        return Account("ended" if run.judged else "failed", failure=without, since=since)
    alive = [pod for pod in mine if not pods.over(pod)]
    if any("running" in state(pod) for pod in alive):
        return Account("running", since=since)
    return _starting(mine, alive, worker.complaint, since)


def _starting(
    mine: Sequence[Json], alive: Sequence[Json], complaint: str | None, since: str | None
) -> Account:
    """A Job that is not over, and has no pod that runs."""
    for pod in alive:
        reason, message = pods.hindrance(pod) or (None, "")
        if reason is None and complaint is not None and pods.creating(pod):
            reason, message = names.FAILED_MOUNT, complaint
        if reason is not None:
            stalled = reason == names.IMAGE_PULL_FAILED
            told = Obstacle(reason, f"its worker's pod: {message}{_to_mend(reason, pod)}", stalled)
            return Account("starting", told, since=since, stuck=True)
    if not alive and complaint is not None:
        told = Obstacle(names.PODS_NOT_CREATED, f"its worker's pod is not made: {complaint}")
        return Account("starting", told, since=since, look_again=True, stuck=True)
    said = _last_words(mine)
    told = Obstacle("Pending", f"its worker is started again: {said}" if said else "its worker starts")
    return Account("starting", told, since=since, look_again=not alive, stuck=bool(said))


def _to_mend(reason: str, pod: Json) -> str:
    """Where what keeps the pod from starting was decided: whoever made the run may not know of it."""
    if reason == names.IMAGE_PULL_FAILED:
        return f"; it is the operator's {_IMAGE}"
    asked = _asked(pod) if reason == names.UNSCHEDULABLE else ""
    return f"; it asks for {asked}, by the operator's {_RESOURCES}" if asked else ""


def _asked(pod: Json) -> str:
    """What the pod asks of a node, as it was written; a limit counts where no request is given."""
    containers = pod.get("spec", {}).get("containers") or ()
    given = [container.get("resources") or {} for container in containers]
    asked = {k: v for one in given for k, v in {**(one.get("limits") or {}), **(one.get("requests") or {})}.items()}  # fmt: skip
    return ", ".join(f"{name} {amount}" for name, amount in sorted(asked.items()))


def not_made(events: Iterable[Json], job: Json, tried: Iterable[Json]) -> str | None:
    """What the Job controller said last of a pod that it may not make (a quota, an admission rule), out of the Job's events; None for
    nothing since the last of those that were `tried`. Each time it is a pod of another name, which nobody will ever see: that is
    left out, so that the same is told alike."""
    since_s = max((_ended_s(pod) for pod in tried), default=0.0)
    found = [e for e in events if e.get("reason") == "FailedCreate" and _happened_s(e) > since_s]
    last = max(found, key=_happened_s, default=None)
    if last is None:
        return None
    name, said = str(job["metadata"]["name"]), str(last.get("message", "")).removeprefix(_COMBINED)
    return re.sub(rf'"{re.escape(name)}-[a-z0-9]*"', f'"{name}-…"', said)


def _happened_s(event: Json) -> float:
    series = event.get("series") or {}
    moments = (event.get("lastTimestamp"), series.get("lastObservedTime"), event.get("eventTime"))
    return max(pods.unix(moment) for moment in moments)


def finished(job: Json) -> bool:
    """Whether the Job controller has closed it."""
    return any(_condition(job, kind) is not None for kind in ("Complete", "Failed"))


def ownership(run: TuningRun, live: Json) -> Literal["ours", "former", "foreign"]:
    """Whose object holds a name that the run's worker needs; `former` was a run's of the same name that is gone."""
    owner = _owner(live)
    if owner.get("uid") == run.uid:
        return "ours"
    same_kind = str(owner.get("apiVersion", "")).partition("/")[0] == names.GROUP
    return "former" if same_kind and owner.get("kind") == names.RUN_KIND else "foreign"


def taken(live: Json) -> Obstacle:
    """Somebody else's object holds the name."""
    what = f"{live['kind']}/{live['metadata']['name']}"
    message = f"{what} is not this run's; delete it, or create a run of another name"
    return Obstacle(names.NAME_TAKEN, message, stalled=True)


def is_worker(pod: Json) -> bool:
    """Whether the pod is some run's worker."""
    labels = pod["metadata"].get("labels") or {}
    return bool(labels.get(names.LABEL_COMPONENT) == names.WORKER_COMPONENT and labels.get(names.LABEL_RUN))


def run_of(pod: Json) -> str:
    """Name of the run that the worker's pod is for."""
    return str(pod["metadata"]["labels"][names.LABEL_RUN])


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Runs whose Job is to be deleted now, and when some more will be (Unix seconds)."""

    end: tuple[str, ...] = ()
    next_s: float | None = None


def leftovers(
    runs: Iterable[TuningRun], found: Iterable[Json], now: float, *, served: bool = True
) -> Leftovers:
    """Workers that still have a pod although their run needs none. A run that is gone takes its own along."""
    alive = {run_of(pod) for pod in found if not pods.over(pod) and not pods.leaving(pod)}
    end, later = list[str](), list[float]()
    for run in runs:
        if run.name not in alive or run.deleting:
            continue
        until = _may_stay_until(run, served)
        if until is None:
            continue
        if until <= now:
            end.append(run.name)
        else:
            later.append(until)
    return Leftovers(tuple(end), min(later, default=None))


def _may_stay_until(run: TuningRun, served: bool) -> float | None:
    """When the run's worker has to be gone, Unix; None while it is needed."""
    if run.status.phase in FINISHED:
        if not run.judged:
            return 0.0
        since = next((c for c in run.status.conditions if c.type == names.RECONCILING), None)
        return pods.unix(since.last_transition_time if since is not None else None) + PARTING_S
    return None if served and wanted(run) else 0.0


def state(pod: Json) -> Json:
    """Of the worker's container; empty before there is one."""
    listed = pod.get("status", {}).get("containerStatuses") or []
    found: Json = next((c.get("state", {}) for c in listed if c.get("name") == names.WORKER_CONTAINER), {})
    return found


def _last_words(found: Iterable[Json]) -> str:
    """Exit status and last line of the pod that ended last; empty when none did."""
    last = max((pod for pod in found if _ended(pod)), key=_ended_s, default=None)
    return "" if last is None else _words(last)


def _ended(pod: Json) -> bool:
    return pods.over(pod) or "terminated" in state(pod)


def _ended_s(pod: Json) -> float:
    """When it ended; of one that had no container yet, when it was made."""
    made = pod["metadata"].get("creationTimestamp")
    return pods.unix(state(pod).get("terminated", {}).get("finishedAt") or made)


def _words(pod: Json) -> str:
    last, status = state(pod).get("terminated"), pod["status"]
    # A kubelet ended it for a reason of its own: it did not take the pod in, or evicted it.
    if status.get("reason") and status.get("message"):
        return f"{status['reason']}: {str(status['message']).strip()}"
    if last is None:
        return ""
    code = int(last.get("exitCode", 0))
    how = f"was killed by signal {code - 128}" if code > 128 else f"exit status {code}"
    if last.get("reason") == "OOMKilled":
        how = "was killed: out of memory (OOMKilled); raise its memory limit (the chart's worker.resources)"
    lines = [line.strip() for line in str(last.get("message") or "").splitlines() if line.strip()]
    return f"{how}: {lines[-1]}" if lines else how


def _owner(live: Json) -> Json:
    listed = live["metadata"].get("ownerReferences") or ()
    found: Json = next((owner for owner in listed if owner.get("controller")), {})
    return found


def _condition(job: Json, kind: str) -> Json | None:
    listed = job.get("status", {}).get("conditions") or ()
    return next((c for c in listed if c.get("type") == kind and c.get("status") == "True"), None)


def _text(condition: Json) -> str:
    return f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
