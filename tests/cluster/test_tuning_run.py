"""A TuningRun on real engines under real traffic: kubectl create, and what its worker makes of it, whatever happens to it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster.cluster import Cluster
from support.cluster.faults import kill, tuning_worker
from support.cluster.kubectl import Kubectl
from support.cluster.story import (
    LEASE_S,
    address,
    condition,
    engines,
    read_back,
    restarts,
    run_out,
    service,
    told,
    wait_ready,
    wait_until,
)
from support.cluster.two_classes import INTERACTIVE, TARGET_S, TwoClasses
from support.cluster_operator import OperatorProcess
from support.prometheus import start_prometheus
from trimtab_operator import names

Json = dict[str, Any]
RUN_S = 600.0  # at rest a run takes less than a minute
MARGIN_S = 60.0
# Of a run whose verdict matters: several times the backlog. What waits since before a change of config belongs to neither side, and a
# quarter of a slice is dropped for it.
SLICE = {"slice": "5s"}
KNOB = [{"name": "schedulingPolicy", "choices": ["fcfs", "sla-aware"]}]
# What tokens a second say on a machine that others use is no matter here.
TUNING = {"mode": "Apply", "parameters": KNOB, "limits": {"maxThroughputLoss": "90%"}}
OVER = ("Succeeded", "Failed", "Stopped")


def slo(target_s: float = TARGET_S) -> Json:
    """One class in a hurry; everybody else has an hour."""
    return {
        "ttft": "1h",
        "itl": "1h",
        "window": "1m",
        "classes": [{"name": INTERACTIVE, "ttft": f"{round(1000 * target_s)}ms"}],
    }


@pytest.fixture(scope="module")
def served(
    chat_namespace: Kubectl, running: OperatorProcess, model: Path
) -> Iterator[tuple[Kubectl, TwoClasses]]:
    """Two replicas that take one request at a time, and more clients than that; the target is missed by who queues."""
    wanted = service(model, replicas=2, tuning=TUNING, slo=slo())
    wanted["spec"]["engine"]["maxNumSeqs"] = 1
    chat_namespace.apply(wanted)
    wait_ready(chat_namespace, timeout_s=150)
    metrics = [f"http://{pod['status']['podIP']}:8000/metrics" for pod in engines(chat_namespace)]
    with TwoClasses(address(chat_namespace), metrics) as traffic:
        traffic.wait_backlog()
        yield chat_namespace, traffic


@pytest.fixture
def busy(served: tuple[Kubectl, TwoClasses]) -> tuple[Kubectl, TwoClasses]:
    """The service and its traffic, without a run of the test before: the oldest acts, and others wait."""
    served[0]("delete", "trun", "--all")
    served[1].wait_backlog()
    return served


def patch(kubectl: Kubectl, **spec: Any) -> None:
    """A person edits the service."""
    kubectl("patch", "infsvc", "chat", "--type=merge", "-p", json.dumps({"spec": spec}))


def in_force(running: OperatorProcess, kubectl: Kubectl) -> list[Json]:
    """The live document in force in each engine, read back from it."""
    return [read_back(running, pod)["in_force"] for pod in engines(kubectl)]


def policies(running: OperatorProcess, kubectl: Kubectl) -> list[str]:
    """The policy in force in each engine."""
    return sorted(document["config"]["scheduling_policy"] for document in in_force(running, kubectl))


def create(kubectl: Kubectl, name: str, *, worker: bool = True, **spec: Any) -> None:
    """As a person does. `worker` False: the operator makes none, the test starts it itself."""
    annotations = {} if worker else {"serving.trimtab.dev/worker": "none"}
    run = {
        "apiVersion": "serving.trimtab.dev/v1alpha1",
        "kind": "TuningRun",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"service": "chat", "maxTrials": 1, "timeLimit": "30m", "workload": {"slice": "2s"}, **spec},
    }
    kubectl("create", "-f", "-", stdin=json.dumps(run))


def wait_over(kubectl: Kubectl, name: str) -> Json:
    """Until the run is over → its status."""
    found = kubectl.wait_for("over", "trun", name, timeout_s=RUN_S, condition=lambda r: r.get("status", {}).get("phase") in OVER)  # fmt: skip
    status: Json = found["status"]
    return status


def wait_tried(kubectl: Kubectl, name: str) -> None:
    """Until a candidate of the run is in force wherever it is to be tried."""

    def tried(run: Json) -> bool:
        pods = str(run.get("status", {}).get("applied", {}).get("pods", "0/0"))
        have, _, wanted = pods.partition("/")
        return have == wanted != "0"

    kubectl.wait_for("tried", "trun", name, timeout_s=120, condition=tried)


@contextlib.contextmanager
def worker_process(
    cluster: Cluster, kubectl: Kubectl, name: str, log: Path, *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The worker as a process of this test, killed at the end if it still runs."""
    command = [str(Path(sys.executable).parent / "trimtab-tuner"), "work", "--kubeconfig", str(cluster.kubeconfig),
               "--namespace", kubectl.namespace, "--run", name, *options]  # fmt: skip
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def row(table: str, name: str) -> dict[str, str]:
    """The run's row of `kubectl get trun` by its headings, which stand above their columns."""
    heading, *lines = table.splitlines()
    line = next(line for line in lines if line.startswith(f"{name} "))
    starts = [
        heading.index(word) for word in heading.replace("P99 ITL", "P99_ITL").split() if word != "P99_ITL"
    ]
    starts = sorted([*starts, heading.index("P99 ITL")])
    ends = [*starts[1:], None]
    return {heading[a:b].strip(): line[a:b].strip() for a, b in zip(starts, ends, strict=True)}


