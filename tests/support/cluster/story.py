"""What a person does with a service on a test cluster, and looks at: apply, wait, read back, run a trial.

Used by the cluster tests of the operator; the fixtures that go with it (`model`, `running`) are in `tests/cluster/conftest.py`.
Everything here waits for conditions and knows nothing of faults.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from support.cluster.cluster import is_ready
from support.cluster.kubectl import Kubectl, KubectlError
from support.cluster_operator import OperatorProcess
from trimtab_operator import names
from trimtab_operator.cluster.tokens import Signer
from trimtab_operator.plan.pods import rfc3339

Json = dict[str, Any]
CHILDREN = (
    "deployments,replicasets,pods,services,serviceaccounts,configmaps,networkpolicies,poddisruptionbudgets,"
    "cronjobs,roles,rolebindings"
)
OURS = "serving.trimtab.dev/inferenceservice"
TUNABLE = {"mode": "Apply", "parameters": [{"name": "maxNumBatchedTokens", "min": 64, "max": 4096}]}
BUDGET = 512  # of `service`, before anybody changes it
MAX_GAP_S = 5.0  # between two pieces of a stream; a restart would take longer, a busy machine does not
LEASE_S = 30.0  # what the operator gives a candidate at a time


def service(weights: Path, name: str = "chat", replicas: int = 1, **spec: Any) -> Json:
    """A service on the tiny model; `spec` replaces whole fields."""
    return {
        "apiVersion": "serving.trimtab.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": f"file://{weights}"},
            "replicas": replicas,
            "engine": {"maxNumBatchedTokens": BUDGET, "maxNumSeqs": 16, "kvCacheMemory": "16Mi", "maxModelLen": 1024},
            "rollout": {"drainTimeout": "5s"},
            "podTemplate": {"spec": {
                "containers": [{"name": "engine", "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
                                "volumeMounts": [{"name": "weights", "mountPath": str(weights.parent), "readOnly": True}]}],
                "volumes": [{"name": "weights", "hostPath": {"path": str(weights.parent)}}],
            }},
            **spec,
        },
    }  # fmt: skip


def condition(resource: Json, kind: str) -> Json:
    """The condition, or one with empty status and reason when there is none yet."""
    listed = resource.get("status", {}).get("conditions", [])
    return next((c for c in listed if c["type"] == kind), {"status": "", "reason": ""})


def wait_condition(
    kubectl: Kubectl, kind: str, status: str, reason: str | None = None, name: str = "chat", timeout_s: float = 120.0
) -> Json:  # fmt: skip
    """Until condition `kind` has `status` (and `reason`) → the resource."""

    def met(found: Json) -> bool:
        now = condition(found, kind)
        return now["status"] == status and reason in (None, now["reason"])

    what = f"{kind}={status} {reason or ''}".rstrip()
    return kubectl.wait_for(what, "infsvc", name, condition=met, timeout_s=timeout_s)


def wait_ready(kubectl: Kubectl, name: str = "chat", timeout_s: int = 150) -> Json:
    """`kubectl wait` for Ready → the resource; the conditions are in the failure's message."""
    try:
        kubectl("wait", f"infsvc/{name}", "--for=condition=Ready", f"--timeout={timeout_s}s", timeout_s=timeout_s + 10)  # fmt: skip
    except KubectlError as error:
        conditions = json.dumps(kubectl.get("infsvc", name).get("status", {}).get("conditions"), indent=1)
        raise AssertionError(f"{error}\n{conditions}") from error
    return kubectl.get("infsvc", name)


def address(kubectl: Kubectl, name: str = "chat") -> str:
    """URL of the Service's cluster IP, once it takes connections: kube-proxy may hear of a ready pod later than `kubectl wait`."""
    host = kubectl.get("service", name)["spec"]["clusterIP"]

    def takes_connections() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((host, 8000), timeout=5):
            return True
        return False

    wait_until(takes_connections)
    return f"http://{host}:8000"


def told(kubectl: Kubectl, run: str) -> list[str]:
    """Reasons of the events of a TuningRun; each is one event, whatever it counts."""
    whose = f"involvedObject.kind={names.RUN_KIND},involvedObject.name={run}"
    return [event["reason"] for event in kubectl.items("events", "--field-selector", whose)]


