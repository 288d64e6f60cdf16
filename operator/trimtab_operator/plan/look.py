"""What one look at a service knows, decides and concludes: data only. Used by `cluster`, which computes it, and by its shell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab_operator import names
from trimtab_operator.api import InferenceService, InvalidRun, Recommendation, TuningRun
from trimtab_operator.api.status import Resolved, ServiceStatus
from trimtab_operator.plan import children, live_push, nightly, quiet_times, rollout, tuning_drift
from trimtab_operator.plan import live as plan_live
from trimtab_operator.plan import monitors as plan_monitors
from trimtab_operator.plan import shadow as plan_shadow
from trimtab_operator.plan.manifests import Hub
from trimtab_operator.plan.slo import NO_PROMETHEUS, Attainment
from trimtab_operator.plan.tuner_pod import Tuner
from trimtab_operator.plan.workers import Obstacle, Worker

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the operator was started with."""

    defaults: Resolved = field(default_factory=Resolved)
    admin_public_key: str | None = None
    operator_namespace: str = "trimtab-system"
    room_patience_s: float = rollout.UNSCHEDULABLE_PATIENCE_S
    hub: Hub = field(default_factory=Hub)
    tuner: Tuner = field(default_factory=Tuner)


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything about one service at one moment."""

    service: InferenceService
    previous: ServiceStatus = field(default_factory=ServiceStatus)
    children: Mapping[children.Key, Mapping[str, Any]] = field(default_factory=dict)
    pods: tuple[Mapping[str, Any], ...] = ()
    runs: tuple[TuningRun, ...] = ()
    invalid_runs: tuple[InvalidRun, ...] = ()
    read_backs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by pod name
    refusals: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # by pod name: generation, why
    slo: Attainment = NO_PROMETHEUS
    loading: Mapping[str, str] = field(default_factory=dict)  # by pod name: how far its download is
    fleet: plan_live.Switch = field(default_factory=plan_live.Switch)
    waits: str | None = None  # why the fleet has no place for the acting run
    workers: Mapping[str, Worker] = field(default_factory=dict)  # by run: of the one that acts
    worker_pods: tuple[Mapping[str, Any], ...] = ()  # of all runs
    worker_problem: Obstacle | None = None  # why a worker could not be made just now
    monitors: plan_monitors.Monitors = field(default_factory=plan_monitors.Monitors)
    complaints: Mapping[str, str] = field(default_factory=dict)  # by pod name: the kubelet's, about volumes
    shadow: plan_shadow.Standing = field(default_factory=plan_shadow.Standing)
    shadow_problem: plan_shadow.Reason | None = None  # what the API server said to a shadow's objects
    nightly_problem: nightly.Problem | None = None  # what it said to a schedule's objects
    drift: tuning_drift.DriftVerdict | None = None  # as it is after acting; None: as decided

    def child(self, kind: str, name: str) -> Mapping[str, Any] | None:
        """One child, or None."""
        return self.children.get((kind, name))


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. `incumbent` and `trial` are what engines shall have; `calls` says what to tell each pod for that."""

    template_hash: str
    resolved: Resolved
    upgrade_available: bool
    room_patience_s: float
    changes: children.Changes
    monitors: children.Changes
    incumbent: Json
    trial: live_push.Trial | None
    targets: frozenset[str]
    calls: Mapping[str, tuple[live_push.Call, ...]]
    recommendation: Recommendation | None
    superseded: str | None  # why a recommendation was dropped now
    holds: Mapping[str, float]  # leaving pods that serve on, and for how many seconds from now
    renumbered: tuple[str, ...]  # pods that had seen other numbers
    acting_run: TuningRun | None
    taken_run: TuningRun | None  # its result was taken now
    refusal: str | None  # why the acting run's candidate, or the taken run's result, is not carried out
    shadow: plan_shadow.Plan
    nightly: children.Changes
    drift: tuning_drift.DriftVerdict | None
    superfluous: tuple[TuningRun, ...]  # finished runs beyond those that are kept
    new_worker: TuningRun | None  # a worker is to be made for it
    end_workers: tuple[str, ...]  # names of runs that need theirs no longer, or another one
    quiet: quiet_times.Quiet | None = None  # the quiet time in force: nothing starts, is tried or promoted
    border_s: float | None = None  # when a quiet time ends or begins next

    def concerns(self, service: str) -> set[children.Key]:
        """Children whose state this rests on; when it changes nothing, none."""
        if self.changes.taken or self.changes.waiting:
            return set(children.possible(service))
        all_changes = (self.changes, self.shadow.changes, self.nightly)
        touched = {
            (item["kind"], item["metadata"]["name"])
            for changes in all_changes
            for item in (*changes.apply, *changes.delete)
        }
        if self.nightly.taken or self.nightly.waiting:
            touched |= set(nightly.possible(service))
        # What engines are told has its number from there.
        return touched | ({("ConfigMap", names.live_config_map(service))} if self.calls else set())


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The status to write, and when to look again at the latest (Unix seconds, None: when something happens)."""

    status: ServiceStatus
    look_again_s: float | None
    run_statuses: Mapping[str, Json]  # by name of the run
