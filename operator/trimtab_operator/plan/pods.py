"""Pods as the API server shows them → the planner's replicas. Pure; used by `plan.cluster`.

Everything is read from what kubelet and scheduler wrote: phase, conditions, container statuses. The engine itself is only asked
for its live config (`read_back`), which comes in from outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from trimtab_operator import names
from trimtab_operator.plan import failures
from trimtab_operator.plan.loading import is_moving
from trimtab_operator.plan.rollout import Phase, Replica
from trimtab_operator.quantities import parse_quantity

Json = Mapping[str, Any]

#: Waiting reasons that mean the image cannot be had. ErrImagePull alone is left out: a registry may stumble once.
_IMAGE = frozenset({"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"})
#: What decides on which nodes a pod may stand, besides resources.
_PLACEMENT = (
    "nodeSelector",
    "affinity",
    "tolerations",
    "topologySpreadConstraints",
    "schedulerName",
    "resourceClaims",
)
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError"})
_CREATING = frozenset({"ContainerCreating", "PodInitializing"})
#: Events by which a kubelet says that a volume (a Secret, a ConfigMap, a claim) cannot be had.
_NO_VOLUME = frozenset({"FailedMount", "FailedAttachVolume"})
#: Containers that are being created for longer may lack something.
CREATING_PATIENCE_S = 5.0
# A kubelet writes Ready=False when the pod starts; a later change means that it was True in between.
_EVER_READY_AFTER_S = 2.0
#: Begin of year 1000 (glibc writes those before with fewer digits) and end of year 9999, in UTC.
_FIRST_S, _LAST_S = -30_610_224_000.0, 253_402_300_799.0
# A scheduler's words about volume claims. They say nothing of room on the nodes.
_CLAIM_MISSING = re.compile(r'persistentvolumeclaim "[^"]*" (not found|is being deleted)', re.IGNORECASE)
_CLAIM_UNBOUND = re.compile(r"unbound immediate PersistentVolumeClaims", re.IGNORECASE)


def unix(time: str | None) -> float:
    """Seconds since 1970 of an RFC 3339 text; 0 for none, and for what is no moment here (year 0, say, which the API server takes)."""
    try:
        return datetime.fromisoformat(time.upper()).timestamp() if time else 0.0
    except ValueError:
        return 0.0


def rfc3339(unix_s: float) -> str:
    """A moment in UTC, to the second; what no calendar here has (a status may hold year 9999 west of Greenwich) is cut to its ends."""
    unix_s = min(max(unix_s, _FIRST_S), _LAST_S)
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_ready(pod: Json) -> bool:
    """Whether the kubelet says Ready."""
    return _condition(pod, "Ready").get("status") == "True"


def leaving(pod: Json) -> bool:
    """Whether it is being deleted."""
    return pod["metadata"].get("deletionTimestamp") is not None


def scheduled(pod: Json) -> bool:
    """Whether it has a node."""
    return _condition(pod, "PodScheduled").get("status") == "True"


def serves_to_its_end(pod: Json) -> bool:
    """Whether it is leaving and its engine still runs, so that it can be asked to serve on."""
    status = pod.get("status", {})
    return leaving(pod) and bool(status.get("podIP")) and "running" in _engine_status(status).get("state", {})


def over(pod: Json) -> bool:
    """Whether it has ended for good (evicted, succeeded): no replica any more, only a record."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def template_hash(pod: Json) -> str:
    """The mark of the template that it was made from; empty for none."""
    found: str = pod["metadata"].get("annotations", {}).get(names.ANNOTATION_TEMPLATE_HASH, "")
    return found


def fits_into_place_of(new: Json, old: Json) -> bool:
    """Whether `new` could run where `old` runs once that is gone: it may stand on the same nodes and asks for no more."""
    wanted, given = new.get("spec", {}), old.get("spec", {})
    if any(wanted.get(key) != given.get(key) for key in _PLACEMENT):
        return False
    asks, frees = _requests(new), _requests(old)
    return all(amount <= frees.get(resource, Decimal(0)) for resource, amount in asks.items())


