"""Every field of a TuningRun's spec changes what the operator does with the run, or what it tells the run. None is ignored.

The table is held against the schema: a new field without a binding fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from support.crd_fields import leaves
from support.pods import T0
from support.services import BUDGET_PARAMETER, run_resource, service
from trimtab_operator import conditions, names, schema, support
from trimtab_operator.api import InvalidRun, RunStatus, TuningRun, read_run
from trimtab_operator.api.run import Result
from trimtab_operator.cluster.observe import Key, RunIndex
from trimtab_operator.errors import InvalidResource
from trimtab_operator.plan import runs
from trimtab_operator.plan.live import spec_config
from trimtab_operator.plan.pods import rfc3339
from trimtab_operator.plan.tuner_pod import Tuner
from trimtab_operator.plan.worker_job import arguments, job
from trimtab_tuner.cluster.objects import run_of

Json = dict[str, Any]
Probe = Callable[[TuningRun], Any]
BUDGET = {"name": "maxNumBatchedTokens", "min": 64, "max": 512}
CHOICES = {"name": "schedulingPolicy", "choices": ["fcfs", "priority"]}


def tunable(mode: str = "Apply") -> Any:
    return service(
        tuning={
            "mode": mode,
            "parameters": [BUDGET_PARAMETER, {**CHOICES, "choices": ["fcfs", "priority", "sla-aware"]}],
        }
    )


def run(status: Json | None = None, **spec: Any) -> TuningRun:
    built = run_resource(**spec)
    built["metadata"] |= {"namespace": "team", "uid": "u", "generation": 1, "creationTimestamp": rfc3339(T0)}
    built["status"] = status or {}
    return schema.parse_run(built)


def candidate(trial: int = 0, **values: Any) -> Json:
    return {
        "startTime": rfc3339(T0),
        "candidate": {"trial": trial, "config": values, "until": rfc3339(T0 + 3000)},
    }


def trying(trial: int = 0, mode: str = "Apply", **values: Any) -> Probe:
    """What of `values` goes out, or the path under which it is refused; `mode` is the service's."""

    def probe(made: TuningRun) -> Any:
        tried = run(candidate(trial, **values), **made.raw["spec"])
        try:
            found = runs.offer(tunable(mode), tried, T0 + 1)
        except InvalidResource as error:
            return [finding.path for finding in error.errors]
        assert found is not None
        return "tried"

    return probe


def watched(made: TuningRun) -> Any:
    index = RunIndex()
    return index.put(made.raw)


def mounted_trace(made: TuningRun) -> Any:
    """The ConfigMap that its worker mounts."""
    volumes = job(tunable(), made, Tuner(), 60.0)["spec"]["template"]["spec"]["volumes"]
    return next((volume["configMap"] for volume in volumes if "configMap" in volume), {})


def over_after_an_hour(made: TuningRun) -> Any:
    """Phase of a run that began an hour ago, and the end of its candidate's time."""
    begun = run(candidate(maxNumBatchedTokens=128), **made.raw["spec"])
    acts = runs.acting([begun], T0 + 3600) is not None
    status = runs.run_status(begun, acts=acts, refusal=None, now=rfc3339(T0 + 3600))
    return status["phase"], runs.until_s(begun) - T0


@dataclass(frozen=True)
class Binding:
    """`probe` gives `want` once the fields of `spec` are set, and something else before."""

    probe: Probe
    spec: Json
    want: Any


