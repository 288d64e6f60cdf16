"""PodMonitor and PrometheusRule on a real API server: made once their kinds are there, mended, and none of the service's business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.cluster.cluster import Cluster
from support.cluster.kubectl import Kubectl
from support.cluster.monitoring_kinds import crds
from support.cluster.story import OURS, condition, service, wait_condition, wait_until
from support.cluster_operator import OperatorProcess

OPERATOR_OPTIONS = ("--resync", "5")  # nothing but a look finds out about kinds and monitors
KINDS = "podmonitors,prometheusrules"


def enable(kubectl: Kubectl, value: bool | None) -> None:
    spec = {"monitoring": {"podMonitor": {"enabled": value}, "prometheusRule": {"enabled": value}}}
    kubectl("patch", "infsvc", "chat", "--type=merge", "-p", json.dumps({"spec": spec}))


def test_monitors_come_with_their_kinds_come_back_and_go(
    kubectl: Kubectl, running: OperatorProcess, cluster: Cluster, model: Path, request: pytest.FixtureRequest
) -> None:
    assert crds()[0]["metadata"]["name"] not in cluster.kubectl("get", "crd", "-o", "name")
    kubectl.apply(service(model, suspend=True))  # no pods are needed for this
    found = wait_condition(kubectl, "Ready", "False", "Suspended")
    assert condition(found, "MonitoringReady")["status"] == "", "nobody asked for any"
    enable(kubectl, True)
    wait_condition(kubectl, "MonitoringReady", "False", "KindNotFound")

    enable(kubectl, None)
    kubectl.wait_for("quiet", "infsvc", "chat",
                     condition=lambda r: condition(r, "MonitoringReady")["status"] == "")  # fmt: skip
    request.getfixturevalue("monitoring_kinds")
    found = wait_condition(kubectl, "MonitoringReady", "True", timeout_s=120)
    assert condition(found, "Ready")["reason"] == "Suspended"
    made = {item["kind"]: item for item in kubectl.items(KINDS, "-l", OURS)}
    assert set(made) == {"PodMonitor", "PrometheusRule"}
    for item in made.values():
        assert item["metadata"]["ownerReferences"][0]["name"] == "chat"

    kubectl("delete", "podmonitor", "chat-engine")
    wait_until(lambda: len(kubectl.items("podmonitors")) == 1, timeout_s=120)  # by the next resync

    def nothing_written() -> bool:
        writes, looks = running.writes(), running.metric("trimtab_operator_reconcile_total")
        wait_until(lambda: running.metric("trimtab_operator_reconcile_total") > looks + 1, timeout_s=90)
        return running.writes() == writes

    wait_until(nothing_written, timeout_s=180)  # what the deletion asked for may still be under way

    enable(kubectl, False)
    wait_until(lambda: kubectl.items(KINDS) == [])