def _requests(pod: Json) -> dict[str, Decimal]:
    """What the scheduler sets aside for the pod's containers; a limit counts where no request is given."""
    total: dict[str, Decimal] = {}
    for container in pod.get("spec", {}).get("containers", []):
        given = container.get("resources") or {}
        for resource, amount in {**(given.get("limits") or {}), **(given.get("requests") or {})}.items():
            total[resource] = total.get(resource, Decimal(0)) + parse_quantity(amount)
    return total


def admin_reachable(pod: Json) -> bool:
    """Whether its admin port should answer: ready, with an address, and not on its way out."""
    return is_ready(pod) and not leaving(pod) and bool(pod.get("status", {}).get("podIP"))


def loads(pod: Json) -> bool:
    """Whether its engine runs and was not ready yet: its admin port can say how far it is."""
    status = pod.get("status", {})
    engine = _engine_status(status)
    running = "running" in engine.get("state", {}) and not engine.get("started")
    return running and bool(status.get("podIP")) and not leaving(pod) and not over(pod)


def creating(pod: Json) -> bool:
    """Whether it has a node and the kubelet has not started its containers yet."""
    if leaving(pod) or over(pod) or not scheduled(pod):
        return False
    listed = pod.get("status", {}).get("containerStatuses") or []
    return any(c.get("state", {}).get("waiting", {}).get("reason") in _CREATING for c in listed)


def held_up(pod: Json, now: float) -> bool:
    """Whether `creating` lasts so long that something may be missing. The pod's status does not say what; events do."""
    return creating(pod) and now - unix(_condition(pod, "PodScheduled").get("lastTransitionTime")) >= (
        CREATING_PATIENCE_S
    )


def complaint(events: Iterable[Json]) -> str | None:
    """What the kubelet said last about volumes of a pod, out of the pod's events; None for nothing."""
    found = [event for event in events if event.get("reason") in _NO_VOLUME]
    last = max(
        found, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "", default=None
    )
    return None if last is None else str(last.get("message", ""))


def hindrance(pod: Json) -> tuple[str | None, str] | None:
    """(reason, message) of what keeps the pod's containers from being started, as scheduler and kubelet put it; reason None for what
    may pass by itself. None: nothing is known to."""
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return names.UNSCHEDULABLE, str(scheduled.get("message", ""))
    return _not_started(pod)


def _not_started(pod: Json) -> tuple[str | None, str] | None:
    status = pod.get("status", {})
    for container in (*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])):
        waiting = container.get("state", {}).get("waiting", {})
        text = f"{waiting.get('reason')}: {waiting.get('message', '')}".rstrip(": ")
        if waiting.get("reason") in _IMAGE:
            return names.IMAGE_PULL_FAILED, f"image {container.get('image', '')}: {text}"
        if waiting.get("reason") in _CONFIG:
            return names.CONTAINER_CONFIG_ERROR, text
        if waiting.get("reason") == "ErrImagePull":
            return None, f"image {container.get('image', '')}: {text}"
    return None


def replica(
    pod: Json,
    read_back: Json | None = None,
    rejected: int | None = None,
    loading: str | None = None,
    complaint: str | None = None,
) -> Replica:
    """One pod. `read_back` is the engine's own account of its live config, `rejected` the generation it refused, `loading`
    how far its download is, `complaint` what the kubelet says of its volumes."""
    metadata, status = pod["metadata"], pod.get("status", {})
    engine = _engine_status(status)
    state = engine.get("state", {})
    ready = is_ready(pod) and not leaving(pod)
    was_ready = _was_ready(pod, engine)
    failure, message = _failure(pod, engine, was_ready)
    # After a failed start only bytes are good news: each further try begins with a question to the hub.
    if loading is not None and (failure is None or is_moving(loading)):
        failure, message = None, loading
    else:
        loading = None
    if failure is None and complaint is not None and creating(pod):
        failure, message = names.FAILED_MOUNT, complaint
    return Replica(
        name=metadata["name"],
        template_hash=template_hash(pod),
        phase=_phase(pod, engine, ready),
        ready=ready,
        created_s=unix(metadata.get("creationTimestamp")),
        started_s=unix(state.get("running", {}).get("startedAt") or metadata.get("creationTimestamp")),
        was_ready=was_ready,
        restarts=int(engine.get("restartCount", 0)),
        failed_s=_failed_s(engine),
        failure=failure,
        message=message,
        downloading=loading is not None,
        unschedulable_since_s=_unschedulable_since_s(pod),
        incumbent_generation=None if read_back is None else int(read_back["incumbent"]["generation"]),
        generation_rejected=rejected,
    )


