"""Pods on the test cluster: nodes, scheduling, probes, volumes, ends. It holds the node agent to what a kubelet does."""

from __future__ import annotations

from typing import Any

from support.cluster.cluster import is_ready
from support.cluster.kubectl import Kubectl

Json = dict[str, Any]


def pod(name: str, script: str, **spec: Any) -> Json:
    """A pod that runs a Python script; keys of `spec` named `container` go to its container."""
    container = {"name": "main", "image": "python:3", "args": ["-c", script], **spec.pop("container", {})}
    spec = {"terminationGracePeriodSeconds": 2, "containers": [container], **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


SLEEP = "import time; time.sleep(1000)"


def test_nodes_become_ready_and_take_pods(kubectl: Kubectl) -> None:
    nodes = kubectl.items("nodes")
    assert len(nodes) >= 2
    assert all(is_ready(node) and not node["spec"].get("taints") for node in nodes)
    kubectl.apply(pod("sleeper", SLEEP))
    kubectl.wait_for("ready", "pod", "sleeper", condition=is_ready)
