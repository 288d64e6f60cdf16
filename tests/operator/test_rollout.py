"""The rollout planner: single situations, and its promises under random readiness."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from trimtab_operator import names
from trimtab_operator.plan.rollout import (
    Action,
    Desired,
    Drain,
    PushLive,
    Replica,
    Restart,
    RolloutStatus,
    SetStatus,
    Start,
    Stop,
    Wait,
    plan,
)

WANTED = Desired(template_hash="new", replicas=2, generation=3)


def running(name: str, template: str = "new", **fields: object) -> Replica:
    base = Replica(name, template, "Running", ready=True, was_ready=True, incumbent_generation=3)
    return replace(base, **fields)  # type: ignore[arg-type]


def starting(name: str, template: str = "new", **fields: object) -> Replica:
    return replace(Replica(name, template, "Starting"), **fields)  # type: ignore[arg-type]


def acts(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, SetStatus | Wait)]


def status(actions: list[Action]) -> RolloutStatus:
    last = actions[-1]
    assert isinstance(last, SetStatus)
    return last.status


def test_nothing_there_starts_all_wanted() -> None:
    actions = plan(WANTED, [], 0.0)
    assert acts(actions) == [Start("new", names.SCALING_UP)] * 2
    assert status(actions).reason == names.SCALING_UP


def test_all_ready_asks_for_nothing() -> None:
    actions = plan(WANTED, [running("a"), running("b")], 0.0)
    assert acts(actions) == []
    assert status(actions).is_ready
    assert not status(actions).progressing


def test_surge_starts_one_new_replica_and_leaves_the_old_alone() -> None:
    assert acts(plan(WANTED, [running("a", "old"), running("b", "old")], 0.0)) == [
        Start("new", names.ROLLOUT_IN_PROGRESS)
    ]


def test_a_ready_replacement_drains_one_old_replica() -> None:
    actions = plan(WANTED, [running("a", "old"), running("b", "old"), running("c")], 0.0)
    assert [type(a) for a in acts(actions)] == [Drain, Start]


def test_surge_0_makes_room_first_and_waits_for_the_place() -> None:
    wanted = replace(WANTED, strategy="RollingUpdate", max_surge=0, max_unavailable=1)
    old = [running("a", "old"), running("b", "old")]
    assert acts(plan(wanted, old, 0.0)) == [Drain("a", names.ROLLOUT_IN_PROGRESS)]
    leaving = [replace(old[0], phase="Draining", ready=False), old[1]]
    assert acts(plan(wanted, leaving, 1.0)) == []
    assert acts(plan(wanted, [old[1]], 2.0)) == [Start("new", names.ROLLOUT_IN_PROGRESS)]


def test_auto_gives_up_the_surge_when_the_new_replica_finds_no_place_for_a_minute() -> None:
    old = [running("a", "old"), running("b", "old")]
    pending = starting("c", unschedulable_since_s=100.0, created_s=100.0)
    early = plan(WANTED, [*old, pending], 130.0)
    assert acts(early) == []
    assert Wait(160.0, "no place for the surge replica") in early
    assert acts(plan(WANTED, [*old, pending], 160.0)) == [Drain("a", names.ROLLOUT_IN_PROGRESS)]


def test_rolling_update_keeps_to_its_numbers_where_auto_would_make_room() -> None:
    wanted = replace(WANTED, strategy="RollingUpdate")
    pending = starting("c", unschedulable_since_s=100.0, created_s=100.0)
    assert acts(plan(wanted, [running("a", "old"), running("b", "old"), pending], 300.0)) == []


def test_recreate_ends_all_old_ones_before_it_starts_a_new_one() -> None:
    wanted = replace(WANTED, strategy="Recreate")
    old = [running("a", "old"), running("b", "old")]
    assert [type(a) for a in acts(plan(wanted, old, 0.0))] == [Drain, Drain]
    leaving = [replace(r, phase="Draining", ready=False) for r in old]
    assert acts(plan(wanted, leaving, 1.0)) == []
    assert len(acts(plan(wanted, [], 2.0))) == 2


def test_a_replacement_that_never_gets_ready_is_stalled_and_the_old_ones_go_on_serving() -> None:
    old = [running("a", "old"), running("b", "old")]
    bad = starting("c", created_s=0.0, started_s=590.0, message="weights are missing")
    actions = plan(WANTED, [*old, bad], 601.0)
    assert acts(actions) == []
    verdict = status(actions)
    assert verdict.stalled
    assert verdict.reason == names.PROGRESS_DEADLINE_EXCEEDED
    assert "weights are missing" in verdict.message
    assert "2 old replicas go on serving" in verdict.message
    assert verdict.available == 2
    assert status(plan(WANTED, [*old, bad], 900.0)) == verdict, "it says nothing new, so nothing is written"


def test_a_model_that_cannot_load_is_stalled_at_once_with_the_true_reason() -> None:
    bad = replace(
        starting("c"), phase="Failed", failure=names.MODEL_LOAD_FAILED, failed_s=1.0, message="no such file"
    )
    verdict = status(plan(replace(WANTED, replicas=1), [running("a", "old"), bad], 2.0))
    assert (verdict.reason, verdict.stalled) == (names.MODEL_LOAD_FAILED, True)


def test_no_place_is_called_insufficient_gpu_only_when_nobody_is_leaving() -> None:
    pending = starting("c", created_s=0.0, unschedulable_since_s=0.0)
    wanted = replace(WANTED, replicas=1, strategy="RollingUpdate")
    leaving = replace(running("a", "old"), phase="Draining", ready=False)
    assert status(plan(wanted, [pending], 700.0)).reason == names.INSUFFICIENT_GPU
    assert status(plan(wanted, [pending, leaving], 700.0)).reason == names.PROGRESS_DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", names.INSUFFICIENT_GPU),
        ("0/2 nodes are available: 1 Insufficient cpu, 1 Insufficient nvidia.com/mig-1g.10gb.", names.INSUFFICIENT_GPU),
        ("0/2 nodes are available: 2 cannot allocate all claims, resourceclaim pending.", names.INSUFFICIENT_GPU),
        ("0/2 nodes are available: 2 Insufficient memory.", names.UNSCHEDULABLE),
        ("0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.", names.UNSCHEDULABLE),
    ],
)  # fmt: skip
def test_a_replica_without_a_place_is_stalled_with_what_it_lacks(message: str, reason: str) -> None:
    pending = starting("c", created_s=0.0, unschedulable_since_s=0.0, message=message)
    found = status(plan(replace(WANTED, replicas=1), [pending], 700.0))
    assert (found.stalled, found.reason) == (True, reason)
    assert message in found.message


def test_going_back_to_the_old_template_keeps_what_still_runs_it() -> None:
    replicas = [running("a", "old"), running("b", "old"), starting("c", "new")]
    back = replace(WANTED, template_hash="old")
    assert acts(plan(back, replicas, 1.0)) == [Stop("c", names.ROLLOUT_IN_PROGRESS)]


def test_scale_down_takes_whoever_is_not_ready_first_then_the_youngest() -> None:
    replicas = [
        running("a", created_s=0.0),
        starting("b", created_s=1.0),
        running("c", created_s=2.0),
        running("d", created_s=3.0),
    ]
    assert acts(plan(WANTED, replicas, 4.0)) == [
        Stop("b", names.SCALING_DOWN),
        Drain("d", names.SCALING_DOWN),
    ]


def test_suspend_drains_everything_and_says_so() -> None:
    actions = plan(replace(WANTED, replicas=0, suspended=True), [running("a"), starting("b")], 0.0)
    assert set(acts(actions)) == {Drain("a", names.SUSPENDED), Stop("b", names.SUSPENDED)}
    assert status(actions).reason == names.SUSPENDED


def test_live_document_goes_to_ready_replicas_that_are_behind_and_did_not_refuse_it() -> None:
    replicas = [
        running("a", incumbent_generation=2),
        running("b", incumbent_generation=None),
        starting("c", incumbent_generation=None),
        running("d", incumbent_generation=2, generation_rejected=3),
        running("e", incumbent_generation=3),
    ]
    actions = plan(replace(WANTED, replicas=5), replicas, 0.0)
    assert [a for a in acts(actions) if isinstance(a, PushLive)] == [PushLive("a", 3), PushLive("b", 3)]
    assert status(actions).rejected == ("d",)
    assert status(actions).applied == 1


@pytest.mark.parametrize(("restarts", "pause"), [(0, 0.0), (1, 10.0), (2, 20.0), (4, 80.0), (9, 300.0)])
def test_a_crashed_replica_is_restarted_after_a_growing_pause(restarts: int, pause: float) -> None:
    crashed = replace(running("a"), phase="Failed", ready=False, failed_s=100.0, restarts=restarts)
    early = plan(replace(WANTED, replicas=1), [crashed], 100.0 + pause - 0.1)
    assert acts(early) == []
    assert any(isinstance(a, Wait) and a.until_s == 100.0 + pause for a in early)
    late = plan(replace(WANTED, replicas=1), [crashed], 100.0 + pause)
    assert acts(late) == [Restart("a", names.ENGINE_CRASHED)]


def test_an_engine_that_loads_for_longer_than_startup_timeout_is_restarted() -> None:
    slow = starting("a", created_s=0.0, started_s=0.0)
    wanted = replace(WANTED, replicas=1, startup_timeout_s=60.0)
    assert acts(plan(wanted, [slow], 59.0)) == []
    assert acts(plan(wanted, [slow], 60.0)) == [Restart("a", "StartupTimeout")]


class World:
    """Replicas that obey the planner at random speed, fail at random, and find room or not."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.replicas: dict[str, Replica] = {}
        self.started = 0
        self.calm = False  # from then on nothing fails

    def apply(self, action: Action) -> None:
        match action:
            case Start(template_hash=template):
                self.started += 1
                name = f"r{self.started}"
                self.replicas[name] = Replica(
                    name, template, "Starting", created_s=self.now, started_s=self.now
                )
            case Drain(name=name):
                assert self.replicas[name].phase != "Draining"
                self.replicas[name] = replace(self.replicas[name], phase="Draining", ready=False)
            case Stop(name=name):
                assert not self.replicas[name].ready
                del self.replicas[name]
            case Restart(name=name):
                old = self.replicas[name]
                self.replicas[name] = replace(
                    old, phase="Starting", ready=False, started_s=self.now, restarts=old.restarts + 1,
                    failed_s=None, incumbent_generation=None,
                )  # fmt: skip
            case PushLive(name=name, generation=generation):
                if self.calm or self.rng.random() < 0.7:
                    self.replicas[name] = replace(self.replicas[name], incumbent_generation=generation)

    def happen(self, capacity: int) -> None:
        """Time passes; the world does what the planner cannot decide."""
        self.now += self.rng.uniform(1.0, 20.0)
        placed = sum(r.unschedulable_since_s is None for r in self.replicas.values())
        for name, replica in list(self.replicas.items()):
            luck = self.rng.random()
            if replica.phase == "Draining":
                if luck < 0.5:
                    del self.replicas[name]
            elif replica.phase == "Starting":
                if placed > capacity and replica.unschedulable_since_s is None:
                    placed -= 1
                    self.replicas[name] = replace(replica, unschedulable_since_s=self.now)
                elif replica.unschedulable_since_s is not None:
                    if placed < capacity:
                        placed += 1
                        self.replicas[name] = replace(replica, unschedulable_since_s=None, started_s=self.now)
                elif luck < 0.4:
                    self.replicas[name] = replace(replica, phase="Running", ready=True, was_ready=True)
                elif luck < 0.5 and not self.calm:
                    self.replicas[name] = replace(replica, phase="Failed", failed_s=self.now)
            elif replica.phase == "Running" and not self.calm:
                if luck < 0.05:
                    self.replicas[name] = replace(
                        replica, phase="Failed", ready=False, failed_s=self.now, restarts=0
                    )
                elif luck < 0.15:
                    self.replicas[name] = replace(replica, ready=not replica.ready)
            elif replica.phase == "Running" and not replica.ready:
                self.replicas[name] = replace(replica, ready=True)