def _condition(pod: Json, kind: str) -> Json:
    listed = pod.get("status", {}).get("conditions") or []
    found: Json = next((c for c in listed if c.get("type") == kind), {})
    return found


def _engine_status(status: Json) -> Json:
    listed = status.get("containerStatuses") or []
    found: Json = next((c for c in listed if c.get("name") == names.ENGINE_CONTAINER), {})
    return found


def _phase(pod: Json, engine: Json, ready: bool) -> Phase:
    if leaving(pod):
        return "Draining"
    if ready:
        return "Running"
    state = engine.get("state", {})
    if "terminated" in state or state.get("waiting", {}).get("reason") == "CrashLoopBackOff":
        return "Failed"
    # The startup probe asks /ready, so `started` means that this process was ready once.
    return "Running" if "running" in state and engine.get("started") else "Starting"


def _was_ready(pod: Json, engine: Json) -> bool:
    ready = _condition(pod, "Ready")
    if ready.get("status") == "True":
        return True
    # The engine answered once and does not now. (When it does, another container or a readiness gate holds the pod back.)
    if engine.get("started") and not engine.get("ready"):
        return True
    began = unix(pod.get("status", {}).get("startTime"))
    changed = unix(ready.get("lastTransitionTime"))
    return bool(began) and changed - began > _EVER_READY_AFTER_S


def _failed_s(engine: Json) -> float | None:
    for state in (engine.get("state", {}), engine.get("lastState", {})):
        if "terminated" in state:
            return unix(state["terminated"].get("finishedAt"))
    return None


def _failure(pod: Json, engine: Json, was_ready: bool) -> tuple[str | None, str]:
    """Reason (one of `names`) and message, for people."""
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        text = str(scheduled.get("message", ""))
        return names.MODEL_LOAD_FAILED if _CLAIM_MISSING.search(text) else None, text
    not_started = _not_started(pod)
    if not_started is not None:
        return not_started
    status = pod.get("status", {})
    ended = engine.get("state", {}).get("terminated") or engine.get("lastState", {}).get("terminated")
    if is_ready(pod):
        return None, ""
    if engine.get("ready"):
        others = [c.get("name", "") for c in status.get("containerStatuses") or () if not c.get("ready")]
        return None, f"its engine is ready, and container {', '.join(others)} is not" if others else ""
    if not ended:
        return None, ""
    tail = str(ended.get("message", "")).strip()
    code = int(ended.get("exitCode", 0))
    how = f"ended with exit status {code}"
    if ended.get("reason") == "OOMKilled":
        return names.ENGINE_CRASHED, "was killed: out of memory (OOMKilled); raise its memory limit"
    if code > 128:
        how = f"was killed by signal {code - 128}"
    last = tail.splitlines()[-1].strip() if tail else ""
    return failures.reason(code, tail, was_ready), f"{how}: {last}" if last else how


def _unschedulable_since_s(pod: Json) -> float | None:
    scheduled = _condition(pod, "PodScheduled")
    text = str(scheduled.get("message", ""))
    if _CLAIM_MISSING.search(text) or _CLAIM_UNBOUND.search(text):
        return None  # it waits for a volume, and making room would not help
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return unix(scheduled.get("lastTransitionTime"))
    return None
