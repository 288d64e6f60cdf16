"""A service that leaves its targets gets one run: real requests, a real engine's counters, a real Prometheus, a real API server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx

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
from support.cluster_operator import OperatorProcess
from support.prometheus import start_prometheus
from trimtab_operator.plan.pods import rfc3339

Json = dict[str, Any]
WINDOW_S = 60  # the shortest that there is


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
    with start_prometheus([f"http://{pod['status']['podIP']}:8000/metrics"], labels=labels) as prometheus:
        running.stop()
        running.options = (*before, "--prometheus-url", prometheus)
        try:
            running.start()
            missed(kubectl, url)
            wait_condition(kubectl, "DriftDetected", "False", "TargetsMissed")
            assert runs(kubectl) == []
            # As if it had gone on for that long, seen by the operators before this one.
            since = rfc3339(time.time() - 2 * WINDOW_S)
            patch = json.dumps({"status": {"tuning": {"drift": {"since": since}}}})
            kubectl("patch", "infsvc", "chat", "--subresource=status", "--type=merge", "-p", patch)
            found = wait_condition(kubectl, "DriftDetected", "True", "RunCreated")
            [name] = runs(kubectl)
            assert found["status"]["tuning"]["drift"] == {"since": since, "run": name}
            run = kubectl.get("trun", name)
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
            if running.process is not None and running.process.poll() is None:
                running.stop()
            running.options = before
            running.start()


def runs(kubectl: Kubectl) -> list[str]:
    return [run["metadata"]["name"] for run in kubectl.items("trun")]


def missed(kubectl: Kubectl, url: str) -> None:
    """Requests until SLOMet is False."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 1}

    def violated() -> bool:
        for _ in range(10):
            httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        return bool(condition(kubectl.get("infsvc", "chat"), "SLOMet")["status"] == "False")

    wait_until(violated, timeout_s=120)