def test_a_canary_is_measured_by_prometheus_on_one_pod_and_never_promoted(
    busy: tuple[Kubectl, TwoClasses], running: OperatorProcess, cluster: Cluster, tmp_path: Path
) -> None:
    kubectl, traffic = busy
    patch(kubectl, tuning={"mode": "Canary"})
    pods = {
        f"http://{pod['status']['podIP']}:8000/metrics": {"namespace": kubectl.namespace, "pod": pod["metadata"]["name"]}
        for pod in engines(kubectl)
    }  # fmt: skip
    create(kubectl, "canary", worker=False, workload=SLICE)
    log = tmp_path / "log"
    with (
        start_prometheus(pods, interval_s=0.5) as url,
        worker_process(cluster, kubectl, "canary", log, "--prometheus", url) as worker,
    ):
        wait_until(lambda: policies(running, kubectl) == ["fcfs", "sla-aware"], 120, "never on one pod alone")
        assert worker.wait(RUN_S) == 0, log.read_text()
    status = wait_over(kubectl, "canary")
    assert "metrics prometheus, interval_s 0.5" in log.read_text()
    assert status["result"]["verdict"] == "Recommended", log.read_text()
    assert status["result"]["config"]["schedulingPolicy"] == "sla-aware"
    assert (status["result"]["before"]["pods"], status["result"]["after"]["pods"]) == (2, 1)
    assert policies(running, kubectl) == ["fcfs", "fcfs"]
    assert "recommendation" not in kubectl.get("infsvc", "chat")["status"]["tuning"]
    assert traffic.failed == []


