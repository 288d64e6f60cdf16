"""A schedule in a cluster: the real CronJob controller, and jobs under the `restricted` level that make runs as the schedule says.

The service has no replica, so that nothing but the schedule runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster.kubectl import Kubectl
from support.cluster.story import OURS, TUNABLE, condition, service, wait_until
from support.cluster_operator import OperatorProcess

Json = dict[str, Any]
OBJECTS = "cronjobs,roles,rolebindings,serviceaccounts"
#: Says of a run that no worker is made for it: this is about what makes runs.
NO_WORKER = "serving.trimtab.dev/worker=none"


@pytest.fixture
def scheduled(kubectl: Kubectl, running: OperatorProcess, model: Path) -> Iterator[Kubectl]:
    """kubectl where `chat` has a schedule that comes once a minute, and its CronJob is there."""
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
    nightly = {"schedule": "* * * * *", "timeZone": "Europe/Berlin", "maxTrials": 3, "timeLimit": "5m",
               "workload": "Trace", "traceRef": {"name": "mine", "key": "t.jsonl"}}  # fmt: skip
    kubectl.apply(service(model, replicas=0, tuning={**TUNABLE, "nightly": nightly, "runHistoryLimit": 1}))
    wait_until(lambda: kubectl.items("cronjobs", "-l", OURS))
    yield kubectl
    kubectl("delete", "infsvc", "chat", "--ignore-not-found", timeout_s=60)


def run_of(kubectl: Kubectl, job: str) -> None:
    """What the README tells a person to do; until the job has ended well."""
    kubectl("create", "job", "--from=cronjob/chat-nightly", job)
    kubectl("wait", f"job/{job}", "--for=condition=Complete", "--timeout=120s", timeout_s=130)


def patch_service(kubectl: Kubectl, **tuning: Any) -> None:
    kubectl("patch", "infsvc", "chat", "--type=merge", "-p", json.dumps({"spec": {"tuning": tuning}}))


def test_the_schedule_and_a_person_s_job_make_runs_as_it_says(scheduled: Kubectl) -> None:
    run_of(scheduled, "try")
    made = scheduled.get("trun", "chat-try")
    assert made["spec"] | {"parameters": None} == {
        "service": "chat",
        "evaluator": "Live",
        "maxTrials": 3,
        "timeLimit": "5m",
        "workload": {"type": "Trace", "traceRef": {"name": "mine", "key": "t.jsonl"}},
        "parameters": None,
    }
    uid = scheduled.get("infsvc", "chat")["metadata"]["uid"]
    assert [owner["uid"] for owner in made["metadata"]["ownerReferences"]] == [uid]

    # A job that is made again has its run already, and makes no other.
    scheduled("delete", "job", "try")
    run_of(scheduled, "try")
    assert scheduled.get("trun", "chat-try")["metadata"]["uid"] == made["metadata"]["uid"]

    # And by itself, within a minute.
    def by_schedule() -> list[Json]:
        names = {run["metadata"]["name"]: run for run in scheduled.items("trun")}
        return [run for name, run in names.items() if name.removeprefix("chat-").isdigit()]

    wait_until(by_schedule, timeout_s=150)
    first = by_schedule()[0]
    assert first["spec"] == made["spec"]
    job = first["metadata"]["name"].replace("chat-", "chat-nightly-")
    assert scheduled.get("job", job)["metadata"]["ownerReferences"][0]["kind"] == "CronJob"


def test_what_is_edited_by_hand_is_put_right_and_a_hold_suspends_it(scheduled: Kubectl) -> None:
    def spec() -> Json:
        found: Json = scheduled.get("cronjob", "chat-nightly")["spec"]
        return found

    patch = json.dumps({"spec": {"schedule": "0 0 1 1 *", "concurrencyPolicy": "Allow"}})
    scheduled("patch", "cronjob", "chat-nightly", "--type=merge", "-p", patch)
    scheduled("delete", "rolebinding", "chat-nightly")
    more = [
        {
            "op": "add",
            "path": "/rules/-",
            "value": {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]},
        }
    ]
    scheduled("patch", "role", "chat-nightly", "--type=json", "-p", json.dumps(more))
    wait_until(lambda: (spec()["schedule"], spec()["concurrencyPolicy"]) == ("* * * * *", "Forbid"))
    wait_until(lambda: scheduled.items("rolebindings", "-l", OURS))
    wait_until(lambda: len(scheduled.get("role", "chat-nightly")["rules"]) == 1)

    scheduled("annotate", "infsvc", "chat", "serving.trimtab.dev/tuning=paused")
    wait_until(lambda: spec()["suspend"])
    scheduled("annotate", "infsvc", "chat", "serving.trimtab.dev/tuning-")
    wait_until(lambda: not spec()["suspend"])
    patch_service(scheduled, nightly={"schedule": "@weekly", "timeZone": None, "suspend": True})
    wait_until(
        lambda: (spec()["schedule"], spec().get("timeZone"), spec()["suspend"]) == ("@weekly", None, True)
    )


def test_finished_runs_of_the_schedule_do_not_pile_up(scheduled: Kubectl) -> None:
    patch_service(scheduled, nightly={"suspend": True})
    person = {"apiVersion": "serving.trimtab.dev/v1alpha1", "kind": "TuningRun", "metadata": {"name": "mine"},
              "spec": {"service": "chat"}}  # fmt: skip
    scheduled.apply(person)
    for job in ("one", "two"):
        run_of(scheduled, job)
    ended = json.dumps({"status": {"result": {"verdict": "KeptIncumbent"}}})
    for run in ("mine", "chat-one", "chat-two"):
        scheduled("patch", "trun", run, "--subresource=status", "--type=merge", "-p", ended)
    wait_until(lambda: "chat-one" not in names(scheduled))
    assert {"mine", "chat-two"} <= names(scheduled)


def names(kubectl: Kubectl) -> set[str]:
    return {run["metadata"]["name"] for run in kubectl.items("trun")}


def test_it_goes_with_the_field_whoever_watches_then(scheduled: Kubectl, running: OperatorProcess) -> None:
    # The operator is away when a person takes the schedule back: its next life finds what is left over.
    running.stop()
    try:
        patch_service(scheduled, nightly=None)
    finally:
        running.start()
    wait_until(
        lambda: (
            [o for o in scheduled.items(OBJECTS, "-l", OURS) if o["metadata"]["name"] == "chat-nightly"] == []
        )
    )
    assert condition(scheduled.get("infsvc", "chat"), "TuningReady")["status"] == "True"


def test_a_name_that_somebody_holds_stops_the_schedule_and_nothing_else(
    kubectl: Kubectl, running: OperatorProcess, model: Path
) -> None:
    theirs = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "chat-nightly"}}
    kubectl.apply(theirs)
    kubectl.apply(service(model, replicas=0, tuning={**TUNABLE, "nightly": {"schedule": "@daily"}}))
    found = kubectl.wait_for(
        "told", "infsvc", "chat", condition=lambda s: condition(s, "TuningReady")["status"] == "False"
    )
    told = condition(found, "TuningReady")
    assert told["reason"] == "NameTaken"
    assert "ServiceAccount/chat-nightly" in told["message"]
    assert condition(found, "Stalled")["status"] == "False"
    assert kubectl.items("deployments")