def engines(kubectl: Kubectl, name: str = "chat") -> list[Json]:
    """The service's engine pods that are ready and not leaving."""
    listed = kubectl.items("pods", "-l", f"{OURS}={name},app.kubernetes.io/component=engine")
    return [pod for pod in listed if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]]


def restarts(pod: Json) -> int:
    """How often the engine's container was started again."""
    count: int = pod["status"]["containerStatuses"][0]["restartCount"]
    return count


def read_back(operator_process: OperatorProcess, pod: Json) -> Json:
    """What the engine itself says of its live config, on its admin port."""
    return read_back_by(operator_process.folder / "admin-key.pem", pod)


def read_back_by(key_file: Path, pod: Json) -> Json:
    """As `read_back`, with the key in `key_file`."""
    token = Signer.load(key_file).token(pod["metadata"]["uid"], "read")
    answer = httpx.get(
        f"http://{pod['status']['podIP']}:8001/admin/live-config",
        headers={"Authorization": f"Bearer {token}"},
        timeout=60.0,
    )
    answer.raise_for_status()
    found: Json = answer.json()
    return found


def budgets(running: OperatorProcess, kubectl: Kubectl, name: str = "chat") -> list[int]:
    """The token budget in force in each engine, read back from it."""
    return [budget(running, pod) for pod in engines(kubectl, name)]


def budget(running: OperatorProcess, pod: Json) -> int:
    """The token budget in force in one engine; needs no API server."""
    found: int = read_back(running, pod)["in_force"]["config"]["max_num_batched_tokens"]
    return found


def edit_budget(kubectl: Kubectl, tokens: int, name: str = "chat") -> None:
    """A person changes the live field."""
    patch = json.dumps({"spec": {"engine": {"maxNumBatchedTokens": tokens}}})
    kubectl("patch", "infsvc", name, "--type=merge", "-p", patch)


def wait_until(
    check: Callable[[], Any], timeout_s: float = 120.0, what: str = "not within the time"
) -> float:
    """Poll until `check` is true → seconds that it took."""
    began = time.monotonic()
    while not check():
        assert time.monotonic() - began < timeout_s, what
        time.sleep(0.1)
    return time.monotonic() - began


def tuning_run(name: str = "chat-1", service: str = "chat", *, worker: bool = True, **spec: Any) -> Json:
    """A TuningRun; without a `worker` its status is the test's to write."""
    metadata: Json = {"name": name}
    if not worker:
        metadata["annotations"] = {names.ANNOTATION_WORKER: "none"}
    return {"apiVersion": names.API_VERSION, "kind": names.RUN_KIND, "metadata": metadata,
            "spec": {"service": service, **spec}}  # fmt: skip


def run_out(kubectl: Kubectl, name: str, timeout_s: float = 120.0) -> Json:
    """Let the run's time limit be over now, and wait for the run's end → the run. Its time counts from status.startTime, which is moved
    back; the operator may be writing the old one at that moment, so this is repeated."""
    long_ago = json.dumps({"status": {"startTime": rfc3339(time.time() - 25 * 3600)}})

    def over(run: Json) -> bool:
        if run["status"]["phase"] in ("Succeeded", "Failed", "Stopped"):
            return True
        kubectl("patch", "trun", name, "--subresource=status", "--type=merge", "-p", long_ago)
        return False

    return kubectl.wait_for("over", "trun", name, condition=over, timeout_s=timeout_s)


def start_run(
    kubectl: Kubectl, tokens: int, seconds: float, name: str = "chat-1", trial: int = 0, service: str = "chat"
) -> None:
    """A TuningRun that wants no worker, with a candidate for `seconds`, as one would write it."""
    kubectl.apply(tuning_run(name, service, worker=False))
    status = {
        "candidate": {
            "trial": trial,
            "config": {"maxNumBatchedTokens": tokens},
            "until": rfc3339(time.time() + seconds),
        }
    }
    kubectl(
        "patch", "trun", name, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status})
    )
