"""A Shadow run as a look at its service decides it: its candidates, its beginning, its ends. What its engines are: `test_shadow`."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.pods import T0, moment, pod
from support.services import BUDGET_PARAMETER, resource, run_resource
from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_engine.live_state import LiveState, Versioned
from trimtab_operator import names, schema
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.api.run import RunStatus
from trimtab_operator.api.status import Resolved, ServiceStatus
from trimtab_operator.plan import cluster, live_push, shadow, workers
from trimtab_operator.plan.look import Decision
from trimtab_operator.plan.pods import rfc3339

Json = dict[str, Any]
SETTINGS = cluster.Settings(Resolved(image="engine:1"), "KEY")
CEILINGS = Ceilings(max_num_batched_tokens=8192, max_num_seqs=256)
TUNING: Json = {"mode": "Recommend", "parameters": [BUDGET_PARAMETER], "limits": {"extraReplicas": 1}}
SHADOW = ("Deployment", "chat-1-shadow")


def versioned(document: Json) -> Versioned:
    return Versioned(
        document["generation"], document["source"], LiveConfig.from_json(document["config"], CEILINGS)
    )


@dataclass
class World:
    """A service with one ready pod, `a`, and a Shadow run with engines of its own, `s`, as far as they were made."""

    now: float = T0 + 1000
    spec: Json = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    waits: str | None = None
    unplaced: bool = False  # a second pod of the service looks for a place
    job: Json | None = None
    children: dict[tuple[str, str], Json] = field(default_factory=dict)
    objects: dict[tuple[str, str], Json] = field(default_factory=dict)
    engines: dict[str, LiveState] = field(default_factory=dict)
    starting: tuple[Json, ...] = ()  # pods of the shadow that are not ready
    previous: ServiceStatus = field(default_factory=ServiceStatus)
    run_status: Json = field(default_factory=dict)
    run_annotations: dict[str, str] = field(default_factory=dict)
    generation: int = 1  # of the service

    def service(self) -> InferenceService:
        given = resource(**{"tuning": TUNING, **self.spec})
        given["metadata"] |= {
            "namespace": "default",
            "uid": "u",
            "generation": self.generation,
            "annotations": self.annotations,
        }
        return schema.parse_service(given)

    def run(self) -> TuningRun:
        built = run_resource(evaluator="Shadow", timeLimit="1h")
        built["metadata"] |= {"namespace": "default", "uid": "r", "generation": 1, "creationTimestamp": moment(0),
                              "annotations": self.run_annotations}  # fmt: skip
        built["status"] = copy.deepcopy(self.run_status)
        return schema.parse_run(built)

    def observed(self) -> cluster.Observed:
        deployment = self.children.get(("Deployment", "chat-engine"), {})
        marks = deployment.get("spec", {}).get("template", {}).get("metadata", {}).get("annotations", {})
        mark = marks.get(names.ANNOTATION_TEMPLATE_HASH, "")
        for engine in self.engines.values():
            engine.expire(self.now)
        own = [pod("a", mark, ready_since=10)] if "a" in self.engines else []
        own += [pod("b", mark, unschedulable_since=20)] if self.unplaced else []
        added = [pod(name, ready_since=10) for name in self.engines if name != "a"]
        for each in (*added, *self.starting):
            each["metadata"]["labels"] = names.shadow_labels("chat", "chat-1")
        worker = {"chat-1": workers.Worker(self.job)} if self.job is not None else {}
        return cluster.Observed(
            service=self.service(),
            previous=self.previous,
            children=copy.deepcopy(self.children),
            pods=tuple(own),
            runs=(self.run(),),
            read_backs={name: json.loads(json.dumps(e.to_json(0.0))) for name, e in self.engines.items()},
            shadow=shadow.Standing(copy.deepcopy(self.objects), (*added, *self.starting)),
            waits=self.waits,
            workers=worker,
        )

    def round(self) -> Decision:
        """One look, carried out."""
        time = rfc3339(self.now)
        decision = cluster.decide(self.observed(), SETTINGS, self.now, time)
        for manifest in decision.changes.apply:
            self.children[manifest["kind"], manifest["metadata"]["name"]] = copy.deepcopy(manifest)
        for manifest in decision.shadow.changes.apply:
            made = copy.deepcopy(manifest)
            made["metadata"]["creationTimestamp"] = time
            if made["kind"] == "Service":
                made["spec"]["clusterIP"] = "10.96.0.9"
            self.objects[made["kind"], made["metadata"]["name"]] = made
        for live in decision.shadow.changes.delete:
            del self.objects[live["kind"], live["metadata"]["name"]]
        if decision.new_worker is not None:
            owner = {"apiVersion": names.API_VERSION, "kind": "TuningRun", "uid": "r", "controller": True}
            self.job = {"kind": "Job", "metadata": {"name": "chat-1-worker", "uid": "j", "creationTimestamp": time,
                                                    "ownerReferences": [owner]}}  # fmt: skip
        for name, calls in decision.calls.items():
            for call in calls:
                if isinstance(call, live_push.EndCandidate):
                    self.engines[name].end_candidate()
                else:
                    self.engines[name].offer(versioned(call.document), call.lease_s, self.now)
        conclusion = cluster.conclude(self.observed(), decision, self.now, time)
        self.previous = conclusion.status
        written = ("candidate", "trials", "result")  # by the worker
        kept: Json = {key: self.run_status[key] for key in written if key in self.run_status}
        self.run_status = {**conclusion.run_statuses["chat-1"], **kept}
        return decision

    def settle(self) -> Decision:
        for _ in range(5):
            decision = self.round()
        assert not decision.calls
        assert not decision.shadow.changes.apply
        return decision

    def add(self, name: str) -> None:
        """A pod is ready: it started from the mounted live.json."""
        document = json.loads(self.children["ConfigMap", "chat-live"]["data"]["live.json"])
        self.engines[name] = LiveState(versioned(document), CEILINGS)

    def try_candidate(self, tokens: int = 128) -> None:
        config = {"maxNumBatchedTokens": tokens}
        self.run_status["candidate"] = {"trial": 0, "config": config, "until": rfc3339(self.now + 60)}

    def budget(self, name: str) -> int:
        return self.engines[name].in_force.config.max_num_batched_tokens

    def reason(self, kind: str = names.READY) -> tuple[str, str, str]:
        """Status, reason and message of the run's condition."""
        found = RunStatus.from_json(self.run_status)
        [condition] = [c for c in found.conditions if c.type == kind]
        return condition.status, condition.reason, condition.message


