"""What tests of rollouts do with a service on a test cluster, and look at: edits that restart, pods that come and go, nodes that are drained.

Used by `tests/cluster/test_rollouts.py` and `test_rollout_matrix.py`, beside `support.cluster.story`. Every load is the tests' own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from support.cluster.cluster import Cluster
from support.cluster.kubectl import Kubectl, KubectlError
from support.cluster.load import Load
from support.cluster.story import OURS, engines, wait_ready, wait_until

Json = dict[str, Any]
READY_S = 240  # a rollout of two on a busy machine
GPU = "nvidia.com/gpu"
ENGINE = {"maxNumBatchedTokens": 512, "maxNumSeqs": 16, "kvCacheMemory": "16Mi", "maxModelLen": 8192}
ROLLOUT = {"drainTimeout": "60s"}


def in_namespace(cluster: Cluster, name: str) -> Iterator[Kubectl]:
    """kubectl in a fresh namespace, for a module's fixture."""
    full = f"{name}-{os.urandom(2).hex()}"
    cluster.kubectl("create", "namespace", full)
    yield cluster.kubectl.within(full)
    cluster.kubectl("delete", "namespace", full, "--wait=false")


def patch(kubectl: Kubectl, **spec: Any) -> None:
    """Change fields of the service's spec."""
    kubectl("patch", "infsvc", "chat", "--type=merge", "-p", json.dumps({"spec": spec}))


def pods(kubectl: Kubectl) -> list[Json]:
    """All pods of the service, leaving ones too."""
    return kubectl.items("pods", "-l", f"{OURS}=chat")


def uids(listed: list[Json]) -> set[str]:
    """Which pods these are."""
    return {pod["metadata"]["uid"] for pod in listed}


def wait_settled(kubectl: Kubectl, replicas: int) -> list[Json]:
    """Until exactly so many pods are left, all ready: whoever was leaving has finished."""
    wait_ready(kubectl, timeout_s=READY_S)
    wait_until(
        lambda: len(pods(kubectl)) == len(engines(kubectl)) == replicas, READY_S, "pods are still leaving"
    )
    return engines(kubectl)


def rolling(kubectl: Kubectl) -> Json:
    """maxSurge and maxUnavailable of the Deployment."""
    strategy = kubectl.get("deployment", "chat-engine")["spec"]["strategy"]
    assert strategy["type"] == "RollingUpdate"
    found: Json = strategy["rollingUpdate"]
    return found


def check_nothing_failed(load: Load) -> None:
    """After the load: every request was served to its end."""
    assert load.failed == [], load.summary()
    print(load.summary())


def cordon(kubectl: Kubectl, *nodes: str) -> None:
    """No further pod gets a place there."""
    for node in nodes:
        kubectl("cordon", node)


def uncordon(kubectl: Kubectl) -> None:
    """All nodes take pods again."""
    nodes = kubectl.items("nodes")
    closed = [node["metadata"]["name"] for node in nodes if node["spec"].get("unschedulable")]
    if closed:
        kubectl("uncordon", *closed)


def drain(kubectl: Kubectl, node: str) -> None:
    """`kubectl drain`, of the service's pods alone, to its end: they are gone and the node is cordoned."""
    kubectl("drain", node, f"--pod-selector={OURS}=chat", "--delete-emptydir-data", f"--timeout={READY_S}s",
            timeout_s=READY_S + 20)  # fmt: skip


def refusal_to_evict(kubectl: Kubectl, pod: Json) -> str:
    """What the API server says to an eviction of `pod`; empty when it evicts it."""
    name = pod["metadata"]["name"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    where = f"/api/v1/namespaces/{kubectl.namespace}/pods/{name}/eviction"
    try:
        kubectl("create", "--raw", where, "-f", "-", stdin=json.dumps(body))
    except KubectlError as error:
        return str(error)
    return ""
