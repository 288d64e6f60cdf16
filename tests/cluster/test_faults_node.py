"""A node falls silent: its pods are replaced elsewhere, conditions say what is, and clients notice nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cluster.cluster import Cluster, NodeOptions, is_ready
from support.cluster.kubectl import Kubectl
from support.cluster.story import OURS, address, condition, engines, service, wait_ready, wait_until
from support.cluster.traffic import Traffic
from support.cluster_operator import OperatorProcess


@pytest.mark.slow
def test_engines_of_a_silent_node_are_replaced_and_clients_notice_nothing(
    kubectl: Kubectl, cluster: Cluster, running: OperatorProcess, model: Path
) -> None:
    cluster.add_node(NodeOptions("node-e", gpus=0))
    cluster.wait_for_node("node-e")
    try:
        made = service(model, replicas=2)
        spread = {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {OURS: "chat"}},
        }
        made["spec"]["podTemplate"]["spec"]["topologySpreadConstraints"] = [spread]
        kubectl.apply(made)
        wait_ready(kubectl, timeout_s=150)
        first, second = engines(kubectl)
        node, lost = first["spec"]["nodeName"], {first["metadata"]["uid"]}
        assert second["spec"]["nodeName"] != node
        with Traffic(address(kubectl), clients=2) as traffic:
            cluster.silence_node(node)
            kubectl.wait_for("not ready", "node", node, condition=lambda node: not is_ready(node))
            found = kubectl.wait_for("told", "infsvc", "chat",
                                     condition=lambda r: condition(r, "Ready")["status"] == "False")  # fmt: skip
            assert condition(found, "Stalled")["status"] == "False"
            kubectl.wait_for("replaced", "infsvc", "chat", timeout_s=120,
                             condition=lambda r: condition(r, "Ready")["status"] == "True")  # fmt: skip
            elsewhere = engines(kubectl)
            assert len(elsewhere) == 2
            assert not lost & {pod["metadata"]["uid"] for pod in elsewhere}
            traffic.wait_more()
            cluster.wake_node(node)
            cluster.wait_for_node(node)
            wait_until(lambda: not lost & {p["metadata"]["uid"] for p in kubectl.items("pods")}, timeout_s=90)
            traffic.wait_more()
        traffic.check()
        wait_ready(kubectl)
    finally:
        for name in ("node-a", "node-b", "node-e"):
            cluster.wake_node(name)
        cluster.remove_node("node-e")
