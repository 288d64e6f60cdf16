"""A TuningRun's worker by the real Job controller, kubelet and RBAC: made once, with its own rights alone, and gone with its run."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from support.cluster.kubectl import Kubectl, KubectlError
from support.cluster.manifests import config_map
from support.cluster.story import (
    BUDGET,
    budgets,
    condition,
    engines,
    restarts,
    run_out,
    told,
    tuning_run,
    wait_until,
)
from support.cluster_operator import OperatorProcess
from trimtab_operator import names
from trimtab_operator.plan.pods import rfc3339
from trimtab_operator.plan.workers import FINISHED, PARTING_S

Json = dict[str, Any]
RESOURCES = {"requests": {"cpu": "100m"}, "limits": {"memory": "256Mi"}}
OPERATOR_OPTIONS = (
    "--tuner-image",
    "registry.example/trimtab-stand-in:1",
    "--worker-resources",
    json.dumps(RESOURCES),
)
WORKER = "roles,rolebindings,serviceaccounts,secrets,jobs,pods"
RUN = "serving.trimtab.dev/run"


def wait_run(kubectl: Kubectl, name: str, reason: str, timeout_s: float = 120.0) -> Json:
    """Until Ready has that reason → the run."""
    return kubectl.wait_for(
        reason,
        "trun",
        name,
        condition=lambda r: condition(r, "Ready")["reason"] == reason,
        timeout_s=timeout_s,
    )


def wait_run_said(kubectl: Kubectl, name: str, words: str) -> Json:
    """Until Ready says so → the run."""
    return kubectl.wait_for(
        words, "trun", name, condition=lambda r: words in condition(r, "Ready").get("message", "")
    )


def pods_of(kubectl: Kubectl, run: str) -> list[Json]:
    return kubectl.items("pods", "-l", f"{RUN}={run}")


def works(kubectl: Kubectl, run: str) -> bool:
    """Whether the run's worker is running."""
    return [pod["status"]["phase"] for pod in pods_of(kubectl, run)] == ["Running"]


def write_status(kubectl: Kubectl, run: str, **status: Any) -> None:
    """As the worker would."""
    kubectl(
        "patch", "trun", run, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status})
    )


def may(kubectl: Kubectl, run: str, verb: str, what: str, *options: str) -> bool:
    """Whether the run's account has a right."""
    account = f"--as=system:serviceaccount:{kubectl.namespace}:{run}-worker"
    return kubectl("auth", "can-i", verb, what, account, *options, check=False).strip() == "yes"