def test_a_worker_gives_its_candidate_back_goes_on_and_leaves_with_its_run(
    busy: tuple[Kubectl, TwoClasses], running: OperatorProcess, cluster: Cluster, tmp_path: Path
) -> None:
    kubectl, traffic = busy
    patch(kubectl, tuning={"mode": "Apply"})
    create(kubectl, "moved", worker=False, maxTrials=3, workload={"slice": "8s"})
    log = tmp_path / "log"
    with worker_process(cluster, kubectl, "moved", log) as first:
        wait_tried(kubectl, "moved")
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 128 + signal.SIGTERM, log.read_text()
    kubectl.wait_for("given back", "trun", "moved", condition=lambda r: "candidate" not in r["status"])
    wait_until(lambda: policies(running, kubectl) == ["fcfs", "fcfs"])
    [cut_off] = kubectl.get("trun", "moved")["status"]["trials"]
    assert (cut_off["number"], cut_off["state"]) == (0, "Running")
    with worker_process(cluster, kubectl, "moved", log) as second:
        kubectl.wait_for("taken over", "trun", "moved", condition=lambda r: r["status"]["trials"][0]["state"] == "Failed")  # fmt: skip
        assert "its worker was replaced" in kubectl.get("trun", "moved")["status"]["trials"][0]["message"]
        wait_tried(kubectl, "moved")
        numbers = [(t["number"], t["state"]) for t in kubectl.get("trun", "moved")["status"]["trials"]]
        assert numbers[:2] == [(0, "Failed"), (1, "Running")]
        # A quiet time cuts the trial short, which does not count, and the worker waits for its end.
        quiet = [{"schedule": "* * * * *", "duration": "1h"}]
        patch(kubectl, tuning={"limits": {"notDuring": quiet}})
        wait_until(lambda: policies(running, kubectl) == ["fcfs", "fcfs"])
        wait_until(lambda: "waiting" in log.read_text() and "notDuring[0]" in log.read_text(), 120)
        found = kubectl.wait_for("cut short", "trun", "moved",
                                 condition=lambda r: all(t["state"] != "Running" for t in r["status"]["trials"]))  # fmt: skip
        kept = found["status"]["trials"]
        assert [t["state"] for t in kept] == ["Failed", *["Complete"] * (len(kept) - 1)], kept
        assert names.QUIET_TIME in told(kubectl, "moved")
        patch(kubectl, tuning={"limits": {"notDuring": None}})
        wait_tried(kubectl, "moved")
        last = kubectl.get("trun", "moved")["status"]["trials"][-1]
        assert (last["number"], last["state"]) == (len(kept), "Running"), "the same number again"
        # The service would take requests for a minute; a candidate is in force and its lease is renewed, and the API server goes.
        cluster.control_plane.restart("kube-apiserver")
        kubectl("delete", "trun", "moved")
        assert second.wait(120) == 0, log.read_text()
    assert "TuningRun moved was deleted" in log.read_text()
    wait_until(lambda: policies(running, kubectl) == ["fcfs", "fcfs"])
    assert traffic.failed == []


def test_a_run_whose_time_is_over_gives_its_candidate_back_and_the_next_one_acts(
    busy: tuple[Kubectl, TwoClasses], running: OperatorProcess
) -> None:
    kubectl, traffic = busy
    patch(kubectl, tuning={"mode": "Apply"})
    create(kubectl, "late", maxTrials=3, workload={"slice": "8s"})
    create(kubectl, "next", maxTrials=3, workload={"slice": "8s"})
    wait_tried(kubectl, "late")
    wait_until(lambda: policies(running, kubectl) == ["sla-aware", "sla-aware"])
    ended = run_out(kubectl, "late")
    ready, stalled = condition(ended, "Ready"), condition(ended, "Stalled")
    said = "spec.timeLimit (30m) is over without a result"
    assert (ended["status"]["phase"], stalled["status"]) == ("Stopped", "True")
    assert (ready["status"], ready["reason"], ready["message"]) == ("False", names.TIME_LIMIT_REACHED, said)

    def given_back() -> bool:
        told = [read_back(running, pod) for pod in engines(kubectl)]
        return [(t["candidate"], t["in_force"]["config"]["scheduling_policy"]) for t in told] == [(None, "fcfs")] * 2  # fmt: skip

    wait_until(given_back)
    # Its worker gives the candidate back itself, and is gone with its Job.
    wait_until(lambda: kubectl.items("jobs,pods", "-l", "serving.trimtab.dev/run=late") == [])
    assert {"candidate", "applied", "result"} & set(kubectl.get("trun", "late")["status"]) == set()
    # The next one's worker was not made before, and finds its way by itself.
    wait_tried(kubectl, "next")
    assert condition(kubectl.get("trun", "late"), "Ready") == ready
    assert traffic.failed == []