TRACE = {"workload": {"type": "Trace", "traceRef": {"name": "t", "key": "k"}}}
OUT_OF_BOUNDS = trying(maxNumBatchedTokens=1024)
PROBES = {
    "service": Binding(watched, {"service": "other"}, Key("team", "other")),
    "evaluator": Binding(
        trying(maxNumBatchedTokens=128), {"evaluator": "Simulator"}, ["the run's spec.evaluator"]
    ),
    "parameters[].name": Binding(
        trying(schedulingPolicy="priority"),
        {"parameters": [BUDGET]},
        ["status.candidate.config.schedulingPolicy"],
    ),
    "parameters[].min": Binding(
        trying(maxNumBatchedTokens=64),
        {"parameters": [{**BUDGET, "min": 65}]},
        ["status.candidate.config.maxNumBatchedTokens"],
    ),
    "parameters[].max": Binding(
        OUT_OF_BOUNDS, {"parameters": [BUDGET]}, ["status.candidate.config.maxNumBatchedTokens"]
    ),
    "parameters[].choices": Binding(
        trying(schedulingPolicy="sla-aware"),
        {"parameters": [CHOICES]},
        ["status.candidate.config.schedulingPolicy"],
    ),
    "maxTrials": Binding(trying(2, maxNumBatchedTokens=128), {"maxTrials": 2}, ["status.candidate.trial"]),
    "timeLimit": Binding(over_after_an_hour, {"timeLimit": "30m"}, ("Stopped", 1800)),
    "workload.type": Binding(lambda made: "--trace" in arguments(made, Tuner()), TRACE, True),
    "workload.slice": Binding(lambda made: run_of(made.raw).slice_s, {"workload": {"slice": "1m30s"}}, 90.0),
    "workload.traceRef.name": Binding(lambda made: mounted_trace(made).get("name"), TRACE, "t"),
    "workload.traceRef.key": Binding(
        lambda made: arguments(made, Tuner())[-1], TRACE, "/var/run/trimtab/trace/k"
    ),
}


@pytest.mark.parametrize("path", PROBES)
def test_field_binds(path: str) -> None:
    binding = PROBES[path]
    assert binding.probe(run()) != binding.want
    assert binding.probe(run(**binding.spec)) == binding.want


def test_no_field_is_forgotten() -> None:
    assert set(PROBES) == set(leaves(names.RUN_KIND))


def test_within_its_own_bounds_a_run_tries_what_it_wants() -> None:
    bounds: Json = {"parameters": [BUDGET, CHOICES], "maxTrials": 3}
    assert trying(2, maxNumBatchedTokens=512, schedulingPolicy="priority")(run(**bounds)) == "tried"
    assert trying(maxNumBatchedTokens=2048)(run(parameters=[CHOICES])) == "tried", (
        "it is the incumbent's value"
    )


def test_a_refusal_names_path_value_and_range() -> None:
    with pytest.raises(InvalidResource) as caught:
        runs.offer(
            tunable(), run(candidate(7, maxNumBatchedTokens=1024), parameters=[BUDGET], maxTrials=3), T0
        )
    assert [str(finding) for finding in caught.value.errors] == [
        "status.candidate.trial: 7 is not allowed; below the run's spec.maxTrials (3), counted from 0",
        "status.candidate.config.maxNumBatchedTokens: 1024 is not allowed; an integer from 64 to 512, "
        "by the run's spec.parameters",
    ]


@pytest.mark.parametrize(
    ("field", "want"),
    [
        ({"maxNumBatchedTokens": 16}, "maxNumBatchedTokens: 16 is not allowed; an integer from "),
        (
            {"maxNumBatchedToken": 128},
            "maxNumBatchedToken: 128 is not allowed; known fields are maxNumBatchedTokens, ",
        ),
    ],
)
def test_what_the_service_does_not_allow_is_refused_by_the_path_that_was_written(
    field: Json, want: str
) -> None:
    with pytest.raises(InvalidResource) as tried:
        runs.offer(tunable(), run(candidate(**field)), T0)
    assert str(tried.value.errors[0]).startswith(f"status.candidate.config.{want}")
    judged = replace(run(), status=RunStatus(result=Result(verdict="Applied", config=field)))
    with pytest.raises(InvalidResource) as taken:
        runs.promotion(tunable(), [judged], rfc3339(T0))
    assert str(taken.value.errors[0]).startswith(f"status.result.config.{want}")


