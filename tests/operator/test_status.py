"""Conditions and status: truthful to kubectl wait and kstatus, independent of what Ready must not depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator

from support.services import BUDGET_PARAMETER, resource, service
from trimtab_operator import crds, names, schema
from trimtab_operator.api import InferenceService
from trimtab_operator.api.status import Condition, ServiceStatus
from trimtab_operator.conditions import kstatus, merge
from trimtab_operator.errors import Finding
from trimtab_operator.plan.live import live_document, live_values, recommend
from trimtab_operator.plan.rollout import Desired, Replica, RolloutStatus, SetStatus, plan
from trimtab_operator.plan.slo import Attainment
from trimtab_operator.plan.status import Facts, invalid_status, service_status

T0, T1 = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
NEW = Desired(template_hash="new", replicas=2, generation=3)


def rollout(desired: Desired, *replicas: Replica, now: float = 0.0) -> RolloutStatus:
    last = plan(desired, replicas, now)[-1]
    assert isinstance(last, SetStatus)
    return last.status


def ready(name: str, template: str = "new", generation: int | None = 3) -> Replica:
    return Replica(name, template, "Running", ready=True, was_ready=True, incumbent_generation=generation)


SERVING = rollout(NEW, ready("a"), ready("b"))
MIDWAY = rollout(NEW, ready("a", "old"), ready("b", "old"), Replica("c", "new", "Starting"))
STUCK = rollout(NEW, ready("a", "old"), ready("b", "old"), Replica("c", "new", "Starting"), now=9999.0)
EMPTY = rollout(NEW)
FACTS = Facts(url="http://chat", desired=live_values(live_document(service().spec, 3)))


def status(
    state: RolloutStatus, facts: Facts = FACTS, previous: ServiceStatus | None = None
) -> ServiceStatus:
    return service_status(service(replicas=2), state, facts, previous or ServiceStatus(), T0)


def word(found: ServiceStatus, kind: str) -> tuple[str, str]:
    condition = found.condition(kind)
    assert condition is not None
    return condition.status, condition.reason


@pytest.mark.parametrize(
    ("state", "ready_word", "available", "reconciling", "stalled", "verdict"),
    [
        (SERVING, ("True", "Serving"), "True", "False", "False", "Current"),
        (MIDWAY, ("False", "RolloutInProgress"), "True", "True", "False", "InProgress"),
        (STUCK, ("False", "ProgressDeadlineExceeded"), "True", "False", "True", "Failed"),
        (EMPTY, ("False", "ScalingUp"), "False", "True", "False", "InProgress"),
    ],
)
def test_conditions_of_a_rollout(
    state: RolloutStatus,
    ready_word: tuple[str, str],
    available: str,
    reconciling: str,
    stalled: str,
    verdict: str,
) -> None:
    found = status(state)
    assert word(found, names.READY) == ready_word
    assert word(found, names.AVAILABLE)[0] == available
    assert word(found, names.RECONCILING)[0] == reconciling
    assert word(found, names.STALLED)[0] == stalled
    assert kstatus(found.conditions, found.observed_generation, 1) == verdict


def test_a_leaving_pod_that_is_still_ready_makes_the_service_available_but_not_ready() -> None:
    found = status(EMPTY, replace(FACTS, leaving_ready=1))
    assert word(found, names.AVAILABLE) == ("True", names.LEAVING_POD_SERVES)
    assert word(found, names.READY)[0] == "False"
    suspended = rollout(replace(NEW, replicas=0, suspended=True))
    assert word(status(suspended, replace(FACTS, leaving_ready=1)), names.AVAILABLE)[0] == "False"


def test_ready_does_not_depend_on_live_config_slo_or_tuning() -> None:
    behind = rollout(NEW, ready("a", generation=2), ready("b", generation=2))
    found = status(behind, Facts(slo=Attainment("Violated", names.TARGETS_MISSED, "itl of class chat")))
    assert word(found, names.READY) == ("True", "Serving")
    assert word(found, names.CONFIG_APPLIED) == ("False", "PartiallyApplied")
    assert word(found, names.SLO_MET) == ("False", "TargetsMissed")
    assert found.engine.applied_replicas == "0/2"


def test_slo_without_samples_is_unknown_and_never_met() -> None:
    assert word(status(SERVING), names.SLO_MET) == ("Unknown", "MetricsUnavailable")
    assert status(SERVING).summary.slo == "Unknown"


def test_a_refused_live_document_is_named() -> None:
    refused = replace(ready("a", generation=2), generation_rejected=3)
    found = status(rollout(NEW, refused, ready("b")))
    assert word(found, names.CONFIG_APPLIED) == ("False", "EngineRejected")
    assert "a refused it" in next(c.message for c in found.conditions if c.type == names.CONFIG_APPLIED)


def test_nothing_is_written_at_rest() -> None:
    first = status(SERVING)
    again = service_status(service(replicas=2), SERVING, FACTS, first, T1)
    assert again == first


def test_transition_time_moves_only_with_the_status() -> None:
    first = status(MIDWAY)
    then = service_status(service(replicas=2), SERVING, FACTS, first, T1)
    times = {c.type: c.last_transition_time for c in then.conditions}
    assert times[names.READY] == T1
    assert times[names.AVAILABLE] == T0


def test_conditions_speak_of_the_generation_they_saw() -> None:
    given = resource(replicas=2)
    given["metadata"]["generation"] = 7
    found = service_status(schema.parse_service(given), SERVING, FACTS, status(SERVING), T1)
    assert found.observed_generation == 7
    assert {c.observed_generation for c in found.conditions} == {7}
    assert kstatus(found.conditions, found.observed_generation, 8) == "InProgress"


def test_no_conditions_yet_counts_as_current_only_for_the_same_generation() -> None:
    assert kstatus((), 0, 1) == "InProgress"
    assert kstatus((), 1, 1, deleting=True) == "Terminating"


def test_failed_model_is_kept_as_last_failure() -> None:
    bad = Replica("c", "new", "Failed", failure=names.MODEL_LOAD_FAILED, failed_s=0.0, message="no such file")
    found = status(rollout(NEW, bad))
    assert found.model is not None
    assert found.model.state == "FailedToLoad"
    assert found.model.last_failure is not None
    assert "no such file" in found.model.last_failure.message
    assert word(found, names.MODEL_LOADED) == ("False", "ModelLoadFailed")
    healed = service_status(service(replicas=2), SERVING, FACTS, found, T1)
    assert healed.model is not None
    assert (healed.model.state, healed.model.last_failure) == ("Loaded", found.model.last_failure)


def test_an_invalid_spec_is_stalled_with_every_finding_and_leaves_what_serves() -> None:
    before = status(SERVING)
    findings = (Finding("spec.slo.ttft", "5h", "a duration from 1ms to 1h"),)
    found = invalid_status(service(replicas=2), findings, names.INVALID_SPEC, before, T1)
    assert word(found, names.STALLED) == ("True", "InvalidSpec")
    assert word(found, names.READY) == ("False", "InvalidSpec")
    assert word(found, names.AVAILABLE)[0] == "True"
    assert "spec.slo.ttft: '5h'" in found.conditions[0].message
    assert found.url == before.url


def test_a_service_that_never_ran_shows_its_model_and_how_many_replicas_it_wants() -> None:
    findings = (Finding("spec.engine.runtime", "vllm", "this release serves with runtime trimtab only"),)
    given = service(replicas=2)
    found = invalid_status(given, findings, names.UNSUPPORTED, ServiceStatus(), T1)
    assert found.summary.replicas == "0/2"
    assert found.model is not None
    served = service_status(given, SERVING, FACTS, ServiceStatus(), T1).model
    assert served is not None
    assert (found.model.name, found.model.state) == (served.name, "Pending")


def test_in_a_cluster_a_load_says_where_its_stages_are() -> None:
    loading = replace(SERVING, ready=0, reason=names.SCALING_UP)
    texts = [
        found.message
        for mode in ("local", "cluster")
        if (found := status(loading, replace(FACTS, mode=mode)).condition(names.MODEL_LOADED)) is not None
    ]
    assert ["kubectl logs deployment/" in text for text in texts] == [False, True]


def tuned_service(**annotations: str) -> InferenceService:
    given = resource(tuning={"mode": "Apply", "parameters": [BUDGET_PARAMETER]})
    given["metadata"]["annotations"] = annotations
    return schema.parse_service(given)


@pytest.mark.parametrize(
    ("word_", "want"),
    [
        ("paused", ("False", "Paused")),
        ("reverted", ("False", "Reverted")),
        ("active", ("True", "AsExpected")),
    ],
)
def test_tuning_follows_the_annotation(word_: str, want: tuple[str, str]) -> None:
    built = tuned_service(**{names.ANNOTATION_TUNING: word_})
    assert word(service_status(built, SERVING, FACTS, ServiceStatus(), T0), names.TUNING_READY) == want


def test_a_halt_says_by_what_and_how_to_go_on() -> None:
    state = service_status(
        tuned_service(**{names.ANNOTATION_TUNING: "pause"}), SERVING, FACTS, ServiceStatus(), T0
    )
    said = next(c.message for c in state.conditions if c.type == names.TUNING_READY)
    assert said == (
        "annotation serving.trimtab.dev/tuning ('pause', which counts as paused) is paused; take it away to go on"
    )


def test_a_superseded_recommendation_is_said() -> None:
    found = recommend(tuned_service().spec, {"max_num_batched_tokens": 128})
    edited = service(tuning={"mode": "Apply", "parameters": [BUDGET_PARAMETER]}, **{"engine.maxNumSeqs": 32})
    state = service_status(edited, SERVING, Facts(recommendation=found), ServiceStatus(), T0)
    assert word(state, names.TUNING_READY) == ("True", "RecommendationSuperseded")


@pytest.mark.parametrize("state", [SERVING, MIDWAY, STUCK, EMPTY])
def test_status_fits_the_crd_and_survives_its_json_form(state: RolloutStatus) -> None:
    recommendation = recommend(tuned_service().spec, {"max_num_batched_tokens": 128}, "chat-1", T0)
    facts = replace(FACTS, applied=FACTS.desired, recommendation=recommendation)
    found = status(state, facts)
    wire = found.to_json()
    Draft202012Validator(crds.openapi(names.SERVICE_KIND)["properties"]["status"]).validate(wire)
    assert ServiceStatus.from_json(wire) == found


def test_merge_drops_conditions_that_are_no_longer_wanted() -> None:
    old = [
        Condition("Gone", "True", "X", last_transition_time=T0),
        Condition("Kept", "True", "X", last_transition_time=T0),
    ]
    assert merge(old, [Condition("Kept", "True", "Y")], T1) == (
        Condition("Kept", "True", "Y", last_transition_time=T0),
    )
