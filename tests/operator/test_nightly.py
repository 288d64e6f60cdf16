"""The objects of a schedule: what is made, put right and taken away, what stops it, and how what is wrong with it is told."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from support.pods import T0
from support.services import BUDGET_PARAMETER, placed, resource
from trimtab_operator import names, support
from trimtab_operator.api import InferenceService
from trimtab_operator.api.status import Resolved
from trimtab_operator.plan import children, cluster, nightly
from trimtab_operator.plan.live import Switch
from trimtab_operator.plan.pods import rfc3339
from trimtab_operator.plan.tuner_pod import Tuner

Json = dict[str, Any]
SETTINGS = cluster.Settings(Resolved(image="engine:1"), tuner=Tuner("tuner:1"))
NOW = T0 + 1000


def scheduled(
    mode: str = "Apply", halt: str | None = None, suspend: bool = False, **fields: Any
) -> InferenceService:
    tuning = {"mode": mode, "parameters": [BUDGET_PARAMETER], "nightly": {"schedule": "30 3 * * *", **fields}}
    given = resource(tuning=tuning, suspend=suspend)
    return placed(given, halt)


def unscheduled() -> InferenceService:
    made = scheduled()
    return replace(made, spec=replace(made.spec, tuning=replace(made.spec.tuning, nightly=None)))


def decide(seen: cluster.Observed) -> cluster.Decision:
    return cluster.decide(seen, SETTINGS, NOW, rfc3339(NOW))


def tuning_ready(seen: cluster.Observed) -> tuple[str, str, str]:
    found = cluster.conclude(seen, decide(seen), NOW, rfc3339(NOW)).status.condition(names.TUNING_READY)
    assert found is not None
    return found.status, found.reason, found.message


def carried_out(service: InferenceService) -> cluster.Observed:
    """After one look, as a cluster without controllers would show it."""
    decision = decide(cluster.Observed(service))
    made = (*decision.changes.apply, *decision.nightly.apply)
    live = {(m["kind"], m["metadata"]["name"]): copy.deepcopy(m) for m in made}
    return cluster.Observed(service, children=live)


def cron_job(service: InferenceService) -> Json:
    return nightly.manifests(service, SETTINGS.tuner)[-1]


def words(service: InferenceService) -> list[str]:
    found: list[str] = cron_job(service)["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0][
        "args"
    ]
    return found


def test_a_schedule_is_a_cron_job_whose_account_may_create_runs_and_nothing_else() -> None:
    made = {m["kind"]: m for m in nightly.manifests(scheduled(), SETTINGS.tuner)}
    assert list(made) == ["Role", "ServiceAccount", "RoleBinding", "CronJob"], (
        "an account has its rights first"
    )
    assert {m["metadata"]["name"] for m in made.values()} == {"chat-nightly"}
    assert all(m["metadata"]["ownerReferences"][0]["uid"] == "u" for m in made.values())
    assert made["Role"]["rules"] == [
        {"apiGroups": ["serving.trimtab.dev"], "resources": ["tuningruns"], "verbs": ["create"]}
    ]
    spec = made["CronJob"]["spec"]
    assert (spec["concurrencyPolicy"], spec["successfulJobsHistoryLimit"]) == ("Forbid", 1)
    pod = spec["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "chat-nightly"
    assert pod["containers"][0]["image"] == "tuner:1"
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    codes = spec["jobTemplate"]["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert codes["containerName"] == pod["containers"][0]["name"]


def test_the_longest_name_of_a_service_is_a_cron_job_s_too() -> None:
    assert len(names.nightly("c" * names.MAX_SERVICE_NAME)) <= 52


@pytest.mark.parametrize(
    ("mode", "evaluator"),
    [("Off", "Simulator"), ("Recommend", "Simulator"), ("Canary", "Live"), ("Apply", "Live")],
)
def test_engines_are_touched_only_where_the_mode_allows_it(mode: str, evaluator: str) -> None:
    assert f"--evaluator={evaluator}" in words(scheduled(mode))


def test_what_a_user_wrote_is_no_variable_of_kubernetes() -> None:
    trace: Json = {"workload": "Trace", "traceRef": {"name": "t", "key": "$(JOB_NAME)"}}
    assert "--trace-key=$$(JOB_NAME)" in words(scheduled(**trace))
    assert "--job=$(JOB_NAME)" in words(scheduled(**trace))


@pytest.mark.parametrize(
    "quiet",
    [
        scheduled(suspend=True),
        scheduled(halt="paused"),
        scheduled(halt="reverted"),
        scheduled(halt="a word that nobody knows"),
    ],
    ids=["the service is suspended", "paused", "reverted", "unknown"],
)
def test_no_run_is_made_of_a_service_that_is_suspended_or_whose_tuning_is_held(
    quiet: InferenceService,
) -> None:
    [made] = [m for m in decide(cluster.Observed(quiet)).nightly.apply if m["kind"] == "CronJob"]
    assert made["spec"]["suspend"] is True
    [fleet] = [
        m
        for m in decide(cluster.Observed(scheduled(), fleet=Switch("paused", "x"))).nightly.apply
        if m["kind"] == "CronJob"
    ]
    assert fleet["spec"]["suspend"] is True
    assert cron_job(scheduled())["spec"]["suspend"] is False


def test_at_rest_nothing_is_changed_and_an_edit_by_hand_is_put_right() -> None:
    seen = carried_out(scheduled())
    assert decide(seen).nightly == children.Changes()
    assert decide(seen).changes == children.Changes(), (
        "the schedule's objects are none of the others' business"
    )
    live = dict(seen.children)
    live[("Role", "chat-nightly")]["rules"][0]["verbs"].append("delete")
    del live[("RoleBinding", "chat-nightly")]
    again = decide(replace(seen, children=live)).nightly
    assert [m["kind"] for m in again.apply] == ["Role", "RoleBinding"]
    assert again.drifted == ("rules[0].verbs", None)


def test_all_of_it_goes_with_the_schedule() -> None:
    seen = replace(carried_out(scheduled()), service=unscheduled())
    decision = decide(seen)
    assert {item["kind"] for item in decision.nightly.delete} == {
        "CronJob",
        "Role",
        "RoleBinding",
        "ServiceAccount",
    }
    assert decision.nightly.delete[0]["kind"] == "CronJob", "no job starts with half an account"
    assert set(nightly.possible("chat")) <= decision.concerns("chat"), "what is deleted is read first"
    assert decide(cluster.Observed(unscheduled())).nightly == children.Changes()


def test_a_name_that_somebody_holds_is_told_and_stops_only_the_schedule() -> None:
    theirs = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": "chat-nightly", "namespace": "team"},
    }
    seen = cluster.Observed(scheduled(), children={("CronJob", "chat-nightly"): theirs})
    assert decide(seen).changes.taken == ()
    status, reason, message = tuning_ready(seen)
    assert (status, reason) == ("False", names.NAME_TAKEN)
    assert message.startswith("CronJob/chat-nightly: ")


@pytest.mark.parametrize(
    ("field", "text", "want"),
    [
        ("spec.schedule", 'Invalid value: "30 3 * * *": no such minute',
         "spec.tuning.nightly.schedule: '30 3 * * *' is not allowed; no such minute"),
        ("spec.timeZone", 'Invalid value: "Europe/Berlin": unknown time zone Europe/Berlin',
         "spec.tuning.nightly.timeZone: 'Europe/Berlin' is not allowed; unknown time zone Europe/Berlin"),
        ("spec.jobTemplate.spec", "no", "spec.tuning.nightly: CronJob is invalid"),
    ],
)  # fmt: skip
def test_what_only_the_api_server_can_judge_is_told_by_path_and_value(
    field: str, text: str, want: str
) -> None:
    service = scheduled(timeZone="Europe/Berlin")
    problem = nightly.refused(service, "CronJob is invalid", [(field, text)])
    assert problem == (names.INVALID_SPEC, want)
    assert tuning_ready(cluster.Observed(service, nightly_problem=problem)) == ("False", *problem)


def test_local_mode_says_that_it_starts_no_run() -> None:
    service = scheduled()
    drifting = replace(service.spec.tuning, drift=replace(service.spec.tuning.drift, enabled=True))
    both = replace(service, spec=replace(service.spec, tuning=drifting))
    assert [found.path for found in support.later(both, "local")] == [
        "spec.tuning.nightly",
        "spec.tuning.drift.enabled",
    ]
    assert support.later(both, "cluster") == ()
