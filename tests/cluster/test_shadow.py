"""A Shadow run on real engines: recorded requests are replayed to added ones, and the service's own notice nothing."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from support.cluster import burst
from support.cluster.burst import INTERACTIVE
from support.cluster.kubectl import Kubectl
from support.cluster.shadows import create, shadow_left, shadow_pods, wait_over, wait_reason
from support.cluster.story import (
    Json,
    address,
    engines,
    read_back,
    restarts,
    service,
    wait_ready,
    wait_until,
)
from support.cluster.traffic import Traffic
from support.cluster_operator import OperatorProcess
from trimtab_operator import names

GPU = "nvidia.com/gpu"
RUN_S = 600.0
TUNING = {"mode": "Apply", "limits": {"extraReplicas": 1, "maxThroughputLoss": "90%"},
          "parameters": [{"name": "schedulingPolicy", "choices": ["fcfs", "sla-aware"]}]}  # fmt: skip


def slo(target_ms: int = 3_600_000) -> Json:
    """One class in a hurry; everybody else has an hour."""
    hurry = {"name": INTERACTIVE, "ttft": f"{target_ms}ms"}
    return {"ttft": "1h", "itl": "1h", "window": "5m", "classes": [hurry]}


@pytest.fixture(scope="module")
def recorded(chat_namespace: Kubectl, running: OperatorProcess, model: Path) -> Kubectl:
    """A service whose one engine holds a node's GPUs, takes one request at a time, and has recorded bursts."""
    wanted = service(model, tuning=TUNING, slo=slo())
    wanted["spec"]["engine"]["maxNumSeqs"] = 1
    [container] = wanted["spec"]["podTemplate"]["spec"]["containers"]
    container["resources"] = {"limits": {GPU: 2}}
    chat_namespace.apply(wanted)
    wait_ready(chat_namespace, timeout_s=150)
    url = address(chat_namespace)
    burst.send(url, burst.sized(url, burst.Shape()), count=8)
    target_ms = round(1000 * burst.TARGET_S)
    chat_namespace(
        "patch", "infsvc", "chat", "--type=merge", "-p", json.dumps({"spec": {"slo": slo(target_ms)}})
    )
    [own] = engines(chat_namespace)
    wait_until(lambda: target_s(running, own) == target_ms / 1000)
    return chat_namespace


def target_s(running: OperatorProcess, pod: Json) -> float:
    """The interactive class' target in the engine."""
    classes = read_back(running, pod)["in_force"]["config"]["slo"]["classes"]
    found: float = next(c["ttft_s"] for c in classes if c["name"] == INTERACTIVE)
    return found


def test_a_shadow_run_measures_on_engines_of_its_own_and_nobodys_request_meets_a_candidate(
    recorded: Kubectl, running: OperatorProcess
) -> None:
    kubectl = recorded
    [own] = engines(kubectl)
    name, standing = own["metadata"]["name"], read_back(running, own)["highest_generation"]
    create(kubectl, "try")
    applied = kubectl.wait_for("tried", "trun", "try", timeout_s=RUN_S,
                               condition=lambda r: r.get("status", {}).get("applied", {}).get("pods") == "1/1")  # fmt: skip
    [pod] = shadow_pods(kubectl)
    assert pod["spec"]["containers"][0]["resources"]["limits"][GPU] == "2"
    trying = read_back(running, pod)["candidate"]
    assert trying["generation"] == applied["status"]["applied"]["generation"]
    answer = httpx.get(f"http://{pod['status']['podIP']}:8000/v1/models", timeout=30)
    assert answer.status_code == 401, "only the run's worker has its key"
    with Traffic(address(kubectl)) as traffic:
        # Nothing of it is the service's.
        mine = read_back(running, own)
        assert (mine["candidate"], mine["highest_generation"]) == (None, standing)
        endpoints = kubectl.items("endpointslices", "-l", "kubernetes.io/service-name=chat")
        assert {e["targetRef"]["name"] for s in endpoints for e in s["endpoints"]} == {name}
        selector = kubectl.get("infsvc", "chat")["status"]["selector"]
        assert [p["metadata"]["name"] for p in kubectl.items("pods", "-l", selector)] == [name]
        over = wait_over(kubectl, "try", RUN_S)
        wait_until(lambda: shadow_left(kubectl) == [], 60, "the shadow stays")
    traffic.check()
    said = json.dumps(over, indent=1)
    assert over["phase"] == "Succeeded", said
    result = over["result"]
    assert result["verdict"] == "Applied", said
    assert result["config"]["schedulingPolicy"] == "sla-aware", said
    assert result["before"]["violated"] > result["after"]["violated"], said
    wait_until(lambda: read_back(running, own)["in_force"]["config"]["scheduling_policy"] == "sla-aware")
    assert [(p["metadata"]["uid"], restarts(p)) for p in engines(kubectl)] == [(own["metadata"]["uid"], 0)]


def test_the_service_has_to_allow_shadows_and_comes_before_them(
    recorded: Kubectl, running: OperatorProcess
) -> None:
    kubectl = recorded
    allow(kubectl, 0)
    create(kubectl, "refused")
    refused = wait_reason(kubectl, "refused", "Stalled", names.NOT_ALLOWED_BY_SERVICE)
    assert "spec.tuning.limits.extraReplicas: 0 is not allowed; at least 1" in refused
    allow(kubectl, 1)
    wait_until(lambda: [p for p in shadow_pods(kubectl) if p["spec"].get("nodeName")], 60, "no shadow")
    # Two nodes of two GPUs: the next pod of the service's own has a place only where the shadow is.
    kubectl("scale", "infsvc", "chat", "--replicas=2")
    assert "Insufficient nvidia.com/gpu" in wait_reason(kubectl, "refused", "Stalled", names.MADE_ROOM)
    assert kubectl.get("trun", "refused")["status"]["phase"] == "Stopped"
    wait_until(lambda: len(engines(kubectl)) == 2, 120, "the service did not get its place back")
    assert shadow_left(kubectl) == []
    # And where there is none at all, the run says so.
    create(kubectl, "full")
    said = wait_reason(kubectl, "full", "Ready", names.SHADOW_NOT_READY, "Insufficient nvidia.com/gpu")
    assert said.startswith("0 of 1 shadow pods are ready; full-shadow-")
    kubectl("annotate", "infsvc", "chat", f"{names.ANNOTATION_TUNING}=paused")
    wait_until(lambda: shadow_pods(kubectl) == [], 60, "a paused run keeps its engines")


def allow(kubectl: Kubectl, replicas: int) -> None:
    patch = {"spec": {"tuning": {"limits": {"extraReplicas": replicas}}}}
    kubectl("patch", "infsvc", "chat", "--type=merge", "-p", json.dumps(patch))