def test_a_run_has_one_worker_whatever_its_operator_does_and_none_after_its_result(
    chat: Kubectl, running: OperatorProcess
) -> None:
    chat.apply(tuning_run("waits-1"))
    wait_until(lambda: chat.items("jobs", "-l", f"{RUN}=waits-1"))
    running.stop(signal.SIGKILL)
    before = running.options
    # The next life is another version's: it has another image.
    running.options = tuple("registry.example/tuner:2" if "stand-in" in word else word for word in before)
    try:
        running.start()
        wait_until(lambda: works(chat, "waits-1"))
        found = wait_run(chat, "waits-1", "Running")
        [job] = chat.items("jobs")
        assert found["status"]["startTime"] == job["metadata"]["creationTimestamp"]
        [container] = job["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "registry.example/trimtab-stand-in:1", "not replaced by an upgrade"
        assert container["resources"] == RESOURCES
        wait_until(lambda: len(chat.items("jobs")) == len(pods_of(chat, "waits-1")) == 1)
    finally:
        running.stop()
        running.options = before
        running.start()

    # A result ends the run, and a worker that stays on.
    said = {
        "verdict": "KeptIncumbent",
        "message": "2 of 400 requests missed a target before, 3 after\nand more",
    }
    write_status(chat, "waits-1", result=said)
    over = wait_run(chat, "waits-1", "KeptIncumbent")
    ready = condition(over, "Ready")
    assert (over["status"]["phase"], ready["status"]) == ("Succeeded", "True")
    assert ready["message"] == (
        "nothing that was tried is surely better than what is in force: "
        "2 of 400 requests missed a target before, 3 after"
    )
    wait_until(lambda: pods_of(chat, "waits-1") == [], PARTING_S + 60)
    assert condition(chat.get("trun", "waits-1"), "Ready") == ready
    # An operator was killed in between, and each is told once.
    listed = told(chat, "waits-1")
    assert [listed.count(reason) for reason in ("RunStarted", "KeptIncumbent")] == [1, 1], listed


def test_a_worker_has_the_rights_that_it_needs_and_no_others(chat: Kubectl, running: OperatorProcess) -> None:
    chat.apply(tuning_run("waits-2"), tuning_run("waits-3"))
    wait_until(lambda: works(chat, "waits-2"))
    needed = [
        ("get", "inferenceservices.serving.trimtab.dev/chat"), ("get", "configmaps/chat-live"),
        ("get", "tuningruns.serving.trimtab.dev/waits-2"), ("list", "endpointslices.discovery.k8s.io"),
    ]  # fmt: skip
    assert [right for right in needed if not may(chat, "waits-2", *right)] == []
    assert may(chat, "waits-2", "patch", "tuningruns.serving.trimtab.dev/waits-2", "--subresource=status")
    too_much = [
        ("get", "inferenceservices.serving.trimtab.dev/other"), ("list", "inferenceservices.serving.trimtab.dev"),
        ("patch", "inferenceservices.serving.trimtab.dev/chat"), ("get", "configmaps/other"), ("list", "configmaps"),
        ("get", "tuningruns.serving.trimtab.dev/waits-3"), ("patch", "tuningruns.serving.trimtab.dev/waits-2"),
        ("create", "tuningruns.serving.trimtab.dev"), ("get", "secrets/waits-2-worker"), ("list", "secrets"),
        ("create", "secrets"), ("list", "pods"), ("create", "pods"), ("create", "jobs"), ("get", "deployments/chat-engine"),
        ("create", "roles"), ("create", "serviceaccounts/waits-2-worker"),
    ]  # fmt: skip
    assert [right for right in too_much if may(chat, "waits-2", *right)] == []
    assert not may(chat, "waits-2", "patch", "tuningruns.serving.trimtab.dev/waits-3", "--subresource=status")
    assert not may(chat, "waits-2", "get", "inferenceservices.serving.trimtab.dev/chat", "-n", "default")

    # What it says to engines: they may be read, and not be told anything.
    content = chat.get("secret", "waits-2-worker")["data"]["tokens.json"]
    tokens = json.loads(base64.b64decode(content))
    pods = engines(chat)
    assert set(tokens) == {pod["metadata"]["uid"] for pod in pods}
    url = f"http://{pods[0]['status']['podIP']}:8001/admin/live-config"
    shown = {"Authorization": f"Bearer {tokens[pods[0]['metadata']['uid']]}"}
    document = httpx.get(url, headers=shown)
    assert document.status_code == 200
    assert httpx.put(url, headers=shown, json=document.json()["incumbent"]).status_code == 403
    assert (
        httpx.get(url, headers={"Authorization": f"Bearer {tokens[pods[1]['metadata']['uid']]}"}).status_code
        == 401
    )

    # One acts at a time; the next one begins when the first is deleted, in the middle of a candidate.
    behind = wait_run(chat, "waits-3", names.WAITING_FOR_RUN)
    assert condition(behind, "Ready")["message"] == "run waits-2 of this service comes first"
    wait_until(lambda: told(chat, "waits-3") == [names.WAITING_FOR_RUN])
    until = rfc3339(time.time() + 110)
    write_status(
        chat, "waits-2", candidate={"trial": 0, "config": {"maxNumBatchedTokens": 128}, "until": until}
    )
    wait_until(lambda: budgets(running, chat) == [128, 128])
    chat("delete", "trun", "waits-2")
    wait_until(lambda: budgets(running, chat) == [BUDGET, BUDGET])
    wait_until(lambda: chat.items(WORKER, "-l", f"{RUN}=waits-2") == [])
    wait_until(lambda: works(chat, "waits-3"))
    wait_until(lambda: {"RunStarted", names.WAITING_FOR_RUN} <= set(told(chat, "waits-3")))
    # A Job that somebody deletes is made again, with fresh tokens: those that are there may not be read.
    [job] = chat.items("jobs", "-l", f"{RUN}=waits-3")
    chat("delete", "job", job["metadata"]["name"])
    wait_until(lambda: len(pods_of(chat, "waits-3")) == 1 and works(chat, "waits-3"))
    [again] = chat.items("jobs", "-l", f"{RUN}=waits-3")
    assert again["metadata"]["uid"] != job["metadata"]["uid"]
    [mounted] = [v for v in again["spec"]["template"]["spec"]["volumes"] if v["name"] == "tokens"]
    assert mounted["secret"]["secretName"] in {
        s["metadata"]["name"] for s in chat.items("secrets", "-l", f"{RUN}=waits-3")
    }


def test_a_worker_that_fails_ends_its_run_with_its_last_words_and_the_next_run_begins(chat: Kubectl) -> None:
    chat.apply(tuning_run("fails-1"))
    chat.apply(tuning_run("waits-4"))
    found = wait_run(chat, "fails-1", names.WORKER_FAILED)
    said = "its worker failed: exit status 2: no request was recorded"
    assert found["status"]["phase"] == "Failed"
    assert condition(found, "Ready")["message"] == condition(found, "Stalled")["message"] == said
    assert {"RunStarted", names.WORKER_FAILED} <= set(told(chat, "fails-1"))
    assert said in chat("describe", "trun", "fails-1").rpartition("Events:")[2]
    wait_until(lambda: works(chat, "waits-4"))
    assert len(pods_of(chat, "fails-1")) == 1, "it is not tried again"


@contextlib.contextmanager
def other_options(running: OperatorProcess) -> Iterator[Callable[..., None]]:
    """Within the block the operator can be started anew with other options, as by an upgrade of the release; afterwards it has its own."""
    before = running.options

    def start(**options: str) -> None:
        words = list(before)
        for name, value in options.items():
            words[words.index(f"--{name.replace('_', '-')}") + 1] = value
        running.stop()
        running.options = tuple(words)
        running.start()

    try:
        yield start
    finally:
        if running.options != before:
            running.stop()
            running.options = before
            running.start()


def lives(kubectl: Kubectl) -> set[tuple[str, int]]:
    """Of the engines: what a worker that cannot run has no effect on."""
    return {(pod["metadata"]["uid"], restarts(pod)) for pod in engines(kubectl)}


def test_what_keeps_a_worker_from_starting_stands_in_its_run(chat: Kubectl, running: OperatorProcess) -> None:
    before = lives(chat)
    chat("annotate", "infsvc", "chat", f"{names.ANNOTATION_TUNING}=paused")
    with other_options(running) as start:
        start(tuner_image="registry.example/absent:1")
        chat.apply(tuning_run("waits-5"))
        paused = wait_run(chat, "waits-5", names.TUNING_PAUSED)
        assert "startTime" not in paused["status"]
        assert chat.items("jobs", "-l", f"{RUN}=waits-5") == []
        chat("annotate", "infsvc", "chat", f"{names.ANNOTATION_TUNING}-")
        found = wait_run(chat, "waits-5", names.IMAGE_PULL_FAILED)
        assert condition(found, "Stalled")["status"] == "True"
        said = condition(found, "Stalled")["message"]
        assert said.startswith("its worker's pod: image registry.example/absent:1: ImagePullBackOff: ")
        assert said.endswith("; it is the operator's --tuner-image (the chart's images.tuner)")
    # The next release has it right, and the same run goes on.
    wait_until(lambda: works(chat, "waits-5"))
    going = wait_run(chat, "waits-5", "Running")
    assert condition(going, "Stalled")["status"] == "False"
    assert going["status"]["startTime"] == found["status"]["startTime"], "its time limit counts on"
    assert lives(chat) == before
    # Its mind is changed, and the worker is gone.
    chat("annotate", "trun", "waits-5", f"{names.ANNOTATION_WORKER}=none")
    wait_until(lambda: chat.items("jobs,pods", "-l", f"{RUN}=waits-5") == [])


def test_a_worker_that_fits_on_no_node_or_is_killed_for_memory_says_so_until_another_takes_its_place(
    chat: Kubectl, running: OperatorProcess
) -> None:
    before = lives(chat)
    with other_options(running) as start:
        start(tuner_image="trimtab/tuner:1", worker_resources='{"requests": {"memory": "1Ti"}}')
        chat.apply(tuning_run("big-1"), tuning_run("big-2", evaluator="Simulator"))
        found = wait_run(chat, "big-1", names.UNSCHEDULABLE)
        said = condition(found, "Ready")["message"]
        asks = "; it asks for memory 1Ti, by the operator's --worker-resources (the chart's worker.resources)"
        assert said.startswith("its worker's pod: ")
        assert "Insufficient memory" in said
        assert said.endswith(asks)
        assert (found["status"]["phase"], condition(found, "Stalled")["status"]) == ("Pending", "False")
        # Nobody mends it before its time is over: then too it says what it was about.
        over = run_out(chat, "big-1")
        stalled = condition(over, "Stalled")
        assert (over["status"]["phase"], stalled["reason"]) == ("Stopped", names.TIME_LIMIT_REACHED)
        until = "spec.timeLimit (2h) is over without a result; until then its worker's pod: "
        assert stalled["message"].startswith(until)
        assert stalled["message"].endswith(asks)
        wait_until(lambda: chat.items("jobs,pods", "-l", f"{RUN}=big-1") == [])
        wait_run(chat, "big-2", names.UNSCHEDULABLE)

        # Somebody means it too well.
        start(tuner_image="trimtab/tuner:1", worker_resources='{"limits": {"memory": "24Mi"}}')
        killed = "its worker is started again: was killed: out of memory (OOMKilled); raise its memory limit"
        told = wait_run_said(chat, "big-2", killed)
        assert told["status"]["phase"] == "Pending"
        # At last it is given enough, comes to a result, and that is all that the service saw of it.
        start(tuner_image="trimtab/tuner:1", worker_resources='{"limits": {"memory": "2Gi"}}')
        ended = chat.wait_for("over", "trun", "big-2", condition=lambda r: r["status"]["phase"] in FINISHED)
        assert ended["status"]["phase"] == "Succeeded", json.dumps(ended["status"], indent=1)
        assert "send it traffic first" in condition(ended, "Ready")["message"]
    assert lives(chat) == before


def test_a_quota_without_room_for_a_workers_pod_is_told_and_the_run_goes_on_once_it_is_lifted(
    chat: Kubectl,
) -> None:
    before, none = lives(chat), {"pods": "0"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "full"}, "spec": {"hard": none}}  # fmt: skip
    chat.apply(quota)
    try:
        chat.wait_for("counted", "resourcequota", "full", condition=lambda q: q.get("status", {}).get("hard") == none)  # fmt: skip
        chat.apply(tuning_run("waits-7"))
        found = wait_run(chat, "waits-7", names.PODS_NOT_CREATED)
        said = condition(found, "Ready")["message"]
        assert said.startswith("its worker's pod is not made: ")
        assert 'pods "waits-7-worker-…" is forbidden: exceeded quota: full, requested: pods=1' in said
        assert (found["status"]["phase"], condition(found, "Stalled")["status"]) == ("Pending", "False")
    finally:
        chat("delete", "resourcequota", "full")
    wait_until(lambda: works(chat, "waits-7"), 120)
    wait_run(chat, "waits-7", "Running")
    assert lives(chat) == before