def served(**changes: Any) -> World:
    """The service's own pod is there; the run is still to begin."""
    world = World(waits="not yet", **changes)
    world.round()
    world.add("a")
    world.round()
    world.waits = None
    return world


def running(**changes: Any) -> World:
    """The run's engine is ready too."""
    world = served(**changes)
    world.settle()
    world.add("s")
    world.settle()
    return world


def test_its_candidates_go_to_its_engines_alone_in_mode_recommend_too() -> None:
    world = running()
    numbers = world.engines["a"].to_json(0.0)
    world.try_candidate()
    decision = world.settle()
    assert (world.budget("s"), world.budget("a")) == (128, 2048)
    assert world.engines["a"].to_json(0.0) == numbers, "the service's own has heard of nothing"
    assert decision.targets == {"s"}
    assert world.run_status["applied"]["pods"] == "1/1"
    assert (world.run_status["phase"], world.run_status["summary"]["candidate"]) == ("Running", "128/fcfs")
    status = world.previous
    assert status.engine.applied == status.engine.desired
    assert status.summary.replicas == "1/1"
    # Its end is heard there too.
    del world.run_status["candidate"]
    world.settle()
    assert world.budget("s") == 2048


def test_all_that_it_wants_count_even_before_they_answer() -> None:
    world = running(spec={"replicas": 2, "tuning": {**TUNING, "limits": {"extraReplicas": 2}}})
    world.try_candidate()
    world.settle()
    assert world.run_status["applied"]["pods"] == "1/2"


