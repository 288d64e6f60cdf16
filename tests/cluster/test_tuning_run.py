"""A TuningRun on real engines under real traffic: kubectl create, and what its worker makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster.cluster import Cluster
from support.cluster.kubectl import Kubectl
from support.cluster.story import address, engines, read_back, restarts, service, wait_ready, wait_until
from support.cluster.two_classes import INTERACTIVE, TwoClasses
from support.cluster_operator import OperatorProcess

Json = dict[str, Any]
RUN_S = 240.0  # at rest a run takes about one minute
POLICIES = {"mode": "Apply", "limits": {"maxThroughputLoss": "90%"},
            "parameters": [{"name": "schedulingPolicy", "choices": ["fcfs", "sla-aware"]}]}  # fmt: skip


def slo(target_ms: int = 3_600_000) -> Json:
    """One class in a hurry; everybody else has an hour."""
    return {
        "ttft": "1h",
        "itl": "1h",
        "window": "1m",
        "classes": [{"name": INTERACTIVE, "ttft": f"{target_ms}ms"}],
    }


@pytest.fixture(scope="module")
def busy(
    chat_namespace: Kubectl, running: OperatorProcess, model: Path
) -> Iterator[tuple[Kubectl, TwoClasses]]:
    """Two replicas that take one request at a time, and more clients than that; the target is missed by who queues."""
    wanted = service(model, replicas=2, tuning=POLICIES, slo=slo())
    wanted["spec"]["engine"]["maxNumSeqs"] = 1
    chat_namespace.apply(wanted)
    wait_ready(chat_namespace, timeout_s=150)
    with TwoClasses(address(chat_namespace)) as traffic:
        target_ms = max(1, round(1000 * traffic.calm_target_s()))
        patch = {"spec": {"slo": slo(target_ms)}}
        chat_namespace("patch", "infsvc", "chat", "--type=merge", "-p", json.dumps(patch))
        wait_until(lambda: targets(running, chat_namespace) == {target_ms / 1000})
        yield chat_namespace, traffic


def targets(running: OperatorProcess, kubectl: Kubectl) -> set[float]:
    """The interactive class' target in each engine."""
    configs = [read_back(running, pod)["in_force"]["config"] for pod in engines(kubectl)]
    return {c["ttft_s"] for config in configs for c in config["slo"]["classes"] if c["name"] == INTERACTIVE}


def policies(running: OperatorProcess, kubectl: Kubectl) -> list[tuple[str, str]]:
    """(source, policy) in force in each engine, read back from it."""
    found = [read_back(running, pod)["in_force"] for pod in engines(kubectl)]
    return [(document["source"], document["config"]["scheduling_policy"]) for document in found]


def create(kubectl: Kubectl, name: str, **spec: Any) -> None:
    """As a person does."""
    run = {
        "apiVersion": "serving.trimtab.dev/v1alpha1",
        "kind": "TuningRun",
        "metadata": {"name": name},
        "spec": {"service": "chat", "maxTrials": 1, "timeLimit": "30m", "workload": {"slice": "3s"}, **spec},
    }
    kubectl("create", "-f", "-", stdin=json.dumps(run))


def test_a_better_config_is_found_under_traffic_and_promoted(
    busy: tuple[Kubectl, TwoClasses], running: OperatorProcess, cluster: Cluster, tmp_path: Path
) -> None:
    kubectl, traffic = busy
    before = {pod["metadata"]["uid"] for pod in engines(kubectl)}
    create(kubectl, "try")
    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run(
            [
                str(Path(sys.executable).parent / "trimtab-tuner"),
                "work",
                "--namespace",
                kubectl.namespace,
                "--run",
                "try",
                "--kubeconfig",
                str(cluster.kubeconfig),
            ],
            stdout=log,
            stderr=log,
            timeout=600,
        )
    text = (tmp_path / "log").read_text()
    print(text)
    assert done.returncode == 0, text
    ended = kubectl.wait_for("over", "trun", "try", timeout_s=RUN_S, condition=lambda r: r.get("status", {}).get("phase") in ("Succeeded", "Failed", "Stopped"))  # fmt: skip
    print(json.dumps(ended["status"], indent=1))
    print(kubectl("get", "trun"))
    result = ended["status"]["result"]
    assert result["verdict"] == "Applied", json.dumps(ended["status"], indent=1)
    assert set(policies(running, kubectl)) == {("Recommendation", "sla-aware")}
    assert traffic.failed == []
    assert {pod["metadata"]["uid"]: restarts(pod) for pod in engines(kubectl)} == dict.fromkeys(before, 0)
