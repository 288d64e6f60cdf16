"""The fleet's switch against the service's own, and the limit of runs that act: pure rules, and the places given out by them."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from support.pods import T0, moment
from support.services import BUDGET_PARAMETER, resource, run_resource
from trimtab_operator import names, schema
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.cluster.observe import Key, RunIndex
from trimtab_operator.cluster.slots import Slots
from trimtab_operator.plan import cluster, fleet
from trimtab_operator.plan.live import Switch, effective, recommend, switch
from trimtab_operator.plan.pods import rfc3339

Json = dict[str, Any]
NOW = T0 + 1000
WHERE = "ConfigMap trimtab-system/trimtab-fleet"


# The switch


@pytest.mark.parametrize(
    ("config_map", "state"),
    [
        (None, "active"),
        ({}, "active"),
        ({"data": {"other": "paused"}}, "active"),
        ({"data": {"tuning": "active"}}, "active"),
        ({"data": {"tuning": "paused"}}, "paused"),
        ({"data": {"tuning": "reverted"}}, "reverted"),
    ],
)
def test_the_config_map_says_active_paused_or_reverted(config_map: Json | None, state: str) -> None:
    reading = fleet.read_switch(config_map, WHERE)
    assert (reading.switch.state, reading.problem) == (state, None)


@pytest.mark.parametrize("value", ["Paused", "off", "", " paused"])
def test_any_other_value_pauses_and_says_so(value: str) -> None:
    reading = fleet.read_switch({"data": {"tuning": value}}, WHERE)
    assert reading.switch.state == "paused"
    assert reading.problem is not None
    assert repr(value) in reading.problem
    assert "active, paused, reverted" in reading.problem


@pytest.mark.parametrize(
    ("own", "of_fleet", "want"),
    [
        ("active", "active", "active"),
        ("active", "paused", "paused"),
        ("paused", "active", "paused"),
        ("paused", "reverted", "reverted"),
        ("reverted", "paused", "reverted"),
    ],
)
def test_the_stronger_of_fleet_and_service_wins(own: str, of_fleet: Any, want: str) -> None:
    assert switch({names.ANNOTATION_TUNING: own}, Switch(of_fleet, WHERE)).state == want


def tuned(**annotations: str) -> InferenceService:
    given = resource(tuning={"mode": "Apply", "parameters": [BUDGET_PARAMETER]})
    given["metadata"] = {"name": "chat", "namespace": "default", "uid": "u", "generation": 1,
                         "annotations": annotations}  # fmt: skip
    return schema.parse_service(given)


def test_a_reverted_fleet_goes_back_to_spec_and_says_whose_word_it_was() -> None:
    service = tuned()
    found = recommend(service.spec, {"max_num_batched_tokens": 128})
    reverted = fleet.read_switch({"data": {"tuning": "reverted"}}, WHERE).switch
    chosen = effective(service.spec, found, {}, reverted)
    assert (chosen.source, chosen.config["max_num_batched_tokens"]) == ("Spec", 2048)
    assert WHERE in chosen.why
    paused = effective(service.spec, found, {}, Switch("paused", WHERE))
    assert paused.source == "Recommendation", "a pause holds what is in force"


def a_run(
    name: str = "chat-1", created: float = 0, service: str = "chat", *, worker: bool = False, **status: Any
) -> Json:
    made = run_resource(service=service)
    made["metadata"] = {"name": name, "namespace": "default", "uid": f"uid-{name}", "generation": 1,
                        "creationTimestamp": moment(created),
                        "annotations": {} if worker else {names.ANNOTATION_WORKER: "none"}}  # fmt: skip
    made["status"] = status
    return made


def candidate(seconds: float = 60) -> Json:
    return {"trial": 0, "config": {"maxNumBatchedTokens": 128}, "until": rfc3339(NOW + seconds)}


def observed(run: Json, **more: Any) -> cluster.Observed:
    return cluster.Observed(tuned(), runs=(TuningRun.parse(run),), **more)


def conclude(seen: cluster.Observed) -> tuple[cluster.Decision, cluster.Conclusion]:
    decision = cluster.decide(seen, cluster.Settings(), NOW, rfc3339(NOW))
    return decision, cluster.conclude(seen, decision, NOW, rfc3339(NOW))


def ready_of(status: Json) -> Json:
    found: Json = next(c for c in status["conditions"] if c["type"] == "Ready")
    return found


def test_a_paused_fleet_tries_no_candidate_and_the_status_names_the_config_map() -> None:
    paused = fleet.read_switch({"data": {"tuning": "paused"}}, WHERE).switch
    decision, conclusion = conclude(observed(a_run(candidate=candidate()), fleet=paused))
    assert decision.trial is None
    tuning = conclusion.status.condition(names.TUNING_READY)
    assert tuning is not None
    assert (tuning.status, tuning.reason) == ("False", names.TUNING_PAUSED)
    assert WHERE in tuning.message
    assert conclusion.status.tuning.state == "Paused"
    assert WHERE in ready_of(conclusion.run_statuses["chat-1"])["message"]


def test_a_result_waits_while_tuning_is_held_and_is_taken_afterwards() -> None:
    run = a_run(phase="Running", result={"verdict": "Applied", "config": {"maxNumBatchedTokens": 128}})
    decision, conclusion = conclude(observed(run, fleet=Switch("paused", WHERE)))
    assert decision.recommendation is None
    status = conclusion.run_statuses["chat-1"]
    assert status["phase"] == "Running"
    assert ready_of(status)["reason"] == names.TUNING_PAUSED
    run["status"].update(status)
    decision, conclusion = conclude(observed(run))
    assert decision.recommendation is not None
    assert conclusion.run_statuses["chat-1"]["phase"] == "Succeeded"


# The limit


def contender(name: str, created: float, **more: Any) -> fleet.Contender:
    return fleet.Contender(name, f"uid-{name}", created, NOW + 60, float("inf"), over=False, refused=False,
                           **{"holds": False, **more})  # fmt: skip


def test_those_that_act_go_on_and_then_the_oldest_come() -> None:
    wanting = {"a": contender("a", 3), "b": contender("b", 1), "c": contender("c", 2, holds=True)}
    assert fleet.may_act(wanting, 1) == {"c"}
    assert fleet.may_act(wanting, 2) == {"c", "b"}
    assert fleet.may_act(wanting, 9) == {"a", "b", "c"}


QUIET = {"type": "Ready", "status": "False", "reason": names.QUIET_TIME, "message": "",
         "lastTransitionTime": moment(0)}  # fmt: skip


def test_only_runs_with_a_candidate_that_may_be_tried_contend() -> None:
    listed = {
        "idle": [fleet.Contender.of(TuningRun.parse(a_run()))],
        "late": [fleet.Contender.of(TuningRun.parse(a_run(candidate=candidate(-1))))],
        "over": [fleet.Contender.of(TuningRun.parse(a_run(phase="Succeeded", candidate=candidate())))],
        "refused": [replace(contender("r", 0), refused=True)],
        "quiet": [fleet.Contender.of(TuningRun.parse(a_run(candidate=candidate(), conditions=[QUIET])))],
        # The second waits for the first of its own service, not for the fleet.
        "two": [contender("second", 5), replace(contender("first", 1), until_s=0)],
        "good": [contender("younger", 7), contender("older", 2)],
    }
    assert {key: run.name for key, run in fleet.contenders(listed, NOW).items()} == {"good": "older"}


def test_a_run_with_a_worker_wants_a_place_from_its_turn_to_its_end_unless_it_waits_for_something_else() -> (
    None
):
    def of(name: str, created: float, reason: str | None = None, **status: Any) -> fleet.Contender:
        if reason is not None:
            told = {
                "type": "Ready",
                "status": "False",
                "reason": reason,
                "message": "",
                "lastTransitionTime": moment(0),
            }
            status["conditions"] = [told]
        return fleet.Contender.of(TuningRun.parse(a_run(name, created, worker=True, **status)))

    begun = {"startTime": moment(0)}
    listed = {
        "new": [of("new", 1)],
        "waiting": [of("waiting", 2, names.WAITING_FOR_TURN)],
        "begun": [of("older", 1), of("begun", 3, names.IMAGE_PULL_FAILED, **begun)],
        "refused": [of("refused", 4, names.CANDIDATE_REFUSED, **begun)],
        "unready": [of("unready", 0, names.NO_READY_PODS)],
        "paused": [of("paused", 0, names.TUNING_PAUSED)],
        "ruled out": [of("ruled-out", 0, names.NOT_ALLOWED_BY_SERVICE), of("next", 5)],
        "over": [of("over", 0, phase="Failed", **begun)],
        "late": [of("late", 0, startTime=moment(-99_999))],
    }
    found = fleet.contenders(listed, NOW)
    assert {run.name: run.holds for run in found.values()} == {
        "new": False, "waiting": False, "begun": True, "refused": True, "next": False,
    }  # fmt: skip
    assert fleet.may_act(found, 3) == {"begun", "refused", "new"}


def test_places_are_given_to_the_oldest_and_handed_on_when_given_back() -> None:
    woken: list[Key] = []
    index = RunIndex()
    slots = Slots(1, index, woken.append)
    runs = {}
    for name, created in (("old", 1.0), ("young", 2.0), ("last", 3.0)):
        raw = a_run(name, created, service=name, candidate=candidate())
        runs[name] = TuningRun.parse(raw)
        index.put(raw)

    def ask(name: str) -> str | None:
        return slots.ask(Key("default", name), runs[name], NOW)

    assert ask("young") is not None, "the older one has not asked yet"
    assert ask("old") is None
    assert ask("young") is not None
    assert ask("last") is not None
    assert ask("old") is None, "asked again, for each renewal"
    index.drop(a_run("old", service="old"))
    slots.release([Key("default", "old")])
    assert sorted(key.name for key in woken) == ["last", "young"]
    assert ask("last") is not None
    assert ask("young") is None


def test_a_candidate_of_a_former_operator_keeps_its_place() -> None:
    index = RunIndex()
    index.put(a_run("old", 1, service="old", candidate=candidate()))
    holder = a_run(
        "young", 2, service="young", candidate=candidate(), applied={"generation": 7, "pods": "1/1"}
    )
    index.put(holder)
    slots = Slots(1, index, lambda key: None)
    old = TuningRun.parse(a_run("old", 1, service="old", candidate=candidate()))
    assert slots.ask(Key("default", "old"), old, NOW) is not None
    assert slots.ask(Key("default", "young"), TuningRun.parse(holder), NOW) is None


def test_a_run_in_a_namespace_that_is_refused_holds_no_place() -> None:
    index, away, woken = RunIndex(), set[str](), list[Key]()
    applied = {"generation": 7, "pods": "1/1"}
    holder = a_run("old", 1, service="old", candidate=candidate(), applied=applied)
    index.put(holder)
    slots = Slots(1, index, woken.append, away.__contains__)
    key, young = Key("other", "chat"), a_run("young", 2, service="chat", candidate=candidate())
    young["metadata"]["namespace"] = key.namespace
    index.put(young)
    assert slots.ask(Key("default", "old"), TuningRun.parse(holder), NOW) is None
    assert slots.ask(key, TuningRun.parse(young), NOW) is not None
    away.add("default")
    slots.wake()
    assert woken == [key]
    assert slots.ask(key, TuningRun.parse(young), NOW) is None
    away.clear()
    assert slots.ask(Key("default", "old"), TuningRun.parse(holder), NOW) is None, "it has begun"


def test_many_threads_never_get_more_places_than_there_are() -> None:
    index = RunIndex()
    slots = Slots(3, index, lambda key: None)
    granted: list[str] = []
    barrier = threading.Barrier(12)

    def work(number: int) -> None:
        name = f"run-{number}"
        barrier.wait()
        raw = a_run(name, number, service=name, candidate=candidate())
        if slots.ask(Key("default", name), TuningRun.parse(raw), NOW) is None:
            granted.append(name)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(granted) == 3


def test_a_run_that_waits_for_its_turn_says_so_and_touches_no_engine() -> None:
    seen = observed(a_run(candidate=candidate()), waits="1 run may act")
    decision, conclusion = conclude(seen)
    assert decision.trial is None
    status = conclusion.run_statuses["chat-1"]
    assert status["phase"] == "Pending"
    ready = ready_of(status)
    assert (ready["reason"], ready["message"]) == (names.WAITING_FOR_TURN, "1 run may act")
    assert "applied" not in status
    assert conclusion.look_again_s == NOW + cluster.TURN_RETRY_S
    assert conclusion.status.tuning.state == "Idle"