def test_a_better_config_is_found_under_traffic_and_promoted_although_a_worker_was_killed(
    busy: tuple[Kubectl, TwoClasses], running: OperatorProcess
) -> None:
    kubectl, traffic = busy
    patch(kubectl, tuning={"mode": "Apply"})
    before = {pod["metadata"]["uid"] for pod in engines(kubectl)}
    create(kubectl, "try", maxTrials=2, workload=SLICE)
    wait_tried(kubectl, "try")
    [pod] = kubectl.items("pods", "-l", "serving.trimtab.dev/run=try")
    kill(tuning_worker(pod))
    wait_until(
        lambda: policies(running, kubectl) == ["fcfs", "fcfs"], LEASE_S + MARGIN_S, "the candidate stays"
    )
    status = wait_over(kubectl, "try")
    result, shown = status["result"], json.dumps(status, indent=1)
    assert result["verdict"] == "Applied", shown
    assert result["config"] == {"schedulingPolicy": "sla-aware", "maxNumBatchedTokens": 512, "maxNumSeqs": 1,
                                "longPrefillTokenThreshold": 0}  # fmt: skip
    # The numbers are there, and say what the verdict says.
    old, new = result["before"], result["after"]
    assert min(old["requests"], new["requests"]) >= 300
    assert new["violatedFractionHigh"] < old["violatedFractionLow"], shown
    assert old["p99ItlSecondsLow"] <= old["p99ItlSeconds"] <= old["p99ItlSecondsHigh"]
    assert result["diagnosis"]
    assert "e-value" in result["message"]
    assert len(status["trials"]) in (1, 2), "the killed one may have been at its end"
    assert status["trials"][-1]["state"] == "Complete"
    # In force in every pod, for good, without a restart or a failed request.
    wait_until(lambda: policies(running, kubectl) == ["sla-aware", "sla-aware"])
    assert {document["source"] for document in in_force(running, kubectl)} == {"Recommendation"}
    assert kubectl.get("infsvc", "chat")["status"]["tuning"]["recommendation"]["run"] == "try"
    assert {pod["metadata"]["uid"]: restarts(pod) for pod in engines(kubectl)} == dict.fromkeys(before, 0)
    assert traffic.failed == []
    # What `kubectl describe` says: its beginning and its end, and not that one worker replaced another.
    listed = told(kubectl, "try")
    assert [listed.count(reason) for reason in ("RunStarted", "Applied")] == [1, 1], listed
    # A page of a lab notebook.
    line = row(kubectl("get", "trun"), "try")
    assert {key: line[key] for key in ("SERVICE", "PHASE", "REASON", "CANDIDATE", "VERDICT")} == {
        "SERVICE": "chat", "PHASE": "Succeeded", "REASON": "Applied", "CANDIDATE": "-", "VERDICT": "Applied"}  # fmt: skip
    assert line["TRIALS"] == str(len(status["trials"]))
    assert line["INCUMBENT"] == "512/fcfs"
    first, _, second = line["P99 ITL"].partition(" → ")
    assert (first[-2:], second[-2:]) == ("ms", "ms"), line


def test_a_trace_is_replayed_to_the_service_on_top_of_its_traffic(busy: tuple[Kubectl, TwoClasses]) -> None:
    kubectl, traffic = busy
    lines = [
        json.dumps({"arrival_s": number / 20, "prompt_tokens": 8, "output_tokens": 4}) for number in range(60)
    ]
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "trace"},
        "data": {"trace.jsonl": "\n".join(lines)},
    }
    kubectl.apply(config_map)
    # An hour for everybody: there is nothing to gain, so the incumbent's measurement decides.
    patch(kubectl, slo=slo(3600))
    create(kubectl, "replay", workload={"type": "Trace", "traceRef": {"name": "trace"}})
    status = wait_over(kubectl, "replay")
    result = status["result"]
    assert result["verdict"] == "KeptIncumbent", json.dumps(status, indent=1)
    assert "nothing to gain" in result["message"]
    assert result["before"]["requests"] > 60, "the trace, and who came meanwhile"
    said = kubectl("logs", "-l", "serving.trimtab.dev/run=replay", "--tail=-1")
    assert "workload trace, requests 60" in said
    assert traffic.failed == []