@pytest.mark.parametrize("seed", range(150))
def test_planner_keeps_its_promise_and_converges_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    world = World(seed)
    wanted = Desired(
        template_hash="t0",
        replicas=rng.randint(1, 4),
        generation=1,
        strategy=rng.choice(["Auto", "RollingUpdate", "Recreate"]),
        max_surge=(surge := rng.randint(0, 2)),
        max_unavailable=rng.randint(0 if surge else 1, 2),
        startup_timeout_s=600.0,
    )
    # RollingUpdate promises nothing without room for its surge; Auto and Recreate must do with what there is.
    capacity = 6 if wanted.strategy == "RollingUpdate" else wanted.replicas + rng.randint(0, 2)
    edits = 0
    for turn in range(400):
        if turn < 60 and rng.random() < 0.1:
            edits += 1
            replicas = min(rng.randint(0, 4), capacity)
            wanted = replace(
                wanted, template_hash=f"t{rng.randint(0, 2)}", replicas=replicas, generation=edits + 1
            )
        world.calm = turn >= 60
        before = dict(world.replicas)
        actions = plan(wanted, list(before.values()), world.now)
        assert sum(isinstance(a, SetStatus) for a in actions) == 1
        drained = [a.name for a in actions if isinstance(a, Drain)]
        assert len(drained) == len(set(drained))
        ready = sum(r.ready for r in before.values())
        lost = sum(before[name].ready for name in drained)
        relaxed = wanted.strategy == "Auto" and any(
            r.unschedulable_since_s is not None for r in before.values()
        )
        floor = (
            0
            if wanted.strategy == "Recreate"
            else wanted.replicas - (max(1, wanted.max_unavailable) if relaxed else wanted.max_unavailable)
        )
        assert lost == 0 or ready - lost >= floor, (turn, before, actions)
        for action in actions:
            world.apply(action)
        standing = [r for r in world.replicas.values() if r.phase != "Draining"]
        new = sum(isinstance(a, Start) for a in actions)
        assert new == 0 or len(standing) <= wanted.replicas + wanted.max_surge, (turn, before, actions)
        final = status(actions)
        if world.calm and final.is_ready and not final.draining and final.applied == wanted.replicas:
            assert {r.template_hash for r in standing} <= {wanted.template_hash}
            assert len(standing) == wanted.replicas
            return
        world.happen(capacity)
    pytest.fail(f"did not converge: {wanted} capacity {capacity} {list(world.replicas.values())}")


def test_planning_twice_from_the_same_observation_says_the_same() -> None:
    replicas = [running("a", "old"), starting("b"), running("c")]
    assert plan(WANTED, replicas, 5.0) == plan(WANTED, list(reversed(replicas)), 5.0)


@pytest.mark.parametrize("reason", [names.FAILED_MOUNT, names.CONTAINER_CONFIG_ERROR])
def test_what_a_pod_lacks_is_the_reason_from_the_start_and_stalls_only_after_the_deadline(
    reason: str,
) -> None:
    lacking = starting("a", failure=reason, message='secret "keys" not found')
    early = status(plan(WANTED, [lacking], 10.0))
    assert (early.reason, early.stalled, early.progressing) == (reason, False, True)
    assert 'secret "keys" not found' in early.message
    late = status(plan(WANTED, [lacking], WANTED.progress_deadline_s + 1))
    assert (late.reason, late.stalled) == (reason, True)
