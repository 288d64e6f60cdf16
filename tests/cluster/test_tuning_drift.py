"""A service that leaves its targets gets one run: real requests, a real engine's counters, a real Prometheus, a real API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from support.cluster.kubectl import Kubectl
from support.cluster.story import (
    TUNABLE,
    address,
    condition,
    engines,
    service,
    wait_condition,
    wait_ready,
    wait_until,
)
from support.cluster.traffic import Traffic
from support.cluster_operator import OperatorProcess
from support.prometheus import start_prometheus
from trimtab_operator.plan.pods import unix
from trimtab_operator.plan.slo import MIN_REQUESTS

Json = dict[str, Any]
WINDOW_S = 60  # the shortest that there is; of one of them, in full, is the wait


@pytest.mark.slow
def test_targets_that_are_missed_for_long_enough_make_one_run(
    kubectl: Kubectl, running: OperatorProcess, model: Path
) -> None:
    tuning = {**TUNABLE, "drift": {"enabled": True, "windows": 1}}
    # No first token comes within a millisecond.
    kubectl.apply(service(model, tuning=tuning, slo={"ttft": "1ms", "window": f"{WINDOW_S}s"}))
    wait_ready(kubectl)
    found = wait_condition(kubectl, "TuningReady", "False", "MetricsUnavailable")
    assert "--prometheus-url" in condition(found, "TuningReady")["message"]
    assert condition(found, "DriftDetected")["status"] == "Unknown"

    [pod] = engines(kubectl)
    labels = {"namespace": kubectl.namespace, "pod": pod["metadata"]["name"]}
    url, before = address(kubectl), running.options
    targets = [f"http://{pod['status']['podIP']}:8000/metrics"]
    # All the while and many times what a verdict needs, so that there is one at any moment.
    with Traffic(url, clients=3, tokens=2), start_prometheus(targets, labels=labels) as prometheus:
        running.stop()
        running.options = (*before, "--prometheus-url", prometheus)
        try:
            wait_until(lambda: counted(prometheus) >= MIN_REQUESTS, timeout_s=120)
            running.start()
            found = wait_condition(kubectl, "DriftDetected", "False", "TargetsMissed")
            since = found["status"]["tuning"]["drift"]["since"]
            assert runs(kubectl) == []
            # An operator that goes in the middle of it delays nothing: the next one's verdict looks back over the gap.
            running.stop()
            running.start()
            found = wait_condition(kubectl, "DriftDetected", "True", "RunCreated", timeout_s=WINDOW_S + 120)
            [name] = runs(kubectl)
            assert found["status"]["tuning"]["drift"] == {"since": since, "run": name}
            run = kubectl.get("trun", name)
            assert unix(run["metadata"]["creationTimestamp"]) >= unix(since) + WINDOW_S, "sooner than it may"
            assert run["spec"]["evaluator"] == "Live"
            assert name in condition(found, "DriftDetected")["message"]
            wait_until(lambda: "DriftDetected" in {event["reason"] for event in kubectl.items("events")})

            # Another operator, which has to hear of the targets anew, makes no other; nor when a person wants none.
            kubectl("delete", "trun", name)
            running.stop()
            running.start()
            wait_condition(kubectl, "SLOMet", "False")
            found = wait_condition(kubectl, "DriftDetected", "True", "RunCreated")
            assert found["status"]["tuning"]["drift"] == {"since": since, "run": name}
            assert runs(kubectl) == []
        finally:
            running.options = before


def runs(kubectl: Kubectl) -> list[str]:
    return [run["metadata"]["name"] for run in kubectl.items("trun")]


def counted(prometheus: str) -> float:
    """How many of them Prometheus says missed the first token's target within the window."""
    query = f'sum(increase(trimtab_slo_requests_total{{slo="ttft", outcome="violated"}}[{WINDOW_S}s]))'
    found = (
        httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, timeout=60)
        .raise_for_status()
        .json()["data"]["result"]
    )
    return float(found[0]["value"][1]) if found else 0.0