def test_a_candidate_keeps_what_it_does_not_turn_of_the_recommendation_in_force() -> None:
    standing = {**spec_config(tunable().spec), "max_num_batched_tokens": 128}
    only_policy = run(candidate(schedulingPolicy="priority"), parameters=[CHOICES])
    found = runs.offer(tunable(), only_policy, T0 + 1, incumbent=standing)
    assert found is not None
    assert (found.config["max_num_batched_tokens"], found.config["scheduling_policy"]) == (128, "priority")
    whole = run(candidate(schedulingPolicy="priority", maxNumBatchedTokens=128), parameters=[CHOICES])
    kept = runs.offer(tunable(), whole, T0 + 1, incumbent=standing)
    assert kept is not None
    assert kept.config == found.config, "to say what stands is to turn nothing"
    back = run(candidate(maxNumBatchedTokens=tunable().spec.engine.max_num_batched_tokens))
    asked = runs.offer(tunable(), back, T0 + 1, incumbent=standing)
    assert asked is not None
    assert asked.config == spec_config(tunable().spec), "spec's own value may be tried too"


@pytest.mark.parametrize(
    ("result", "want"),
    [
        ({"before": {"p99ItlSeconds": 1.53}, "after": {"p99ItlSeconds": 0.2104}}, "1530ms → 210ms"),
        ({"before": {"p99ItlSeconds": 0.0312}}, "31.2ms"),
        ({"before": {"p99ItlSeconds": 25.7318}, "after": {"p99ItlSeconds": 9.999}}, "25.7s → 9999ms"),
        ({"before": {"p99ItlSeconds": "soon"}, "after": {"p99ItlSeconds": -1}}, None),
        ({}, None),
    ],
)
def test_the_p99_of_before_and_after_is_a_column(result: Json, want: str | None) -> None:
    judged = run({"result": {"verdict": "Applied", **result}})
    status = runs.run_status(judged, acts=False, refusal=None, now=rfc3339(T0))
    assert status["summary"].get("p99Itl") == want


def test_an_overdue_run_stops_for_good_and_lets_the_next_one_act() -> None:
    overdue = run(candidate(maxNumBatchedTokens=128), timeLimit="1m")
    status = runs.run_status(overdue, acts=False, refusal=None, now=rfc3339(T0 + 61))
    stalled = next(c for c in status["conditions"] if c["type"] == names.STALLED)
    assert (status["phase"], stalled["reason"]) == ("Stopped", names.TIME_LIMIT_REACHED)
    assert "spec.timeLimit (1m)" in stalled["message"]
    again = run({**candidate(maxNumBatchedTokens=128), **status}, timeLimit="1m")
    assert runs.run_status(again, acts=False, refusal=None, now=rfc3339(T0 + 99)) == status, "at rest"
    waiting = run()
    assert runs.acting([overdue, waiting], T0 + 61) is waiting


def test_a_waiting_run_says_what_it_waits_for_and_a_running_one_when_it_began() -> None:
    waiting = runs.run_status(run(), acts=True, refusal=None, now=rfc3339(T0))
    assert "startTime" not in waiting
    assert {c["message"] for c in waiting["conditions"][:2]} == {"its worker starts"}
    outside = replace(run(), metadata=replace(run().metadata, annotations={names.ANNOTATION_WORKER: "none"}))
    written = runs.run_status(outside, acts=True, refusal=None, now=rfc3339(T0))
    assert {c["message"] for c in written["conditions"][:2]} == {support.NO_WORKER}
    begun = run({"candidate": candidate(maxNumBatchedTokens=128)["candidate"]})
    assert runs.run_status(begun, acts=True, refusal=None, now=rfc3339(T0 + 5))["startTime"] == rfc3339(
        T0 + 5
    )


@pytest.mark.parametrize(
    ("spec", "status", "path", "words", "phase"),
    [
        ({"timeLimit": "25h"}, {}, "spec.timeLimit", "a duration from 1m to 24h", "Failed"),
        ({"timeLimit": "1s"}, {}, "spec.timeLimit", "a duration from 1m to 24h", "Failed"),
        (
            {},
            {"candidate": {"config": {}, "until": "soon"}},
            "status.candidate.until",
            "a time such as",
            "Pending",
        ),
    ],
)
def test_what_the_schema_cannot_say_becomes_a_condition_with_path_value_and_range(
    spec: Json, status: Json, path: str, words: str, phase: str
) -> None:
    built = schema.validate(run_resource(**spec))
    built["metadata"] |= {"uid": "u", "generation": 3}
    found = read_run({**built, "status": status})
    assert isinstance(found, InvalidRun)
    written = runs.invalid_run_status(found, rfc3339(T0))
    assert (written["phase"], written["observedGeneration"]) == (phase, 3)
    stalled = next(c for c in written["conditions"] if c["type"] == names.STALLED)
    assert (stalled["status"], stalled["reason"]) == ("True", names.INVALID_SPEC)
    assert path in stalled["message"]
    assert words in stalled["message"]


