"""People edit and delete what the operator made, or the service while it is being made; and pods that never get ready."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.cluster.kubectl import Kubectl
from support.cluster.story import (
    CHILDREN,
    OURS,
    address,
    budgets,
    condition,
    engines,
    restarts,
    service,
    wait_condition,
    wait_ready,
    wait_until,
)
from support.cluster.traffic import Traffic
from support.cluster_operator import OperatorProcess

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Child:
    """One kind of child, an edit of a field that is ours, and how to see that it was put right."""

    kind: str
    name: str
    edit: Json
    right: Callable[[Json], bool]


CHILDREN_OF_CHAT = (
    Child("serviceaccount", "chat-engine", {"automountServiceAccountToken": True},
          lambda found: found["automountServiceAccountToken"] is False),
    Child("configmap", "chat-live", {"data": {"live.json": "nonsense"}},
          lambda found: '"max_num_batched_tokens": 512' in found["data"]["live.json"]),
    Child("service", "chat", {"spec": {"selector": {"app": "nobody"}}},
          lambda found: OURS in found["spec"]["selector"] and "app" not in found["spec"]["selector"]),
    Child("networkpolicy", "chat-engine", {"spec": {"ingress": []}},
          lambda found: len(found["spec"]["ingress"]) == 2),
    Child("poddisruptionbudget", "chat-engine", {"spec": {"maxUnavailable": "100%"}},
          lambda found: found["spec"]["maxUnavailable"] == 1),
    Child("deployment", "chat-engine", {"spec": {"replicas": 3, "paused": True}},
          lambda found: found["spec"]["replicas"] == 2 and not found["spec"].get("paused")),
)  # fmt: skip
FOREIGN = "example.com/by-hand"


@pytest.mark.parametrize("child", CHILDREN_OF_CHAT, ids=lambda child: child.kind)
def test_a_child_that_is_edited_by_hand_is_put_right_and_a_foreign_field_is_left_alone(
    chat: Kubectl, running: OperatorProcess, child: Child
) -> None:
    uid = chat.get(child.kind, child.name)["metadata"]["uid"]
    chat("annotate", child.kind, child.name, f"{FOREIGN}=yes", "--overwrite")
    chat("label", child.kind, child.name, f"{FOREIGN}=yes", "--overwrite")
    chat("patch", child.kind, child.name, "--type=merge", "-p", json.dumps(child.edit))
    found = chat.wait_for("put right", child.kind, child.name, condition=child.right)
    assert found["metadata"]["uid"] == uid
    assert found["metadata"]["annotations"][FOREIGN] == "yes"
    assert found["metadata"]["labels"][FOREIGN] == "yes"


@pytest.mark.parametrize("child", CHILDREN_OF_CHAT, ids=lambda child: child.kind)
def test_a_child_that_is_deleted_by_hand_is_made_again(
    chat: Kubectl, running: OperatorProcess, child: Child
) -> None:
    uid = chat.get(child.kind, child.name)["metadata"]["uid"]
    chat("delete", child.kind, child.name)

    def is_again() -> bool:
        found = json.loads(chat("get", child.kind, "-o", "json"))["items"]
        return any(
            o["metadata"]["name"] == child.name and o["metadata"]["uid"] != uid and child.right(o)
            for o in found
        )

    wait_until(is_again, timeout_s=90)
    wait_ready(chat, timeout_s=150)


def test_foreign_fields_of_a_childs_spec_are_left_alone(chat: Kubectl, running: OperatorProcess) -> None:
    foreign: dict[tuple[str, str], Json] = {
        ("service", "chat"): {"sessionAffinity": "ClientIP"},
        ("deployment", "chat-engine"): {"minReadySeconds": 1},
    }
    for place, field in foreign.items():
        chat("patch", *place, "--type=merge", "-p", json.dumps({"spec": field}))
    # Something of ours afterwards: whoever applies it must not take the others away.
    chat("patch", "service", "chat", "--type=merge", "-p", '{"spec": {"selector": {"app": "nobody"}}}')
    chat("scale", "deployment", "chat-engine", "--replicas=3")
    chat.wait_for("put right", "service", "chat", condition=lambda s: "app" not in s["spec"]["selector"])
    chat.wait_for("two again", "deployment", "chat-engine", condition=lambda d: d["spec"]["replicas"] == 2)
    for place, field in foreign.items():
        assert field.items() <= chat.get(*place)["spec"].items()
        chat("patch", *place, "--type=merge", "-p", json.dumps({"spec": dict.fromkeys(field)}))


def test_a_field_that_forbids_ours_beside_it_is_put_right_too(
    chat: Kubectl, running: OperatorProcess
) -> None:
    other = '{"spec": {"maxUnavailable": null, "minAvailable": 2}}'
    chat("patch", "pdb", "chat-engine", "--type=merge", "-p", other)

    def is_right() -> bool:
        return [b["spec"].get("maxUnavailable") for b in chat.items("pdb")] == [1]

    wait_until(is_right)
    assert condition(wait_ready(chat), "Stalled")["status"] == "False"


def test_a_service_that_is_deleted_while_it_is_made_leaves_nothing(
    kubectl: Kubectl, running: OperatorProcess, model: Path
) -> None:
    said = running.log.stat().st_size
    moments: dict[str, Callable[[], bool]] = {
        "at once": lambda: True,
        "first child": lambda: bool(kubectl.items("serviceaccounts", "-l", OURS)),
        "service": lambda: bool(kubectl.items("services", "-l", OURS)),
        "deployment": lambda: bool(kubectl.items("deployments", "-l", OURS)),
        "pod": lambda: bool(kubectl.items("pods", "-l", OURS)),
    }
    for reached in moments.values():
        kubectl.apply(service(model, replicas=2))
        wait_until(reached)
        kubectl("delete", "infsvc", "chat", "--wait=false")
    wait_until(lambda: kubectl.items(CHILDREN, "-l", OURS) == [], timeout_s=120)
    assert kubectl.items("infsvc") == []
    assert running.process is not None
    assert running.process.poll() is None
    assert running.healthy()
    assert "Traceback" not in running.log.read_text()[said:]


def test_a_service_that_is_deleted_and_made_again_gets_children_of_its_own(
    kubectl: Kubectl, running: OperatorProcess, model: Path
) -> None:
    kubectl.apply(service(model))
    wait_until(lambda: kubectl.items("pods", "-l", OURS))
    kubectl("delete", "infsvc", "chat", "--wait=false")
    kubectl.apply(service(model))
    uid = wait_ready(kubectl, timeout_s=150)["metadata"]["uid"]
    owners = {o["metadata"]["ownerReferences"][0]["uid"] for o in kubectl.items(
        "deployments,services,serviceaccounts,configmaps,networkpolicies", "-l", OURS)}  # fmt: skip
    assert owners == {uid}


@pytest.mark.slow
def test_pods_that_never_get_ready_stall_the_rollout_with_the_reason_and_old_ones_serve_on(
    chat: Kubectl, running: OperatorProcess, model: Path
) -> None:
    before = {pod["metadata"]["uid"] for pod in engines(chat)}
    made = chat.get("infsvc", "chat")["spec"]
    companion = {"name": "companion", "image": "python:3", "args": ["-c", "import time; time.sleep(10000)"],
                 "readinessProbe": {"tcpSocket": {"port": 9}, "periodSeconds": 1},
                 "securityContext": {"runAsUser": 65532}}  # fmt: skip
    made["podTemplate"]["spec"]["containers"].append(companion)
    made["rollout"]["progressDeadline"] = "15s"
    with Traffic(address(chat)) as traffic:
        chat("patch", "infsvc", "chat", "--type=merge", "-p", json.dumps({"spec": made}))
        wait_condition(chat, "Reconciling", "True", "RolloutInProgress")
        wait_condition(chat, "Stalled", "True", "ProgressDeadlineExceeded", timeout_s=120)
        # At first the engine may be loading still, and the message says that.
        found = chat.wait_for("told", "infsvc", "chat",
                              condition=lambda r: "container companion" in condition(r, "Stalled").get("message", ""))  # fmt: skip
        assert condition(found, "Stalled")["reason"] == "ProgressDeadlineExceeded"
        assert condition(found, "Reconciling")["status"] == "False"
        assert condition(found, "Ready")["status"] == "False"
        assert condition(found, "Available")["status"] == "True"
        assert before <= {pod["metadata"]["uid"] for pod in engines(chat)}
        version = chat.get("infsvc", "chat")["metadata"]["resourceVersion"]
        looks = running.metric("trimtab_operator_reconcile_total")
        wait_until(lambda: running.metric("trimtab_operator_reconcile_total") > looks + 1)
        assert chat.get("infsvc", "chat")["metadata"]["resourceVersion"] == version, (
            "said once, not at every look"
        )
        # Taken back: Ready again, without a new pod.
        chat.apply(service(model, replicas=2, tuning=found["spec"]["tuning"]), options=("--force-conflicts",))
        wait_ready(chat)
        assert before == {pod["metadata"]["uid"] for pod in engines(chat)}
    traffic.check()
    assert [restarts(pod) for pod in engines(chat)] == [0, 0]
    assert budgets(running, chat) == [512, 512]
