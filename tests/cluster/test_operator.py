"""The operator on the test cluster, with real engines: from apply to a drained pod, live changes and leases. Faults: `test_faults_*`."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.cluster.kubectl import Kubectl
from support.cluster.story import (
    CHILDREN,
    MAX_GAP_S,
    TUNABLE,
    budgets,
    condition,
    engines,
    read_back,
    service,
    start_run,
    told,
    wait_ready,
    wait_until,
)
from support.cluster_operator import OperatorProcess
from trimtab_operator import names

Json = dict[str, Any]
IN_FORCE_S = 10.0  # what is promised; a lease lasts longer


def test_apply_serve_edit_and_delete(kubectl: Kubectl, running: OperatorProcess, model: Path) -> None:
    kubectl.apply(service(model))
    ready = wait_ready(kubectl)
    assert ready["status"]["summary"]["replicas"] == "1/1"
    address = kubectl.get("service", "chat")["spec"]["clusterIP"]
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
    [pod] = engines(kubectl)
    patch = json.dumps({"spec": {"engine": {"maxNumBatchedTokens": 256}}})
    gaps: list[float] = []
    last, ending = time.monotonic(), ""
    with (
        ThreadPoolExecutor(1) as editor,
        httpx.stream("POST", f"http://{address}:8000/v1/completions", json=body, timeout=60) as stream,
    ):
        assert stream.status_code == 200
        for line in stream.iter_lines():
            if not line:
                continue
            gaps.append(time.monotonic() - last)
            last, ending = time.monotonic(), line
            if len(gaps) == 5:
                edit = editor.submit(kubectl, "patch", "infsvc", "chat", "--type=merge", "-p", patch)
        edit.result()
    assert ending == "data: [DONE]"
    assert max(gaps) < MAX_GAP_S, "no gap in the stream"
    wait_until(lambda: budgets(running, kubectl) == [256])
    status = kubectl.wait_for("applied", "infsvc", "chat",
                              condition=lambda r: r["status"]["engine"].get("applied", {}).get("maxNumBatchedTokens") == 256)["status"]  # fmt: skip
    assert status["engine"]["appliedReplicas"] == "1/1"
    [same] = engines(kubectl)
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    assert same["status"]["containerStatuses"][0]["restartCount"] == 0
    found = kubectl.get("infsvc", "chat")["metadata"]
    assert "finalizers" not in found
    assert not any("kopf" in key for key in found.get("annotations", {}))
    kubectl("delete", "infsvc", "chat", timeout_s=60)
    wait_until(lambda: kubectl.items(CHILDREN, "-l", "serving.trimtab.dev/inferenceservice=chat") == [])


def test_a_candidate_is_carried_out_renewed_and_ended_with_its_run(
    kubectl: Kubectl, running: OperatorProcess, model: Path
) -> None:
    kubectl.apply(service(model, tuning=TUNABLE))
    wait_ready(kubectl)
    start_run(kubectl, 128, 120)
    wait_until(lambda: budgets(running, kubectl) == [128])
    kubectl.wait_for(
        "applied", "trun", "chat-1", condition=lambda r: r["status"].get("applied", {}).get("pods") == "1/1"
    )
    until = read_back(running, engines(kubectl)[0])["candidate"]["until"]
    wait_until(lambda: read_back(running, engines(kubectl)[0])["candidate"]["until"] > until)
    kubectl("delete", "trun", "chat-1")
    assert wait_until(lambda: budgets(running, kubectl) == [512]) < IN_FORCE_S
    # A quiet time holds it back, and it goes on by itself afterwards.
    start_run(kubectl, 128, 300, name="chat-2")
    wait_until(lambda: budgets(running, kubectl) == [128])
    limit_tuning(kubectl, [{"schedule": "* * * * *", "duration": "1h", "timeZone": "Europe/Berlin"}])
    assert wait_until(lambda: budgets(running, kubectl) == [512]) < IN_FORCE_S
    waiting = kubectl.wait_for(
        "waiting", "trun", "chat-2", condition=lambda r: condition(r, "Ready")["reason"] == names.QUIET_TIME
    )
    assert "limits.notDuring[0] (* * * * *, Europe/Berlin)" in condition(waiting, "Ready")["message"]
    kubectl.wait_for("quiet", "infsvc", "chat", condition=lambda r: r["status"]["tuning"]["state"] == "Quiet")
    limit_tuning(kubectl, None)
    assert wait_until(lambda: budgets(running, kubectl) == [128]) < IN_FORCE_S
    # A person's word stops it as well.
    kubectl("annotate", "infsvc", "chat", "serving.trimtab.dev/tuning=paused")
    assert wait_until(lambda: budgets(running, kubectl) == [512]) < IN_FORCE_S
    # What came of it, as its worker would write it: each is told once, and stands where people look.
    stopped = {"number": 0, "state": "Pruned", "message": "the longest gap is 3 s"}
    write_run_status(kubectl, "chat-2", candidate=None, trials=[stopped])
    wait_until(lambda: "CandidatePruned" in told(kubectl, "chat-2"))
    kubectl("annotate", "infsvc", "chat", "serving.trimtab.dev/tuning-")
    write_run_status(kubectl, "chat-2", result={"verdict": "Inconclusive", "message": "too few requests"})
    kubectl.wait_for("over", "trun", "chat-2", condition=lambda r: r["status"]["phase"] == "Succeeded")
    listed = sorted(told(kubectl, "chat-2"))
    assert listed == [
        "CandidatePruned",
        names.CANDIDATE_REFUSED,
        "Inconclusive",
        names.QUIET_TIME,
        "RunStarted",
    ]
    shown = kubectl("describe", "trun", "chat-2").rpartition("Events:")[2]
    assert "limits.notDuring[0] (* * * * *, Europe/Berlin)" in shown
    assert "a guardrail ended trial 0: the longest gap is 3 s" in shown
    assert "too few requests" in shown


def write_run_status(kubectl: Kubectl, name: str, **status: Any) -> None:
    patch = json.dumps({"status": status})
    kubectl("patch", "trun", name, "--subresource=status", "--type=merge", "-p", patch)


def limit_tuning(kubectl: Kubectl, not_during: list[Json] | None) -> None:
    limits = {"spec": {"tuning": {"limits": {"notDuring": not_during}}}}
    kubectl("patch", "infsvc", "chat", "--type=merge", "-p", json.dumps(limits))


@pytest.mark.parametrize(
    ("change", "reason", "word"),
    [
        pytest.param({"engine": {"image": "registry.invalid/no-such-image:1"}}, "ImagePullFailed", "no-such-image", id="image"),
        pytest.param({"model": {"uri": "file:///models/no-such-model"}}, "ModelLoadFailed", "no-such-model", id="model"),
        pytest.param({"podTemplate": {"spec": {"restartPolicy": "Sometimes"}}}, "InvalidSpec", "spec.podTemplate.spec.restartPolicy: ",
                     id="template"),
        pytest.param({"podTemplate": {"spec": {"contaners": []}}}, "InvalidSpec", "spec.podTemplate.spec.contaners: ", id="pod's field"),
        pytest.param({"podTemplate": {"spec": {"containers": [{"name": "engin"}]}}}, "InvalidSpec",
                     "spec.podTemplate.spec.containers[engin].image: Required value; every container but `engine`", id="container"),
        pytest.param({"engine": {"runtime": "vllm"}}, "Unsupported", "spec.engine.runtime", id="not there yet"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_stalled_with_the_true_reason(
    kubectl: Kubectl, running: OperatorProcess, model: Path, change: Json, reason: str, word: str
) -> None:
    kubectl.apply(service(model, **change))
    found = kubectl.wait_for(
        "stalled", "infsvc", "chat", condition=lambda r: condition(r, "Stalled")["status"] == "True"
    )
    assert condition(found, "Stalled")["reason"] == reason
    assert word in condition(found, "Stalled")["message"]
    assert condition(found, "Ready")["status"] == "False"
    wait_until(lambda: reason in {e["reason"] for e in kubectl.items("events")})


def test_a_name_that_somebody_else_holds_is_left_alone(
    kubectl: Kubectl, running: OperatorProcess, model: Path
) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "chat"},
        "spec": {"ports": [{"port": 1}]},
    }
    kubectl.apply(theirs)
    before = kubectl.get("service", "chat")
    kubectl.apply(service(model))
    found = kubectl.wait_for(
        "stalled", "infsvc", "chat", condition=lambda r: condition(r, "Stalled")["status"] == "True"
    )
    assert condition(found, "Stalled")["reason"] == "NameTaken"
    assert "Service/chat" in condition(found, "Stalled")["message"]
    assert kubectl.get("service", "chat") == before
    assert kubectl.items("deployments") == []


def written(kubectl: Kubectl) -> dict[str, str]:
    """What an operator writes in this namespace, and at which version it is."""
    kinds = (
        "infsvc,deployments,services,serviceaccounts,configmaps,networkpolicies,poddisruptionbudgets,events"
    )
    return {
        f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"]
        for item in kubectl.items(kinds)
        if item["kind"] != "Event" or item["source"].get("component") == "trimtab-operator"
    }


def wait_for_resync(running: OperatorProcess) -> None:
    """Until all services have been listed once more."""
    line = "trimtab_operator_last_resync_timestamp_seconds"
    last = running.metric(line)
    wait_until(lambda: running.metric(line) > last, timeout_s=120)


def test_at_rest_nothing_is_written(kubectl: Kubectl, running: OperatorProcess, model: Path) -> None:
    kubectl.apply(service(model))
    wait_ready(kubectl)
    kubectl("wait", "infsvc/chat", "--for=condition=ConfigApplied", "--timeout=90s")
    for _ in range(3):  # the last event of the start may come late, but not for ever
        before = written(kubectl)
        # Looks are spread over half of the time to the next resync.
        wait_for_resync(running)
        wait_for_resync(running)
        after = written(kubectl)
        if after == before:
            break
    assert after == before
    assert running.healthy()
