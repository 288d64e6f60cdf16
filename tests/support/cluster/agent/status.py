"""What the API server is told about a pod: phase, conditions and container statuses. Pure.

The rules of the kubelet (`getPhase`, `GeneratePodReadyCondition`); `pod` feeds it and writes the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from support.cluster.agent.api import Json

Policy = Literal["Always", "OnFailure", "Never"]


@dataclass(slots=True)
class ContainerState:
    """One container as last seen. Exactly one of waiting, running, terminated is set."""

    name: str
    image: str
    waiting: Json | None = field(default_factory=lambda: {"reason": "ContainerCreating"})
    running: Json | None = None
    terminated: Json | None = None
    last: Json | None = None  # how the run before ended
    restarts: int = 0
    started: bool = False  # its startup probe has succeeded
    ready: bool = False
    process: str = ""  # containerID

    @property
    def succeeded(self) -> bool:
        """Ended with status 0."""
        return self.terminated is not None and self.terminated["exitCode"] == 0

    def to_json(self) -> Json:
        """As in `status.containerStatuses`."""
        for key in ("waiting", "running", "terminated"):
            value = getattr(self, key)
            if value is not None:
                state = {key: value}
                break
        else:
            raise AssertionError(f"container {self.name} is in no state")
        return {
            "name": self.name,
            "image": self.image,
            "imageID": f"process://{self.image}" if self.process else "",
            "containerID": self.process,
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
            "state": state,
            "lastState": {"terminated": self.last} if self.last is not None else {},
        }


def phase(
    policy: Policy, init: Sequence[ContainerState], main: Sequence[ContainerState], initialized: bool
) -> str:
    """Pending, Running, Succeeded or Failed. `init` holds one-shot init containers only."""
    if not initialized:
        failed = policy == "Never" and any(c.terminated and not c.succeeded for c in init)
        return "Failed" if failed else "Pending"
    if any(c.waiting is not None and c.last is None and c.restarts == 0 for c in main):
        return "Pending"
    ended = [c for c in main if c.terminated is not None]
    if len(ended) < len(main) or policy == "Always":
        return "Running"
    if all(c.succeeded for c in ended):
        return "Succeeded"
    return "Running" if policy == "OnFailure" else "Failed"


def pod_conditions(
    spec: Json,
    old: Sequence[Json],
    *,
    sandbox: bool,
    initialized: bool,
    main: Sequence[ContainerState],
    current_phase: str,
    moment: str,
) -> list[Json]:
    """The conditions that a node owns; `lastTransitionTime` moves only when a status changes. old: all present ones."""
    unready = [c.name for c in main if not c.ready]
    if current_phase in ("Succeeded", "Failed"):
        reason = "PodCompleted" if current_phase == "Succeeded" else "PodFailed"
        containers = (False, reason, "")
    elif unready:
        containers = (False, "ContainersNotReady", f"containers with unready status: [{' '.join(unready)}]")
    else:
        containers = (True, "", "")
    gates = [gate["conditionType"] for gate in spec.get("readinessGates", [])]
    open_gates = [gate for gate in gates if not any(c["type"] == gate and c["status"] == "True" for c in old)]
    ready = containers
    if containers[0] and open_gates:
        ready = (False, "ReadinessGatesNotReady", f"gates not open: {', '.join(open_gates)}")
    wanted = {
        "PodReadyToStartContainers": (sandbox, "", ""),
        "Initialized": (initialized, "" if initialized else "ContainersNotInitialized", ""),
        "ContainersReady": containers,
        "Ready": ready,
    }
    result = []
    for kind, (value, reason, message) in wanted.items():
        status = "True" if value else "False"
        before = next((c for c in old if c["type"] == kind), None)
        since = before["lastTransitionTime"] if before is not None and before["status"] == status else moment
        result.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": since,
            }
        )
    return result
