"""SLOMet and the alerts, by a real Prometheus that scrapes the engines as the service's PodMonitor says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.cluster import scraping
from support.cluster.cluster import Cluster
from support.cluster.kubectl import Kubectl
from support.cluster.load import Load
from support.cluster.rollouts import in_namespace, patch
from support.cluster.story import OURS, address, condition, service, wait_condition, wait_ready, wait_until
from support.cluster_operator import operator
from support.prometheus import free_port, serve_prometheus
from trimtab_operator import crds

Json = dict[str, Any]


@pytest.fixture
def home(cluster: Cluster) -> Iterator[Kubectl]:
    yield from in_namespace(cluster, "scraped")


@pytest.mark.slow  # it waits for scrapes every 15 s and looks at them every 30 s, and takes little CPU
@pytest.mark.usefixtures("monitoring_kinds")
def test_slo_met_says_what_prometheus_scrapes_by_the_pod_monitor(
    home: Kubectl, cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    cluster.kubectl("apply", "--server-side", "-f", str(crds.directory()))
    port, targets = free_port(), tmp_path / "targets.json"
    kubectl, name = home, home.namespace
    with operator(cluster.kubeconfig, tmp_path, "scraped", "--namespace", name, "--operator-namespace", name,
                  "--prometheus-url", f"http://127.0.0.1:{port}"):  # fmt: skip
        kubectl.apply(service(model, slo={"window": "1m", "ttft": "60s", "itl": "60s", "objective": 90}))
        wait_ready(kubectl)
        wait_until(lambda: len(kubectl.items("podmonitors,prometheusrules", "-l", OURS)) == 2)
        job = scraping.job(kubectl.get("podmonitor", "chat-engine"), targets)
        groups = kubectl.get("prometheusrule", "chat-engine")["spec"]["groups"]
        targets.write_text(json.dumps(scraping.discovered(kubectl.items("pods"))))
        with serve_prometheus([job], rule_groups=groups, port=port) as url, Load(address(kubectl), short_clients=1, long_clients=0):  # fmt: skip
            met = wait_condition(kubectl, "SLOMet", "True", "TargetsMet", timeout_s=180)
            assert met["status"]["summary"]["slo"] == "Met"
            check_labels(url, name)
            check_rules(url)
            patch(kubectl, slo={"ttft": "1ms"})
            missed = wait_condition(kubectl, "SLOMet", "False", "TargetsMissed", timeout_s=180)
            assert condition(missed, "SLOMet")["message"] == "ttft of class default"
            assert condition(missed, "Ready")["status"] == "True"


def ask(url: str, path: str, **query: str) -> Json:
    answer: Json = httpx.get(f"{url}/api/v1/{path}", params=query, timeout=30.0).json()["data"]
    return answer


def check_labels(url: str, namespace: str) -> None:
    """The engine's serving port is scraped, once, with the labels that alerts and the operator ask for."""
    [up] = ask(url, "query", query="up")["result"]
    assert up["metric"]["namespace"] == namespace
    assert up["metric"]["pod"].startswith("chat-engine-")
    assert up["metric"]["serving_trimtab_dev_inferenceservice"] == "chat"
    assert up["metric"]["instance"].endswith(":8000")
    assert up["value"][1] == "1"


def check_rules(url: str) -> None:
    """Prometheus evaluates every alert without an error, and none fires at rest."""

    def listed() -> list[Json]:
        return [rule for group in ask(url, "rules")["groups"] for rule in group["rules"]]

    # Each group has its own moment within its interval.
    wait_until(lambda: "unknown" not in {rule["health"] for rule in listed()})
    rules = listed()
    assert rules
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
