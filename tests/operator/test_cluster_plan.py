"""The plan of a service in a cluster: children, upgrades, room, and what the Deployment alone knows."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from support.pods import T0, pod, terminated
from support.services import resource
from trimtab_operator import names, schema
from trimtab_operator.api.status import Resolved, ServiceStatus
from trimtab_operator.errors import Finding
from trimtab_operator.plan import cluster
from trimtab_operator.plan.events import transitions
from trimtab_operator.plan.handover import LEASE_S
from trimtab_operator.plan.pods import rfc3339
from trimtab_operator.plan.rollout import UNSCHEDULABLE_PATIENCE_S
from trimtab_operator.plan.status import invalid_status

Json = dict[str, Any]
OLD = cluster.Settings(Resolved(image="engine:1"), "KEY")
NEW = cluster.Settings(Resolved(image="engine:2"), "KEY")
NOW = T0 + 1000


def observed(**changes: Any) -> cluster.Observed:
    given = resource(**changes)
    given["metadata"] = {"name": "chat", "namespace": "default", "uid": "u", "generation": 1}
    return cluster.Observed(schema.parse_service(given))


def decide(seen: cluster.Observed, settings: cluster.Settings = OLD, now: float = NOW) -> cluster.Decision:
    return cluster.decide(seen, settings, now, rfc3339(now))


def carried_out(
    seen: cluster.Observed, settings: cluster.Settings = OLD, now: float = NOW
) -> cluster.Observed:
    """`seen` after one reconcile, as a cluster without controllers would show it."""
    decision = decide(seen, settings, now)
    live = {key: dict(value) for key, value in seen.children.items()}
    live |= {(m["kind"], m["metadata"]["name"]): copy.deepcopy(m) for m in decision.changes.apply}
    for gone in decision.changes.delete:
        del live[(gone["kind"], gone["metadata"]["name"])]
    status = cluster.conclude(seen, decision, now, rfc3339(now)).status
    return replace(seen, children=live, previous=status)


def edited(seen: cluster.Observed, **changes: Any) -> cluster.Observed:
    changed = observed(**changes).service
    metadata = replace(changed.metadata, generation=seen.service.metadata.generation + 1)
    return replace(seen, service=replace(changed, metadata=metadata))


def image(seen: cluster.Observed) -> str:
    deployment = seen.children[("Deployment", "chat-engine")]
    found: str = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    return found


def test_an_operator_upgrade_rolls_no_pod_and_says_that_it_waits() -> None:
    seen = carried_out(observed())
    decision = decide(seen, NEW)
    assert decision.changes.apply == ()
    status = cluster.conclude(seen, decision, NOW, rfc3339(NOW)).status
    waits = status.condition(names.UPGRADE_AVAILABLE)
    assert waits is not None
    assert waits.status == "True"


def test_the_newer_default_comes_with_the_next_restart_and_not_with_a_live_edit() -> None:
    seen = carried_out(observed())
    live = carried_out(edited(seen, **{"engine.maxNumSeqs": 8}), NEW)
    assert image(live) == "engine:1"
    restarted = carried_out(edited(live, **{"engine.maxModelLen": 512}), NEW)
    assert image(restarted) == "engine:2"


def test_upgrade_policy_auto_takes_the_newer_default_at_once() -> None:
    seen = carried_out(observed(**{"rollout.upgradePolicy": "Auto"}))
    assert image(carried_out(seen, NEW)) == "engine:2"


def test_a_service_with_its_own_image_has_no_upgrade_to_wait_for() -> None:
    changes = {"engine.image": "mine:1"}
    seen = carried_out(observed(**changes))
    decision = decide(seen, NEW)
    assert not decision.upgrade_available
    assert decision.changes.apply == ()


def surge(seen: cluster.Observed, now: float = NOW) -> int:
    deployment = carried_out(seen, now=now).children[("Deployment", "chat-engine")]
    found: int = deployment["spec"]["strategy"]["rollingUpdate"]["maxSurge"]
    return found


def with_pods(seen: cluster.Observed, *pods: Json) -> cluster.Observed:
    return replace(seen, pods=pods)


def test_a_surge_pod_without_a_place_makes_room_by_surge_zero_until_the_rollout_is_over() -> None:
    seen = carried_out(observed(replicas=2))
    wanted = decide(seen).template_hash
    old = [pod("old-1", "former", ready_since=1), pod("old-2", "former", ready_since=1)]
    waiting = pod("new-1", wanted, unschedulable_since=900)
    early = T0 + 900 + UNSCHEDULABLE_PATIENCE_S - 1
    assert surge(with_pods(seen, *old, waiting), early) == 1
    seen = carried_out(with_pods(seen, *old, waiting), now=early + 1)
    assert surge(with_pods(seen, *old, waiting), early + 1) == 0
    placed = pod("new-1", wanted, ready_since=5)
    assert surge(with_pods(seen, old[0], placed), early + 5) == 0, "the next pod would wait in vain again"
    done = with_pods(seen, placed, pod("new-2", wanted, ready_since=5))
    assert surge(done, early + 9) == 1


@pytest.mark.parametrize(
    "needs",
    [
        pytest.param({"gpus": 2}, id="more GPUs"),
        pytest.param({"nodeSelector": {"pool": "h100"}}, id="other nodes"),
    ],
)
def test_no_old_pod_is_given_up_for_one_that_could_not_take_its_place(needs: Json) -> None:
    seen = carried_out(observed())
    old = pod("old-1", "former", ready_since=1)
    waiting = pod("new-1", decide(seen).template_hash, unschedulable_since=0, **needs)
    assert surge(with_pods(seen, old, waiting)) == 1
    assert surge(with_pods(seen, old, pod("new-1", decide(seen).template_hash, unschedulable_since=0))) == 0


def replicas(seen: cluster.Observed) -> int:
    found: int = carried_out(seen).children[("Deployment", "chat-engine")]["spec"]["replicas"]
    return found


def test_recreate_asks_for_no_new_pod_while_an_old_one_still_finishes() -> None:
    seen = carried_out(observed(replicas=2, **{"rollout.strategy": "Recreate"}))
    wanted = decide(seen).template_hash
    assert replicas(seen) == 2
    assert replicas(with_pods(seen, pod("old", "former", ready_since=1))) == 0
    assert replicas(with_pods(seen, pod("old", "former", ready_since=1, deleting=True))) == 0
    assert replicas(with_pods(seen, pod("evicted", "former", phase="Failed"))) == 2
    assert replicas(with_pods(seen, pod("new", wanted, deleting=True))) == 2


def test_the_only_pod_serves_on_while_the_next_one_starts_but_not_under_recreate() -> None:
    seen = carried_out(observed())
    mark = decide(seen).template_hash
    leaving = pod("old", mark, ready_since=0.0, deleting=True)
    leaving["metadata"]["deletionTimestamp"] = rfc3339(NOW + 300)
    now = with_pods(seen, leaving, pod("next", mark))
    decision = decide(now)
    assert decision.holds == {"old": LEASE_S}
    conclusion = cluster.conclude(now, decision, NOW, rfc3339(NOW))
    assert conclusion.look_again_s is not None
    assert conclusion.look_again_s <= NOW + LEASE_S / 2, "in time to renew it"
    available = conclusion.status.condition(names.AVAILABLE)
    assert available is not None
    assert (available.status, available.reason) == ("True", names.LEAVING_POD_SERVES)
    recreate = edited(now, **{"rollout.strategy": "Recreate", "engine.maxModelLen": 512})
    assert decide(recreate).holds == {}


@pytest.mark.parametrize("strategy", ["RollingUpdate", "Recreate"])
def test_only_strategy_auto_changes_the_pace_by_itself(strategy: str) -> None:
    seen = carried_out(observed(**{"rollout.strategy": strategy}))
    before = surge(seen)
    waiting = pod("new-1", decide(seen).template_hash, unschedulable_since=0)
    assert surge(with_pods(seen, waiting)) == before


def conclude(seen: cluster.Observed, now: float = NOW) -> ServiceStatus:
    return cluster.conclude(seen, decide(seen, now=now), now, rfc3339(now)).status


def test_pods_that_may_not_be_created_are_named_with_the_api_servers_words() -> None:
    seen = carried_out(observed())
    deployment = dict(seen.children[("Deployment", "chat-engine")])
    deployment["metadata"] = {**deployment["metadata"], "generation": 2}
    deployment["status"] = {"observedGeneration": 2, "conditions": [
        {"type": "ReplicaFailure", "status": "True", "message": "pods is forbidden: exceeded quota: gpu"},
    ]}  # fmt: skip
    seen = replace(seen, children={**seen.children, ("Deployment", "chat-engine"): deployment})
    ready = conclude(seen).condition(names.READY)
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", names.PODS_NOT_CREATED)
    assert "exceeded quota" in ready.message
    deployment["status"]["conditions"].append(
        {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    )
    stalled = conclude(seen).condition(names.STALLED)
    assert stalled is not None
    assert stalled.status == "True"


def test_a_pod_that_cannot_load_its_model_stalls_the_service_while_the_old_one_serves() -> None:
    seen = carried_out(observed())
    wanted = decide(seen).template_hash
    broken = pod("new", wanted, state=terminated(1, "no such model: /models/x"))
    status = conclude(with_pods(seen, pod("old", "former", ready_since=1), broken))
    assert status.condition(names.AVAILABLE).status == "True"  # type: ignore[union-attr]
    stalled = status.condition(names.STALLED)
    assert stalled is not None
    assert (stalled.status, stalled.reason) == ("True", names.MODEL_LOAD_FAILED)
    assert "no such model" in stalled.message


def test_objects_of_others_are_not_touched_and_ours_without_owner_are_taken_back() -> None:
    seen = carried_out(observed())
    key = ("Service", "chat")
    foreign = {"kind": "Service", "metadata": {"name": "chat"}, "spec": {}}
    taken = decide(replace(seen, children={**seen.children, key: foreign})).changes
    assert [finding.path for finding in taken.taken] == ["Service/chat"]
    orphan = copy.deepcopy(dict(seen.children[key]))
    del orphan["metadata"]["ownerReferences"]
    back = decide(replace(seen, children={**seen.children, key: orphan})).changes
    assert back.taken == ()
    assert [m["kind"] for m in back.apply] == ["Service"]


def test_children_of_a_former_service_of_that_name_are_waited_for() -> None:
    seen = carried_out(observed())
    former = copy.deepcopy(dict(seen.children[("Service", "chat")]))
    former["metadata"]["ownerReferences"][0]["uid"] = "another"
    changes = decide(replace(seen, children={**seen.children, ("Service", "chat"): former})).changes
    assert changes.waiting == ("Service/chat",)
    assert changes.apply == ()


def test_what_is_no_longer_wanted_is_deleted_if_it_is_ours() -> None:
    seen = carried_out(observed(replicas=2))
    fewer = edited(seen, replicas=1, **{"security.networkPolicy.enabled": False})
    assert sorted(gone["kind"] for gone in decide(fewer).changes.delete) == [
        "NetworkPolicy",
        "PodDisruptionBudget",
    ]


def in_force(status: ServiceStatus) -> ServiceStatus:
    """The same once engines have read back what is meant for them."""
    told = [
        replace(c, status="True", reason="ConfigInForce") if c.type == names.CONFIG_APPLIED else c
        for c in status.conditions
    ]
    engine = replace(status.engine, applied=status.engine.desired)
    return replace(status, conditions=type(status.conditions)(told), engine=engine)


def test_events_follow_the_status_and_nothing_at_rest() -> None:
    seen = carried_out(observed())
    first = seen.previous
    assert transitions(first, first) == []
    ready = conclude(with_pods(seen, pod("a", decide(seen).template_hash, ready_since=1)))
    assert [h.reason for h in transitions(first, ready)] == ["Created"]
    assert [h.reason for h in transitions(first, in_force(ready))] == ["Created"], "it started with that"
    assert [h.reason for h in transitions(ready, in_force(ready))] == ["ConfigApplied"]
    changed = edited(replace(seen, previous=ready), **{"engine.maxModelLen": 512})
    rolling = conclude(with_pods(changed, pod("a", decide(seen).template_hash, ready_since=1)), NOW + 60)
    assert [h.reason for h in transitions(ready, rolling)] == ["RolloutStarted"]
    broken = pod("b", decide(changed).template_hash, state=terminated(1, "no"))
    stalled = conclude(with_pods(changed, broken), NOW + 60)
    assert [(h.severity, h.reason) for h in transitions(rolling, stalled)] == [
        ("Warning", names.MODEL_LOAD_FAILED)
    ]
    done = conclude(with_pods(changed, pod("b", decide(changed).template_hash, ready_since=1)), NOW + 60)
    assert [h.reason for h in transitions(rolling, done)] == ["RolloutCompleted"]
    assert [h.reason for h in transitions(stalled, done)] == ["RolloutCompleted"]


def test_the_first_engine_is_told_as_created_also_between_its_startup_and_its_readiness_probe() -> None:
    seen = carried_out(observed())
    hashed = decide(seen).template_hash
    waiting = conclude(with_pods(seen, pod("a", hashed)))
    between = conclude(with_pods(replace(seen, previous=waiting), pod("a", hashed, started=True)), NOW + 60)
    found = between.condition(names.READY)
    assert found is not None
    assert found.reason == names.PODS_NOT_READY
    ready = conclude(with_pods(replace(seen, previous=between), pod("a", hashed, ready_since=61)), NOW + 61)
    assert [h.reason for h in transitions(between, ready)] == ["Created"]


def test_an_engine_that_stops_being_ready_leaves_an_event_with_the_reason() -> None:
    seen = carried_out(observed())
    hashed = decide(seen).template_hash
    ready = conclude(with_pods(seen, pod("a", hashed, ready_since=5)))
    killed = pod("a", hashed, was_ready_until=50, last_state=terminated(137, finished=50), restarts=1)
    down = conclude(with_pods(replace(seen, previous=ready), killed), NOW + 60)
    [happening] = transitions(ready, down)
    assert (happening.severity, happening.reason) == ("Warning", names.PODS_NOT_READY)
    assert "a: was killed by signal 9" in happening.message
    assert transitions(down, down) == []
    # Nobody took its place, so no rollout ended.
    assert [h.reason for h in transitions(down, ready)] == ["ReadyAgain"]


def test_a_spec_that_is_mended_ends_no_rollout() -> None:
    seen = carried_out(observed())
    ready = conclude(with_pods(seen, pod("a", decide(seen).template_hash, ready_since=5)))
    wrong = invalid_status(
        seen.service,
        (Finding("spec.replicas", -1, "0 to 1000"),),
        names.INVALID_SPEC,
        ready,
        rfc3339(NOW + 60),
    )
    assert [h.reason for h in transitions(ready, wrong)] == [names.INVALID_SPEC]
    assert [h.reason for h in transitions(wrong, ready)] == ["ReadyAgain"]