def test_one_that_is_lost_in_mid_trial_is_told_of_and_its_successor_gets_the_candidate() -> None:
    world = served(spec={"replicas": 2, "tuning": {**TUNING, "limits": {"extraReplicas": 2}}})
    world.settle()
    world.add("s")
    world.add("t")
    world.settle()
    world.try_candidate()
    world.settle()
    assert world.run_status["applied"]["pods"] == "2/2"
    del world.engines["t"]
    world.starting = (pod("u", unschedulable_since=20),)
    world.settle()
    said = "1 of 2 shadow pods are ready; u: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    assert world.reason() == ("False", names.SHADOW_NOT_READY, said)
    assert (world.run_status["phase"], world.run_status["applied"]["pods"]) == ("Running", "1/2")
    assert world.job is not None
    world.starting = ()
    world.add("u")
    world.settle()
    assert (world.budget("u"), world.run_status["applied"]["pods"]) == (128, "2/2")
    assert world.reason()[1] == "Running"


def test_an_engine_of_its_own_that_restarts_gets_the_candidate_again() -> None:
    world = running()
    world.try_candidate()
    world.settle()
    world.add("s")
    assert world.budget("s") == 2048
    world.settle()
    assert world.budget("s") == 128


def test_a_live_edit_of_the_service_reaches_its_engines_as_well() -> None:
    world = running()
    world.spec["engine.maxNumSeqs"] = 32
    world.settle()
    assert {e.in_force.config.max_num_seqs for e in world.engines.values()} == {32}


def test_it_begins_with_its_engines_and_gets_its_worker_once_they_are_ready() -> None:
    world = served()
    world.settle()
    assert SHADOW in world.objects
    assert world.job is None
    assert world.reason() == ("False", names.SHADOW_NOT_READY, "0 of 1 shadow pods are ready")
    assert world.run_status["startTime"] == world.objects[SHADOW]["metadata"]["creationTimestamp"]
    world.add("s")
    made = world.round()
    assert made.new_worker is not None
    engines = made.shadow.engines
    assert engines is not None
    assert (engines.replicas, engines.url) == (1, "http://10.96.0.9:8000")
    assert engines.secret.startswith("chat-1-shadow-")
    world.settle()
    assert (world.job is not None, world.reason()[1]) == (True, "Pending")


def test_engines_without_a_place_are_told_of_until_the_time_limit_and_then_too() -> None:
    world = served()
    world.starting = (pod("s", unschedulable_since=5),)
    world.settle()
    said = "0 of 1 shadow pods are ready; s: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    assert world.reason() == ("False", names.SHADOW_NOT_READY, said)
    world.now += 3601
    world.settle()
    assert world.run_status["phase"] == "Stopped"
    status, reason, message = world.reason(names.STALLED)
    assert (status, reason) == ("True", names.TIME_LIMIT_REACHED)
    assert message == f"spec.timeLimit (1h) is over without a result; until then {said}"
    assert world.objects == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"spec": {"engine.image": "engine:2"}}, names.SERVICE_CHANGED),
        ({"spec": {"engine.maxModelLen": 512}}, names.SERVICE_CHANGED),
        ({"spec": {"tuning": {**TUNING, "limits": {}}}}, names.SERVICE_CHANGED),
        ({"spec": {"tuning": {**TUNING, "mode": "Off"}}}, names.SERVICE_CHANGED),
        ({"unplaced": True}, names.MADE_ROOM),
    ],
)
def test_a_change_of_the_service_stops_it_for_good(change: Json, reason: str) -> None:
    world = running()
    world.try_candidate()
    world.settle()
    for name, value in change.items():
        setattr(world, name, value)
    world.generation += 1
    stopped = world.round()
    assert stopped.trial is None
    assert world.objects == {}
    assert (world.run_status["phase"], world.reason(names.STALLED)[:2]) == ("Stopped", ("True", reason))
    before = copy.deepcopy(world.run_status)
    world.spec, world.unplaced = {}, False
    world.now += 60
    world.round()
    assert (world.run_status, world.objects) == (before, {}), "taking the change back does not bring it back"


def hold(world: World, how: str) -> None:
    """Something that ends."""
    if how == "quiet":
        quiet: Json = {"notDuring": [{"schedule": "* * * * *", "duration": "2m"}]}
        world.spec["tuning"] = {**TUNING, "limits": {**TUNING["limits"], **quiet}}
    elif how == "turn":
        world.waits = "others come first"
    else:
        world.annotations[names.ANNOTATION_TUNING] = how


