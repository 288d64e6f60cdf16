"""What the operator reads back may have been written by anybody: statuses, children, engines. Whatever it is, it holds up no service.

Each example goes through the same checks: the plan ends, the status that it writes is one that the CRD takes, and engines go on
with what spec says. Only what an API server would let through is tried.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.pods import T0, moment, pod
from support.services import BUDGET_PARAMETER, resource, run_resource
from support.spoiled import spoiled
from trimtab_engine import live_state
from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.live_state import LiveState, Versioned, check_generation
from trimtab_operator import names, schema
from trimtab_operator.api import InferenceService, InvalidRun, TuningRun, read_run
from trimtab_operator.api.status import Resolved
from trimtab_operator.cluster.observe import RunIndex, previous_status
from trimtab_operator.errors import InvalidResource
from trimtab_operator.plan import cluster, live_push, pods
from trimtab_operator.plan import live as plan_live
from trimtab_operator.plan.fleet import contenders
from trimtab_operator.plan.live_record import FIRST_LIMIT, MAX_RISE, NUMBER_LIMIT, is_number
from trimtab_operator.plan.loading import describe
from trimtab_operator.quantities import parse_quantity

Json = dict[str, Any]
SETTINGS = cluster.Settings(Resolved(image="engine:1"), "KEY")
NOW = T0 + 1000
TIME = pods.rfc3339(NOW)
LIVE_MAP, DEPLOYMENT = ("ConfigMap", "chat-live"), ("Deployment", "chat-engine")
#: Texts that the API server takes for `format: date-time`, and others that stand where no format is checked.
MOMENTS = ("0000-01-01T00:00:00Z", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", "2026-01-31t03:30:00z",
           "2026-01-31T03:30:00.123456789Z", "2026-01-31T03:30:00+99:99", "2026-01-31T03:30:00x5Z", TIME)  # fmt: skip
#: Contents of annotations and of live.json, which are any text.
TEXTS = ("", "nonsense", "[" * 100_000, '{"a":' * 100_000, "9" * 5000, str(2**62), str(2**63), "-1", "١", "null", "[]", "{}",
         '{"generation": 1e999, "source": "Spec", "config": {}}', f'{{"generation": {2**63}, "source": "Spec", "config": {{}}}}',
         '{"generation": 3, "source": [], "config": {"a": NaN}}', f'{{"key": "k", "basis": "b", "generation": {10**30}}}',
         '{"key": "k", "basis": "b", "generation": true}')  # fmt: skip


@cache
def service() -> InferenceService:
    given = resource(replicas=2, tuning={"mode": "Apply", "parameters": [BUDGET_PARAMETER]})
    given["metadata"] = {"name": "chat", "namespace": "default", "uid": "u", "generation": 1}
    return schema.parse_service(given)


@cache
def at_rest() -> cluster.Observed:
    """The service with two ready pods, as nobody has touched it."""
    observed = cluster.Observed(service())
    decision = cluster.decide(observed, SETTINGS, NOW, TIME)
    children = {(m["kind"], m["metadata"]["name"]): m for m in decision.changes.apply}
    config = LiveConfig.from_json(decision.incumbent["config"], Ceilings(8192, 256))
    engine = LiveState(Versioned(decision.incumbent["generation"], "Spec", config), Ceilings(8192, 256))
    observed = replace(
        observed,
        children=children,
        pods=tuple(pod(name, decision.template_hash, ready_since=10) for name in "ab"),
        read_backs={name: json.loads(json.dumps(engine.to_json(0.0))) for name in "ab"},
    )
    decision = cluster.decide(observed, SETTINGS, NOW, TIME)
    assert not decision.changes.apply
    assert not decision.calls
    return replace(observed, previous=cluster.conclude(observed, decision, NOW, TIME).status)


def run_of(status: Json) -> Json:
    run = run_resource()
    run["metadata"].update(namespace="default", uid="r1", generation=1, creationTimestamp=moment(0))
    return {**run, "status": status}


def settled(observed: cluster.Observed) -> tuple[cluster.Decision, cluster.Conclusion]:
    """Two looks, with what the first one applied; both end in statuses that the CRD takes."""
    for _ in range(2):
        decision = cluster.decide(observed, SETTINGS, NOW, TIME)
        conclusion = cluster.conclude(observed, decision, NOW, TIME)
        schema.validate({**resource(), "status": conclusion.status.to_json()})
        for status in conclusion.run_statuses.values():
            schema.validate(run_of(status))
        applied = {(m["kind"], m["metadata"]["name"]): copy.deepcopy(m) for m in decision.changes.apply}
        observed = replace(
            observed, children={**observed.children, **applied}, previous=previous_status({"status": conclusion.status.to_json()})
        )  # fmt: skip
    return decision, conclusion


def is_taken(written: Json) -> bool:
    """Whether the API server would have let it be written."""
    try:
        schema.validate(written)
    except InvalidResource:
        return False
    return True


FULL_STATUS: Json = {
    "observedGeneration": 1,
    "conditions": [{"type": "Ready", "status": "True", "reason": "Serving", "message": "", "lastTransitionTime": TIME}],
    "replicas": 2,
    "summary": {"replicas": "2/2", "slo": "Met"},
    "model": {"name": "tiny", "state": "Loaded", "lastFailure": {"reason": "ModelLoadFailed", "message": "m", "time": TIME}},
    "engine": {"desired": {"generation": 1, "source": "Spec", "maxNumBatchedTokens": 2048, "maxNumSeqs": 64,
                           "schedulingPolicy": "fcfs", "longPrefillTokenThreshold": 0}},
    "tuning": {"state": "Idle", "recommendation": {"values": {"maxNumBatchedTokens": 512}, "basedOn": {"maxNumSeqs": 64}},
               "lastRun": {"name": "r", "verdict": "Applied"}},
    "resolved": {"image": "engine:1", "templateVersion": 1},
}  # fmt: skip
FULL_RUN_STATUS: Json = {
    "phase": "Running",
    "startTime": TIME,
    "conditions": FULL_STATUS["conditions"],
    "candidate": {"trial": 1, "config": {"maxNumBatchedTokens": 512}, "until": pods.rfc3339(NOW + 60)},
    "applied": {"generation": 2, "pods": "2/2", "until": TIME},
    "trials": [{"number": 0, "state": "Complete", "config": {"maxNumSeqs": 1}, "message": "m"}],
    "result": {"verdict": "Applied", "config": {"maxNumBatchedTokens": 512}, "before": {"p99": 1}},
    "summary": {"trials": 1, "incumbent": "2048/fcfs"},
}


@settings(max_examples=150)
@given(spoiled(FULL_STATUS), st.sampled_from([None, 2**62, 2**63 - 1, -(2**63)]))
def test_a_status_of_a_service_that_somebody_wrote_holds_nothing_up(status: Json, number: int | None) -> None:
    if not is_taken({**resource(), "status": status}):
        return
    desired = (status.get("engine") or {}).get("desired")
    if number is not None and isinstance(desired, dict):
        desired["generation"] = number
    decision, _ = settled(replace(at_rest(), previous=previous_status({"status": status})))
    assert is_number(decision.incumbent["generation"])


@pytest.mark.parametrize("value", ["nonsense", "x" * 10_000, ["fcfs"], {"a": 1}, -5, 2**62, 4097, True, None])
@pytest.mark.parametrize("name", ["maxNumBatchedTokens", "schedulingPolicy", "maxNumSeqs", "nonsense"])
def test_a_recommendation_that_the_owner_does_not_allow_never_reaches_engines(name: str, value: Any) -> None:
    basis = plan_live.basis(service().spec)
    status = {"tuning": {"recommendation": {"values": {name: value}, "basedOn": basis}}}
    decision, _ = settled(replace(at_rest(), previous=previous_status({"status": status})))
    assert decision.incumbent["source"] == "Spec"
    assert decision.incumbent["config"] == plan_live.spec_config(service().spec)


@pytest.mark.parametrize("number", [2**62, 2**63 - 1, -1])
def test_a_number_without_room_for_a_next_one_counts_as_none(number: int) -> None:
    status = copy.deepcopy(FULL_STATUS)
    status["engine"]["desired"]["generation"] = number
    lost = {key: value for key, value in at_rest().children.items() if key != LIVE_MAP}
    seen = replace(at_rest(), previous=previous_status({"status": status}), children=lost, read_backs={})
    assert settled(seen)[0].incumbent["generation"] == 1


@pytest.mark.parametrize("place", ["startTime", "until"])
@pytest.mark.parametrize("text", [MOMENTS[0], MOMENTS[5], MOMENTS[6]])
def test_a_run_with_a_time_that_is_none_is_told_so(place: str, text: str) -> None:
    status: Json = {"startTime": TIME, "candidate": {"config": {}, "until": TIME}}
    (status if place == "startTime" else status["candidate"])[place] = text
    read = read_run(run_of(status))
    assert isinstance(read, InvalidRun)
    assert [finding.path.rpartition(".")[2] for finding in read.findings] == [place]


@settings(max_examples=150)
@given(spoiled(FULL_RUN_STATUS), st.sampled_from(MOMENTS), st.sampled_from(MOMENTS), st.booleans())
def test_a_status_of_a_run_that_somebody_wrote_holds_nothing_up(
    status: Json, start: str, until: str, over: bool
) -> None:
    if not over:
        status.pop("result", None)
    if isinstance(status.get("startTime"), str):
        status["startTime"] = start
    if isinstance(status.get("candidate"), dict) and "until" in status["candidate"]:
        status["candidate"]["until"] = until
    run = run_of(status)
    if not is_taken(run):
        return
    index = RunIndex()
    index.replace([run], index.mark())  # as the resync does, for the whole fleet
    contenders(index.contenders(), NOW)
    read = read_run(run)
    place = {"runs": (read,)} if isinstance(read, TuningRun) else {"invalid_runs": (read,)}
    settled(replace(at_rest(), **place))


@pytest.mark.parametrize("key", ["x" * 40_000, "ÿ\n", ""])
def test_names_and_values_of_any_length_end_in_a_message_that_the_api_server_takes(key: str) -> None:
    config = {f"{key}{number}": "v" * 40_000 for number in range(8)}
    status = {"candidate": {"config": config, "until": pods.rfc3339(NOW + 60)}}
    read = read_run(run_of(status))
    assert isinstance(read, TuningRun)
    _, conclusion = settled(replace(at_rest(), runs=(read,)))
    assert conclusion.run_statuses["chat-1"]["conditions"][-1]["reason"] == names.CANDIDATE_REFUSED


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:40])
@pytest.mark.parametrize(
    ("kind", "place"),
    [(LIVE_MAP, "live.json"), (LIVE_MAP, names.ANNOTATION_HIGHEST), (LIVE_MAP, names.ANNOTATION_CANDIDATE),
     (DEPLOYMENT, names.ANNOTATION_BUILT)],
)  # fmt: skip
def test_a_text_that_somebody_wrote_into_a_child_is_written_over(
    kind: tuple[str, str], place: str, text: str
) -> None:
    children = copy.deepcopy({key: dict(value) for key, value in at_rest().children.items()})
    where = children[kind]["data"] if place == "live.json" else children[kind]["metadata"]["annotations"]
    where[place] = text
    decision, _ = settled(replace(at_rest(), children=children))
    assert decision.template_hash == cluster.decide(at_rest(), SETTINGS, NOW, TIME).template_hash
    assert is_number(decision.incumbent["generation"])
    assert not decision.changes.apply, "the second look finds all as it should be"


def test_an_edit_of_the_record_of_the_template_rolls_nothing() -> None:
    children = copy.deepcopy({key: dict(value) for key, value in at_rest().children.items()})
    annotations = children[DEPLOYMENT]["metadata"]["annotations"]
    record = json.loads(annotations[names.ANNOTATION_BUILT])
    for containers in ("x", [1], [{"name": "engine", "image": "another"}]):
        record["template"]["spec"]["containers"] = containers
        annotations[names.ANNOTATION_BUILT] = json.dumps(record)
        first = cluster.decide(replace(at_rest(), children=children), SETTINGS, NOW, TIME)
        (manifest,) = first.changes.apply
        assert manifest["spec"]["template"] == at_rest().children[DEPLOYMENT]["spec"]["template"]


@settings(max_examples=150)
@given(
    spoiled({"a": at_rest().read_backs["a"]}),
    st.sampled_from([None, float("nan"), float("inf"), 1e300, -1, True, "x"]),
)
def test_what_is_no_account_of_a_live_config_is_told_from_one(answers: Json, until: Any) -> None:
    answer = answers.get("a")
    if isinstance(answer, dict) and until is not None and isinstance(answer.get("incumbent"), dict):
        answer["candidate"] = {**answer["incumbent"], "until": until}
    if isinstance(answer, dict) and live_push.is_read_back(answer):
        settled(replace(at_rest(), read_backs={**at_rest().read_backs, "a": answer}))


def test_engine_and_operator_agree_on_numbers() -> None:
    assert (MAX_RISE, FIRST_LIMIT) == (live_state.MAX_RISE, live_state.FIRST_LIMIT)
    assert check_generation(NUMBER_LIMIT - 1) == NUMBER_LIMIT - 1
    with pytest.raises(ConfigError):
        check_generation(NUMBER_LIMIT)


@pytest.mark.parametrize("text", ["1e99999999999", "1e-99999999999", "1E+1000000", "9e99999999999999999999"])
def test_a_quantity_of_any_exponent_is_an_error_and_no_crash(text: str) -> None:
    with pytest.raises(ValueError, match="exponent"):
        parse_quantity(text)


@pytest.mark.parametrize("total", [10**400, -1, True, "x", None])
@pytest.mark.parametrize("fraction", [float("nan"), float("inf"), 10**400, -1, True])
def test_a_download_may_say_anything(fraction: Any, total: Any) -> None:
    describe({"stage": "download", "fraction": fraction, "total_bytes": total})
