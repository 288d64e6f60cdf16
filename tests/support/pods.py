"""Pods as a kubelet and a scheduler would show them, for tests of what the operator reads out of them."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
T0 = 1_800_000_000.0  # Unix time at which the pods of these tests are made


def moment(seconds: float) -> str:
    """`T0 + seconds` as Kubernetes writes it."""
    from trimtab_operator.plan.pods import rfc3339

    return rfc3339(T0 + seconds)


def pod(
    name: str = "chat-engine-1",
    template_hash: str = "h1",
    *,
    created: float = 0.0,
    ready_since: float | None = None,
    was_ready_until: float | None = None,
    scheduled: bool = True,
    unschedulable_since: float | None = None,
    state: Json | None = None,
    last_state: Json | None = None,
    restarts: int = 0,
    started: bool | None = None,
    deleting: bool = False,
    phase: str = "Running",
    init: list[Json] | None = None,
    message: str = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    gpus: int = 1,
    **spec: Any,
) -> Json:
    """One engine pod; without further arguments it runs and loads its model."""
    ready = ready_since is not None
    changed = (
        ready_since
        if ready_since is not None
        else was_ready_until
        if was_ready_until is not None
        else created
    )
    conditions: list[Json] = []
    if unschedulable_since is not None:
        conditions.append({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message,
                           "lastTransitionTime": moment(unschedulable_since)})  # fmt: skip
    elif scheduled:
        conditions.append({"type": "PodScheduled", "status": "True", "lastTransitionTime": moment(created)})
        conditions.append({"type": "Ready", "status": str(ready), "lastTransitionTime": moment(changed)})
    status: Json = {
        "phase": "Pending" if unschedulable_since is not None else phase,
        "conditions": conditions,
    }
    if scheduled and unschedulable_since is None:
        status["startTime"] = moment(created)
        status["podIP"] = "10.0.0.1"
        status["initContainerStatuses"] = init or []
        status["containerStatuses"] = [{
            "name": "engine", "image": "engine:1", "ready": ready, "restartCount": restarts,
            "started": ready if started is None else started,
            "state": state or {"running": {"startedAt": moment(created)}}, "lastState": last_state or {},
        }]  # fmt: skip
    metadata: Json = {
        "name": name,
        "namespace": "default",
        "uid": f"uid-{name}",
        "creationTimestamp": moment(created),
        "annotations": {"serving.trimtab.dev/config-hash": template_hash},
    }
    if deleting:
        metadata["deletionTimestamp"] = moment(created + 100)
    container = {"name": "engine", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    return {"metadata": metadata, "spec": {"containers": [container], **spec}, "status": status}


def terminated(exit_code: int, message: str = "", reason: str = "Error", finished: float = 5.0) -> Json:
    """A container state of a process that ended."""
    return {
        "terminated": {
            "exitCode": exit_code,
            "reason": reason,
            "message": message,
            "finishedAt": moment(finished),
        }
    }


def waiting(reason: str, message: str = "") -> Json:
    """A container state of one that does not run yet."""
    return {"waiting": {"reason": reason, "message": message}}