def release(world: World) -> None:
    world.waits = None
    world.annotations.clear()
    world.spec.pop("tuning", None)


@pytest.mark.parametrize("how", ["paused", "reverted", "quiet", "turn"])
def test_while_it_is_held_its_engines_are_gone_and_its_worker_finds_them_again(how: str) -> None:
    world = running()
    address = copy.deepcopy(world.objects["Service", "chat-1-shadow"])
    hold(world, how)
    world.round()
    assert world.objects[SHADOW]["spec"]["replicas"] == 0
    if how == "turn":
        assert world.reason()[1] == names.WAITING_FOR_TURN
    del world.engines["s"]
    world.settle()
    release(world)
    world.settle()
    assert world.objects[SHADOW]["spec"]["replicas"] == 1
    assert world.objects["Service", "chat-1-shadow"] == address, "its worker was told of this one"
    assert world.reason()[1:] == (names.SHADOW_NOT_READY, "0 of 1 shadow pods are ready")
    world.add("s")
    world.try_candidate()
    world.settle()
    assert world.budget("s") == 128


@pytest.mark.parametrize("how", ["paused", "quiet", "turn"])
def test_while_it_is_held_its_engines_are_not_made(how: str) -> None:
    world = served()
    hold(world, how)
    world.settle()
    assert world.objects == {}


@pytest.mark.parametrize("end", ["judged", "deleted", "failed"])
def test_its_engines_go_with_it(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = running()
    if end == "judged":
        world.run_status["result"] = {"verdict": "KeptIncumbent"}
    elif end == "failed":
        assert world.job is not None
        world.job["status"] = {"conditions": [{"type": "Failed", "status": "True", "message": "it crashed"}]}
    else:
        alive = world.run()
        gone = copy.deepcopy(dict(alive.raw))
        gone["metadata"]["deletionTimestamp"] = moment(2000)
        monkeypatch.setattr(world, "run", lambda: TuningRun.parse(gone))
    decision = cluster.decide(world.observed(), SETTINGS, world.now, rfc3339(world.now))
    assert len(decision.shadow.changes.delete) == len(shadow.KINDS)


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        ({**TUNING, "limits": {}}, "spec.tuning.limits.extraReplicas: 0 is not allowed; at least 1"),
        ({**TUNING, "mode": "Off"}, "spec.tuning.mode: 'Off' is not allowed; any other"),
    ],
)
def test_what_the_service_does_not_allow_is_said_with_path_and_value(tuning: Json, words: str) -> None:
    world = served(spec={"tuning": tuning})
    world.settle()
    status, reason, message = world.reason(names.STALLED)
    assert (status, reason) == ("True", names.NOT_ALLOWED_BY_SERVICE)
    assert words in message
    assert world.objects == {}


def test_names_that_somebody_else_holds_are_said_by_the_run_and_hold_up_no_service() -> None:
    world = served()
    theirs = {"kind": "Service", "metadata": {"name": "chat-1-shadow", "uid": "x"}}
    world.objects["Service", "chat-1-shadow"] = theirs
    decision = cluster.decide(world.observed(), SETTINGS, world.now, rfc3339(world.now))
    conclusion = cluster.conclude(world.observed(), decision, world.now, rfc3339(world.now))
    world.run_status = conclusion.run_statuses["chat-1"]
    assert world.reason(names.STALLED)[1] == names.NAME_TAKEN
    assert "Service/chat-1-shadow" in world.reason(names.STALLED)[2]
    ready = conclusion.status.condition(names.READY)
    assert ready is not None
    assert ready.status == "True"


def test_a_result_in_mode_recommend_is_recommended_and_in_mode_apply_in_force() -> None:
    for mode, want in (("Recommend", 2048), ("Apply", 128)):
        world = running(spec={"tuning": {**TUNING, "mode": mode}})
        world.run_status["result"] = {"verdict": "Applied", "config": {"maxNumBatchedTokens": 128}}
        del world.engines["s"]
        world.settle()
        assert world.previous.tuning.recommendation is not None
        assert world.budget("a") == want


def test_who_measures_from_outside_gets_the_engines_too() -> None:
    world = served(run_annotations={names.ANNOTATION_WORKER: "none"})
    world.settle()
    assert SHADOW in world.objects
    assert world.job is None