def test_a_trace_that_is_not_there_is_named_and_a_worker_begins_once_it_is(chat: Kubectl) -> None:
    workload = {"type": "Trace", "traceRef": {"name": "traffic", "key": "monday.jsonl"}}
    chat.apply(tuning_run("waits-6", workload=workload))
    found = wait_run(chat, "waits-6", names.FAILED_MOUNT)
    assert '"traffic" not found' in condition(found, "Ready")["message"]
    assert condition(found, "Stalled")["status"] == "False"
    chat.apply(config_map("traffic", **{"sunday.jsonl": "{}"}))
    told = wait_run_said(chat, "waits-6", "monday.jsonl")
    assert condition(told, "Ready")["reason"] == names.FAILED_MOUNT
    chat.apply(config_map("traffic", **{"monday.jsonl": "{}"}))
    wait_until(lambda: works(chat, "waits-6"))
    wait_run(chat, "waits-6", "Running")


def test_the_operator_can_grant_no_more_than_it_has(chat: Kubectl, running: OperatorProcess) -> None:
    mine = Kubectl(chat.program, running.kubeconfig, chat.namespace)
    rules = [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "more"},
        "rules": rules,
    }
    with pytest.raises(KubectlError, match="attempting to grant RBAC permissions not currently held"):
        mine("create", "-f", "-", stdin=json.dumps(role))
    chat.apply(role)  # by an administrator
    with pytest.raises(KubectlError, match="attempting to grant RBAC permissions not currently held"):
        mine("create", "rolebinding", "more", "--role=more", "--serviceaccount=default:default")
