"""Nodes that fall silent, come back, leave."""

from __future__ import annotations

import httpx

from support.cluster.cluster import Cluster, NodeOptions, is_ready
from support.cluster.kubectl import Kubectl
from support.cluster.manifests import HTTP_SERVER, SLEEP, deployment, pod
from support.cluster.story import condition


def test_pods_of_a_silent_node_are_replaced_and_go_on_until_it_returns(
    cluster: Cluster, kubectl: Kubectl
) -> None:
    cluster.add_node(NodeOptions("node-c", gpus=0))
    cluster.wait_for_node("node-c")
    try:
        there = {"kubernetes.io/hostname": "node-c"}
        kubectl.apply(pod("pinned", HTTP_SERVER, nodeSelector=there))
        prefer = {
            "weight": 100,
            "preference": {
                "matchExpressions": [
                    {"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-c"]}
                ]
            },
        }
        affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [prefer]}}
        kubectl.apply(deployment("moves", 1, pod("moves", SLEEP, affinity=affinity)))
        kubectl("rollout", "status", "deployment/moves", "--timeout=120s")
        pinned = kubectl.wait_for("ready", "pod", "pinned", condition=is_ready)
        [first] = kubectl.items("pods", "-l", "app=moves")
        assert first["spec"]["nodeName"] == "node-c"

        cluster.silence_node("node-c")
        kubectl.wait_for("not ready", "node", "node-c", condition=lambda node: not is_ready(node))
        kubectl.wait_for(
            "moved",
            "pods",
            "-l",
            "app=moves",
            condition=lambda pods: any(
                p["spec"]["nodeName"] != "node-c" and is_ready(p) for p in pods["items"]
            ),
        )
        url = f"http://{pinned['status']['podIP']}:8000"
        assert httpx.get(url, timeout=10).text == "pinned", "a silent node's pods go on"

        cluster.wake_node("node-c")
        cluster.wait_for_node("node-c")
        kubectl.wait_for(
            "one left",
            "pods",
            "-l",
            "app=moves",
            condition=lambda pods: (
                [p["metadata"]["uid"] != first["metadata"]["uid"] for p in pods["items"]] == [True]
            ),
        )
    finally:
        cluster.wake_node("node-c")
        cluster.remove_node("node-c")


def test_a_drained_node_gives_its_pods_away(cluster: Cluster, kubectl: Kubectl) -> None:
    cluster.add_node(NodeOptions("node-d", gpus=1))
    cluster.wait_for_node("node-d")
    try:
        kubectl("cordon", "node-a")
        kubectl("cordon", "node-b")
        kubectl.apply(deployment("web", 2, pod("web", SLEEP)))
        kubectl("rollout", "status", "deployment/web", "--timeout=120s")
        kubectl("uncordon", "node-a")
        kubectl("drain", "node-d", "--timeout=120s", "--ignore-daemonsets", "--delete-emptydir-data")
        kubectl("rollout", "status", "deployment/web", "--timeout=120s")
        assert {p["spec"]["nodeName"] for p in kubectl.items("pods")} == {"node-a"}
    finally:
        kubectl("uncordon", "node-a")
        kubectl("uncordon", "node-b")
        cluster.remove_node("node-d")


def test_the_api_server_may_restart_while_pods_run(cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl.apply(pod("steady", HTTP_SERVER))
    before = kubectl.wait_for("ready", "pod", "steady", condition=is_ready)
    nodes = ready_since(kubectl)
    cluster.control_plane.restart("kube-apiserver")
    # By a controller, so that the one that judges nodes has begun as well.
    kubectl.apply(deployment("later", 1, pod("later", SLEEP)))
    kubectl("rollout", "status", "deployment/later", "--timeout=120s")
    after = kubectl.get("pod", "steady")
    assert after["status"]["containerStatuses"] == before["status"]["containerStatuses"]
    # Nobody took the API server's silence for that of a node: its pods would have left their Services.
    assert after["status"]["conditions"] == before["status"]["conditions"]
    assert ready_since(kubectl) == nodes
    for name in ("node-a", "node-b"):
        cluster.wait_for_node(name)
    events = kubectl.items("events", "--field-selector", "reason=NodeNotReady,involvedObject.name=steady")
    assert events == []


def ready_since(kubectl: Kubectl) -> dict[str, tuple[str, str]]:
    """Node → its condition Ready and since when."""
    found = {node["metadata"]["name"]: condition(node, "Ready") for node in kubectl.items("nodes")}
    return {name: (ready["status"], ready["lastTransitionTime"]) for name, ready in found.items()}
