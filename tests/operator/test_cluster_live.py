"""Live config of a cluster's service, planned against the engine's own state machine: whatever happens, all engines converge.

The world here is small and real where it counts: engines are `LiveState` objects of the engine, the ConfigMap is what the plan
applies, and every round plans from scratch, as after an operator restart. An engine raises on a number that it may not take, so
each push is a check of the numbering too.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.pods import T0, moment, pod
from support.services import resource, run_resource
from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_engine.errors import GenerationConflict
from trimtab_engine.live_state import LiveState, Versioned
from trimtab_operator import names, schema
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.api.status import Resolved, ServiceStatus
from trimtab_operator.plan import cluster, live_push
from trimtab_operator.plan.children import Changes
from trimtab_operator.plan.pods import rfc3339, unix

Json = dict[str, Any]
SETTINGS = cluster.Settings(Resolved(image="engine:1"), "KEY")
CEILINGS = Ceilings(max_num_batched_tokens=8192, max_num_seqs=256)
PARAMETERS = [{"name": "maxNumBatchedTokens", "min": 64, "max": 4096}]
LIVE_MAP = ("ConfigMap", "chat-live")


def versioned(document: Json) -> Versioned:
    return Versioned(
        document["generation"], document["source"], LiveConfig.from_json(document["config"], CEILINGS)
    )


@cache
def parsed(text: str) -> InferenceService:
    return schema.parse_service(json.loads(text))


@dataclass
class World:
    """A service with three ready pods and at most one run."""

    mode: str = "Apply"
    now: float = T0 + 1000
    spec: Json = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    run: Json | None = None
    children: dict[tuple[str, str], Json] = field(default_factory=dict)
    engines: dict[str, LiveState] = field(default_factory=dict)
    previous: ServiceStatus = field(default_factory=ServiceStatus)
    generation: int = 1
    status_of_run: Json | None = None

    def observed(self) -> cluster.Observed:
        changes = {"tuning.mode": self.mode, "tuning.parameters": PARAMETERS, **self.spec, "replicas": 3}
        given = resource(**changes)
        given["metadata"] = {"name": "chat", "namespace": "default", "uid": "u", "generation": self.generation,
                             "annotations": self.annotations}  # fmt: skip
        for engine in self.engines.values():
            engine.expire(self.now)
        return cluster.Observed(
            service=parsed(json.dumps(given)),
            previous=self.previous,
            children=copy.deepcopy(self.children),
            pods=tuple(pod(name, ready_since=10) for name in self.engines),
            runs=() if self.run is None else (TuningRun.parse(self.run),),
            read_backs={name: json.loads(json.dumps(e.to_json(0.0))) for name, e in self.engines.items()},
        )

    def round(self, act: bool = True) -> cluster.Decision:
        """One reconcile."""
        time = rfc3339(self.now)
        decision = cluster.decide(self.observed(), SETTINGS, self.now, time)
        for manifest in decision.changes.apply:
            self.children[(manifest["kind"], manifest["metadata"]["name"])] = copy.deepcopy(manifest)
        for name, calls in decision.calls.items() if act else ():
            for call in calls:
                if isinstance(call, live_push.EndCandidate):
                    self.engines[name].end_candidate()
                else:
                    self.engines[name].offer(versioned(call.document), call.lease_s, self.now)
        conclusion = cluster.conclude(self.observed(), decision, self.now, time)
        self.previous = conclusion.status
        if self.run is not None:
            self.status_of_run = conclusion.run_statuses["chat-1"]
            self.run["status"].update(self.status_of_run)
        return decision

    def settle(self) -> cluster.Decision:
        for _ in range(4):
            decision = self.round()
            if not decision.calls and not decision.changes.apply:
                return decision
        raise AssertionError(f"does not come to rest: {decision.calls}")

    def add_pod(self, name: str) -> None:
        """A pod starts from the mounted live.json."""
        document = json.loads(self.children[LIVE_MAP]["data"]["live.json"])
        self.engines[name] = LiveState(versioned(document), CEILINGS)

    def try_candidate(self, trial: int, tokens: int, seconds: float = 60.0) -> None:
        self.run = run_resource()
        self.run["metadata"].update(uid="r1", generation=1, creationTimestamp=moment(0))
        self.run["status"] = {
            "candidate": {
                "trial": trial,
                "config": {"maxNumBatchedTokens": tokens},
                "until": rfc3339(self.now + seconds),
            }
        }


def started(**changes: Any) -> World:
    world = World(**changes)
    world.round()
    for name in ("a", "b", "c"):
        world.add_pod(name)
    world.settle()
    return world


def budgets(world: World) -> list[int]:
    return [engine.in_force.config.max_num_batched_tokens for engine in world.engines.values()]


def test_at_rest_nothing_is_applied_said_or_changed() -> None:
    world = started()
    before = world.previous
    world.now += 3600
    decision = world.round()
    assert decision.changes == Changes()
    assert decision.calls == {}
    assert world.previous == before


def test_an_edit_reaches_every_pod_under_the_next_number_and_the_template_stays() -> None:
    world = started()
    first = world.round()
    world.spec["engine.maxNumBatchedTokens"] = 512
    second = world.settle()
    assert budgets(world) == [512, 512, 512]
    assert second.incumbent["generation"] == first.incumbent["generation"] + 1
    assert second.template_hash == first.template_hash
    assert world.previous.engine.applied is not None
    assert world.previous.engine.applied.max_num_batched_tokens == 512
    assert world.previous.engine.applied_replicas == "3/3"


def test_the_number_is_in_the_config_map_before_any_engine_hears_of_it() -> None:
    world = started()
    world.spec["engine.maxNumBatchedTokens"] = 512
    decision = world.round(act=False)
    assert json.loads(world.children[LIVE_MAP]["data"]["live.json"]) == decision.incumbent
    assert set(decision.calls) == {"a", "b", "c"}


@pytest.mark.parametrize("place", ["live.json", "annotation", "status"])
def test_a_number_that_somebody_wrote_leaves_room_for_every_later_edit(place: str) -> None:
    world = started()
    for number in (2**62 - 1, 2**61 - 1, 2**40):
        before = max(engine.highest_generation for engine in world.engines.values())
        live = world.children[LIVE_MAP]
        if place == "live.json":
            document = json.loads(live["data"]["live.json"]) | {"generation": number}
            document["config"]["max_num_batched_tokens"] = 64
            live["data"]["live.json"] = json.dumps(document)
            for engine in world.engines.values():  # as the kubelet shows it to them
                with pytest.raises(GenerationConflict, match="rise by at most"):
                    engine.offer(versioned(document), None, world.now)
        elif place == "annotation":
            live["metadata"]["annotations"][names.ANNOTATION_HIGHEST] = str(number)
        else:
            desired = world.previous.engine.desired
            assert desired is not None
            world.previous = replace(
                world.previous,
                engine=replace(world.previous.engine, desired=replace(desired, generation=number)),
            )
        for tokens in (512, 1024):
            world.spec["engine.maxNumBatchedTokens"] = tokens
            world.settle()
            assert budgets(world) == [tokens] * 3
        assert max(engine.highest_generation for engine in world.engines.values()) <= before + 4


def test_a_candidate_is_a_lease_and_never_enters_the_mounted_file() -> None:
    world = started()
    world.try_candidate(0, 128)
    mounted = world.children[LIVE_MAP]["data"]["live.json"]
    decision = world.settle()
    assert budgets(world) == [128, 128, 128]
    assert world.children[LIVE_MAP]["data"]["live.json"] == mounted
    assert decision.trial is not None
    assert all(e.next_end_s <= world.now + live_push.LEASE_S for e in world.engines.values())
    assert world.status_of_run is not None
    assert world.status_of_run["applied"]["pods"] == "3/3"
    assert world.status_of_run["phase"] == "Running"
    assert world.status_of_run["summary"] == {"trials": 0, "incumbent": "2048/fcfs", "candidate": "128/fcfs"}


def test_a_lease_is_renewed_under_its_number_while_the_run_wants_it_and_not_after() -> None:
    world = started()
    world.try_candidate(0, 128, seconds=100)
    number = world.settle().trial.document["generation"]  # type: ignore[union-attr]
    for _ in range(8):
        world.now += live_push.RENEW_EVERY_S
        decision = world.round()
        assert decision.trial is not None
        assert decision.trial.document["generation"] == number
        assert budgets(world) == [128, 128, 128]
    world.now += 25
    for engine in world.engines.values():
        assert engine.expire(world.now)  # nobody was needed for that
    assert budgets(world) == [2048, 2048, 2048]


def test_after_an_operators_absence_the_candidate_comes_back_under_a_new_number() -> None:
    world = started()
    world.try_candidate(0, 128, seconds=100)
    first = world.settle()
    world.now += live_push.LEASE_S + 5
    second = world.settle()
    assert budgets(world) == [128, 128, 128]
    assert first.trial is not None
    assert second.trial is not None
    assert second.trial.document["generation"] > first.trial.document["generation"]


def test_canary_mode_tries_on_a_few_pods_and_stays_with_them() -> None:
    world = started(mode="Canary")
    world.try_candidate(0, 128)
    world.settle()
    assert sorted(budgets(world)) == [128, 2048, 2048]
    chosen = budgets(world).index(128)
    world.now += live_push.RENEW_EVERY_S
    world.settle()
    assert budgets(world).index(128) == chosen


def test_canary_pods_bound_how_many_try() -> None:
    world = started(mode="Canary", spec={"tuning.limits.canaryPods": 2})
    world.try_candidate(0, 128)
    world.settle()
    assert sorted(budgets(world)) == [128, 128, 2048]


# Quiet times. The world's clock starts on a Friday at 08:16:40 UTC.


def quiet_spec(schedule: str, duration: str = "1h") -> Json:
    return {"tuning.limits.notDuring": [{"schedule": schedule, "duration": duration}]}


def ready(world: World) -> tuple[str, str]:
    assert world.status_of_run is not None
    found = next(c for c in world.status_of_run["conditions"] if c["type"] == names.READY)
    return found["reason"], found["message"]


def test_in_a_quiet_time_no_candidate_is_tried_and_the_run_says_until_when() -> None:
    world = started(spec=quiet_spec("0 8 * * 5"))
    world.try_candidate(0, 128, seconds=7200)
    world.settle()
    assert budgets(world) == [2048] * 3
    reason, message = ready(world)
    assert reason == names.QUIET_TIME
    assert "spec.tuning.limits.notDuring[0] (0 8 * * 5) is in force until 2027-01-15T09:00:00Z" in message
    stalled = next(c for c in world.status_of_run["conditions"] if c["type"] == names.STALLED)  # type: ignore[index]
    assert stalled["status"] == "False", "nothing is wrong with the candidate"
    world.now = unix("2027-01-15T09:00:00Z")
    world.settle()
    assert budgets(world) == [128] * 3


def test_a_candidate_in_force_is_given_back_when_a_quiet_time_begins() -> None:
    world = started(spec=quiet_spec("17 8 * * *"))  # in twenty seconds
    world.try_candidate(0, 128, seconds=7200)
    world.settle()
    assert budgets(world) == [128] * 3
    begin = unix("2027-01-15T08:17:00Z")
    assert all(e.next_end_s == begin for e in world.engines.values()), "engines need nobody for that"
    world.now = begin
    assert world.round().trial is None
    assert budgets(world) == [2048] * 3
    assert ready(world)[0] == names.QUIET_TIME
    assert "applied" not in world.status_of_run  # type: ignore[operator]


def test_an_edit_that_makes_now_a_quiet_time_ends_a_candidate_at_once() -> None:
    world = started()
    world.try_candidate(0, 128, seconds=7200)
    world.settle()
    world.spec |= quiet_spec("0 8 * * *")
    world.settle()
    assert budgets(world) == [2048] * 3


def test_a_result_waits_for_the_end_of_a_quiet_time_and_is_promoted_then() -> None:
    world = started(spec=quiet_spec("0 8 * * *"))
    finish(world)
    world.settle()
    assert budgets(world) == [2048] * 3
    assert world.previous.tuning.recommendation is None
    reason, message = ready(world)
    assert reason == names.QUIET_TIME
    assert "the result is taken afterwards" in message
    assert "until 2027-01-15T09:00:00Z" in message
    world.now = unix("2027-01-15T09:00:00Z")
    world.settle()
    assert budgets(world) == [256] * 3
    assert world.status_of_run["phase"] == "Succeeded"  # type: ignore[index]


def test_the_service_says_that_it_is_quiet_and_changes_nothing_at_rest() -> None:
    world = started(spec=quiet_spec("0 8 * * *"))
    condition = world.previous.condition(names.TUNING_READY)
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", names.QUIET_TIME)
    assert world.previous.tuning.state == "Quiet"
    before = world.previous
    world.now += 600
    world.round()
    assert world.previous == before
    world.now = unix("2027-01-15T09:00:00Z")
    world.round()
    assert world.previous.tuning.state == "Idle"


def test_a_recommendation_in_force_stays_in_a_quiet_time_and_a_person_may_still_revert_it() -> None:
    world = started(spec=quiet_spec("20 8 * * *"))
    finish(world)
    world.settle()
    world.now = unix("2027-01-15T08:30:00Z")
    world.settle()
    assert budgets(world) == [256] * 3
    world.annotations = {names.ANNOTATION_TUNING: "reverted"}
    world.settle()
    assert budgets(world) == [2048] * 3
    assert world.previous.tuning.state == "Reverted"


def test_the_next_look_is_at_the_border_of_a_quiet_time_without_any_event() -> None:
    for schedule, want in (("0 8 * * *", "2027-01-15T09:00:00Z"), ("30 8 * * *", "2027-01-15T08:30:00Z")):
        world = started(spec=quiet_spec(schedule))
        time = rfc3339(world.now)
        decision = cluster.decide(world.observed(), SETTINGS, world.now, time)
        # Concluding takes its time; a border that passed meanwhile is not missed.
        for later in (0, 7200):
            found = cluster.conclude(world.observed(), decision, world.now + later, time)
            assert found.look_again_s == unix(want)


def test_a_deleted_run_ends_its_candidate_at_once() -> None:
    world = started()
    world.try_candidate(0, 128)
    world.settle()
    world.run = None
    world.settle()
    assert budgets(world) == [2048, 2048, 2048]


def test_a_persons_edit_ends_the_candidate_until_the_run_offers_another() -> None:
    world = started()
    world.try_candidate(0, 128)
    world.settle()
    world.spec["engine.maxNumBatchedTokens"] = 1024
    decision = world.settle()
    assert budgets(world) == [1024, 1024, 1024]
    assert decision.refusal is not None
    assert "edit" in decision.refusal
    world.try_candidate(1, 256)
    world.settle()
    assert budgets(world) == [256, 256, 256]


def test_scaling_does_not_end_a_candidate_and_a_new_pod_joins_it() -> None:
    world = started()
    world.try_candidate(0, 128)
    world.settle()
    world.add_pod("d")
    assert world.engines["d"].in_force.config.max_num_batched_tokens == 2048
    world.settle()
    assert budgets(world) == [128] * 4


def test_pausing_stops_the_candidate_and_reverting_goes_back_to_spec() -> None:
    world = started()
    world.try_candidate(0, 128)
    world.settle()
    world.annotations = {names.ANNOTATION_TUNING: "paused"}
    world.settle()
    assert budgets(world) == [2048] * 3


def finish(world: World, verdict: str = "Applied", tokens: int = 256) -> None:
    world.try_candidate(0, tokens, seconds=-1)
    assert world.run is not None
    world.run["status"]["result"] = {"verdict": verdict, "config": {"maxNumBatchedTokens": tokens}}


def test_a_result_becomes_the_recommendation_and_is_in_force_with_mode_apply() -> None:
    world = started()
    finish(world)
    decision = world.settle()
    assert budgets(world) == [256] * 3
    assert decision.incumbent["source"] == "Recommendation"
    assert world.previous.tuning.last_run is not None
    assert world.previous.tuning.last_run.name == "chat-1"
    assert world.status_of_run is not None
    assert world.status_of_run["phase"] == "Succeeded"
    world.run = None  # deleting the run takes nothing back
    world.settle()
    assert budgets(world) == [256] * 3


def test_a_result_is_taken_once() -> None:
    world = started()
    finish(world)
    world.settle()
    world.spec["engine.maxNumBatchedTokens"] = 1024  # a person's edit voids it
    decision = world.round()
    assert decision.superseded is not None
    world.settle()
    assert budgets(world) == [1024] * 3
    del world.spec["engine.maxNumBatchedTokens"]
    world.settle()
    assert budgets(world) == [2048] * 3, "going back to the old value does not bring the recommendation back"


def test_reverted_holds_a_recommendation_off_and_active_brings_it_back() -> None:
    world = started()
    finish(world)
    world.settle()
    world.annotations = {names.ANNOTATION_TUNING: "reverted"}
    world.settle()
    assert budgets(world) == [2048] * 3
    world.annotations = {names.ANNOTATION_TUNING: "active"}
    world.settle()
    assert budgets(world) == [256] * 3


def test_results_and_candidates_outside_the_bounds_are_refused_by_path_and_range() -> None:
    world = started()
    world.try_candidate(0, 100_000)
    decision = world.settle()
    assert budgets(world) == [2048] * 3
    assert decision.refusal is not None
    assert "maxNumBatchedTokens" in decision.refusal
    assert "64 to 4096" in decision.refusal
    assert world.status_of_run is not None
    assert {c["type"]: c["reason"] for c in world.status_of_run["conditions"]}[
        "Stalled"
    ] == names.CANDIDATE_REFUSED


def test_a_lost_config_map_comes_back_above_every_number_that_was_given() -> None:
    world = started()
    world.try_candidate(0, 128)
    world.settle()
    seen = max(engine.highest_generation for engine in world.engines.values())
    del world.children[LIVE_MAP]
    world.run = None
    decision = world.settle()
    assert decision.incumbent["generation"] > seen
    assert budgets(world) == [2048] * 3


EVENTS = st.sampled_from(["edit", "candidate", "end", "delete run", "restart", "lose map", "mangle map", "foreign", "wait", "pause",
                          "resume", "half round", "finish", "lower map"])  # fmt: skip


@settings(max_examples=60)
@given(st.lists(st.tuples(EVENTS, st.integers(64, 4096)), max_size=14))
def test_whatever_happens_all_engines_converge_and_no_number_is_used_twice(
    history: list[tuple[str, int]],
) -> None:
    world = started()
    for index, (event, value) in enumerate(history):
        names_of_pods = list(world.engines)
        victim = names_of_pods[value % 3]
        if event == "edit":
            world.spec["engine.maxNumBatchedTokens"] = value
        elif event == "candidate":
            world.try_candidate(index, value, seconds=value % 90)
        elif event == "end" and world.run is not None:
            world.run["status"].pop("candidate", None)
        elif event == "delete run":
            world.run = None
        elif event == "restart" and LIVE_MAP in world.children:
            try:
                world.add_pod(victim)
            except (ValueError, KeyError):
                continue  # a mangled file: the engine starts from its arguments; the plan is the same
        elif event == "lose map":
            world.children.pop(LIVE_MAP, None)
        elif event == "mangle map" and LIVE_MAP in world.children:
            world.children[LIVE_MAP]["data"]["live.json"] = "{" * (value % 3)
        elif event == "lower map" and LIVE_MAP in world.children:
            world.children[LIVE_MAP]["metadata"]["annotations"] = {}
        elif event == "foreign":
            engine = world.engines[victim]
            document = copy.deepcopy(world.observed().read_backs[victim]["incumbent"])
            document["generation"] = engine.highest_generation + 1
            document["config"]["max_num_seqs"] = 1 + value % 64
            engine.offer(versioned(document), None, world.now)
        elif event == "wait":
            world.now += value % 50
        elif event in ("pause", "resume"):
            world.annotations = {names.ANNOTATION_TUNING: "paused" if event == "pause" else "active"}
        elif event == "half round":
            world.round(act=False)
        elif event == "finish":
            finish(world, tokens=value)
        if value % 2:
            world.round()
    decision = world.settle()
    for name, engine in world.engines.items():
        assert engine.incumbent == versioned(decision.incumbent)
        wanted = (
            decision.trial.document
            if decision.trial is not None and name in decision.targets
            else decision.incumbent
        )
        assert engine.in_force == versioned(wanted)