@pytest.mark.parametrize("name", ["0-days", "chat.try"])
def test_engines_of_a_run_s_own_need_a_name_that_a_service_may_have(name: str) -> None:
    """Such a run would otherwise fail at each look, and keep all others of its service waiting."""

    def read(evaluator: str) -> TuningRun | InvalidRun:
        built = schema.validate(run_resource(evaluator=evaluator))
        built["metadata"] |= {"uid": "u", "generation": 3, "name": name}
        return read_run(built)

    found = read("Shadow")
    assert isinstance(found, InvalidRun)
    written = runs.invalid_run_status(found, rfc3339(T0))
    stalled = next(c for c in written["conditions"] if c["type"] == names.STALLED)
    assert written["phase"] == "Failed"
    assert (
        f"metadata.name: '{name}'" in stalled["message"] or f'metadata.name: "{name}"' in stalled["message"]
    )
    assert isinstance(read("Live"), TuningRun)


def test_a_run_of_a_service_that_is_not_served_is_told_so() -> None:
    status = runs.run_status(run(), acts=False, refusal=None, now=rfc3339(T0), unserved="it is odd")
    assert {(c["type"], c["status"], c["reason"]) for c in status["conditions"]} == {
        (names.READY, "False", names.SERVICE_NOT_SERVED),
        (names.RECONCILING, "False", names.SERVICE_NOT_SERVED),
        (names.STALLED, "True", names.SERVICE_NOT_SERVED),
    }


def test_a_result_waits_for_a_service_that_is_not_served_and_not_for_one_that_is_gone() -> None:
    judged = run(status={"phase": "Running", "result": {"verdict": "Applied", "config": {"maxNumSeqs": 8}}})
    status = runs.run_status(judged, acts=False, refusal=None, now=rfc3339(T0), unserved="it is odd")
    assert status["phase"] == "Running", "not over, so that it is taken once the service is mended"
    assert "it is odd; the result is taken afterwards" in {c["message"] for c in status["conditions"]}
    gone = names.SERVICE_NOT_FOUND
    status = runs.run_status(judged, acts=False, refusal=None, now=rfc3339(T0), unserved=gone)
    assert status["phase"] == "Succeeded"
    assert any("there is no InferenceService" in c["message"] for c in status["conditions"])


@pytest.mark.parametrize(
    ("status", "seconds", "want"),
    [
        ({}, 0, "InProgress"),
        (candidate(maxNumBatchedTokens=128), 1, "InProgress"),
        (candidate(maxNumBatchedTokens=128), 9999, "Failed"),
        ({"result": {"verdict": "Applied"}}, 0, "Current"),
        ({"result": {"verdict": "KeptIncumbent"}}, 0, "Current"),
        ({"result": {"verdict": "Failed"}}, 0, "Failed"),
    ],
)
def test_kstatus_reads_a_run_truly(status: Json, seconds: int, want: str) -> None:
    made = run(status)
    now = T0 + seconds
    written = runs.run_status(made, acts=runs.acting([made], now) is not None, refusal=None, now=rfc3339(now))
    found = RunStatus.from_json(written)
    assert conditions.kstatus(found.conditions, found.observed_generation, made.metadata.generation) == want


@pytest.mark.parametrize("workload", [{}, TRACE])
def test_a_simulator_run_is_carried_out_in_every_mode_on_records_and_on_a_trace(workload: Json) -> None:
    for mode in ("Off", "Recommend", "Canary", "Apply"):
        made = run(evaluator="Simulator", **workload)
        served = service(tuning={"mode": mode, "parameters": [BUDGET_PARAMETER]})
        assert runs.acting([made], T0, served) == made, mode
