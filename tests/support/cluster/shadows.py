"""What a person does with Shadow runs of service `chat` on a test cluster, and looks at: the run, its engines, what is left of them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx

from support.cluster.cluster import is_ready
from support.cluster.kubectl import Kubectl
from support.cluster.story import OURS, Json, condition, tuning_run
from trimtab_tuner.metrics.exposition import parse
from trimtab_tuner.metrics.names import TRIMTAB

SHADOW_KINDS = "deployments,replicasets,pods,services,networkpolicies"
MINE = f"{OURS}=chat.shadow"
OVER = ("Succeeded", "Failed", "Stopped")


def create(kubectl: Kubectl, name: str, **spec: Any) -> None:
    """A Shadow run of one candidate, as a person creates it; `spec` says otherwise."""
    run = tuning_run(name, **{"evaluator": "Shadow", "maxTrials": 1, "timeLimit": "20m", **spec})
    kubectl("create", "-f", "-", stdin=json.dumps(run))


def shadow_pods(kubectl: Kubectl) -> list[Json]:
    """The pods of all shadows of the service."""
    return kubectl.items("pods", "-l", MINE)


def ready_shadows(kubectl: Kubectl) -> list[Json]:
    """Those that are ready and stay."""
    return [p for p in shadow_pods(kubectl) if is_ready(p) and "deletionTimestamp" not in p["metadata"]]


def shadow_left(kubectl: Kubectl) -> list[str]:
    """Names of whatever belongs to a shadow of the service."""
    return [item["metadata"]["name"] for item in kubectl.items(SHADOW_KINDS, "-l", MINE)]


def wait_reason(kubectl: Kubectl, run: str, kind: str, reason: str, words: str = "") -> str:
    """Until the run's condition has that reason, and the words → its message."""

    def met(found: Json) -> bool:
        now = condition(found, kind)
        return now["reason"] == reason and words in now["message"]

    found = kubectl.wait_for(f"{kind} {reason} {words}", "trun", run, condition=met, timeout_s=120)
    message: str = condition(found, kind)["message"]
    return message


def wait_tried(kubectl: Kubectl, run: str, on: int, timeout_s: float) -> Json:
    """Until a candidate of the run is in force on so many engines → the run."""

    def tried(found: Json) -> bool:
        status = found.get("status", {})
        assert status.get("phase") not in OVER, json.dumps(status, indent=1)
        pods: str = status.get("applied", {}).get("pods", "")
        return pods == f"{on}/{on}"

    return kubectl.wait_for(f"tried on {on}", "trun", run, timeout_s=timeout_s, condition=tried)


def wait_over(kubectl: Kubectl, run: str, timeout_s: float) -> Json:
    """Until the run is over → its status."""
    found = kubectl.wait_for("over", "trun", run, timeout_s=timeout_s,
                             condition=lambda r: r.get("status", {}).get("phase") in OVER)  # fmt: skip
    status: Json = found["status"]
    return status


def answered(pod: Json) -> int:
    """How many requests the engine has ended, by its own count."""
    text = httpx.get(f"http://{pod['status']['podIP']}:8000/metrics", timeout=60, trust_env=False).text
    return round(sum(parse(text).get(TRIMTAB.finished, {}).values()))


@contextlib.contextmanager
def endpoints_seen(kubectl: Kubectl) -> Iterator[set[str]]:
    """Names of all pods that were ever in the service's EndpointSlices within the block; complete after it."""
    seen = set[str]()
    names = '{range .endpoints[*]}{.targetRef.name}{"\\n"}{end}'
    command = [str(kubectl.program), "--kubeconfig", str(kubectl.kubeconfig), "--namespace", kubectl.namespace,
               "get", "endpointslices", "-l", "kubernetes.io/service-name=chat", "--watch", "-o", f"jsonpath={names}"]  # fmt: skip
    with tempfile.TemporaryFile("w+") as output:
        watch = subprocess.Popen(command, stdout=output, stdin=subprocess.DEVNULL)
        try:
            yield seen
            assert watch.poll() is None, "nobody watched to the end"
        finally:
            watch.kill()
            watch.wait()
            output.seek(0)
            seen.update(output.read().split())
