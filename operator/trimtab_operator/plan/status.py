"""RolloutStatus and live config → conditions and status of an InferenceService. Pure; both shells store what it returns.

Ready says that all wanted replicas run the current template and are ready. It never depends on live config, SLO, tuning or
monitoring; those have conditions of their own. Available says that somebody can be served now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from trimtab_operator import conditions, names, support
from trimtab_operator.api import InferenceService
from trimtab_operator.api.status import (
    Condition,
    EngineStatus,
    LiveValues,
    LoadFailure,
    ModelStatus,
    Recommendation,
    Resolved,
    ServiceStatus,
    Summary,
    TuningStatus,
)
from trimtab_operator.errors import Finding
from trimtab_operator.plan.engine_flags import served_name
from trimtab_operator.plan.live import Switch, superseded, switch
from trimtab_operator.plan.monitors import Verdict
from trimtab_operator.plan.nightly import Problem
from trimtab_operator.plan.quiet_times import Quiet
from trimtab_operator.plan.rollout import RolloutStatus
from trimtab_operator.plan.slo import NO_PROMETHEUS, Attainment
from trimtab_operator.plan.tuning_drift import DriftVerdict

_DRIFT_IS_BLIND = (
    "spec.tuning.drift.enabled: True is not allowed; without --prometheus-url (prometheus.url of the chart) nobody can tell "
    "when targets are missed"
)
_Make = Callable[[str, bool | None, str, str], Condition]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a shell knows beside the rollout. `applied` is what every ready replica reads back, None while they differ."""

    url: str | None = None
    desired: LiveValues | None = None
    applied: LiveValues | None = None
    recommendation: Recommendation | None = None
    tuning_running: bool = False
    quiet: Quiet | None = None  # the quiet time in force
    slo: Attainment = NO_PROMETHEUS
    fleet: Switch = field(default_factory=Switch)
    monitoring: Verdict | None = None  # None: nothing is wanted
    resolved: Resolved = field(default_factory=Resolved)
    upgrade_available: bool | None = None  # None: not a question here (local mode)
    leaving_ready: int = (
        0  # pods on their way out that still say so: they are sent requests while nobody else is ready
    )
    mode: support.Mode = "local"
    nightly_problem: Problem | None = None
    drift: DriftVerdict | None = None  # None: not enabled, or not a question here


def service_status(
    service: InferenceService, rollout: RolloutStatus, facts: Facts, previous: ServiceStatus, now: str
) -> ServiceStatus:
    """The whole status; equal to `previous` when nothing happened, so that nothing is written at rest."""
    wanted = _conditions(service, rollout, facts)
    return ServiceStatus(
        observed_generation=service.metadata.generation,
        conditions=conditions.merge(previous.conditions, wanted, now),
        url=facts.url,
        replicas=rollout.total,
        ready_replicas=rollout.ready,
        updated_replicas=rollout.updated,
        available_replicas=rollout.available,
        selector=",".join(f"{key}={value}" for key, value in names.selector(service.name).items()),
        summary=Summary(replicas=f"{rollout.ready}/{rollout.wanted}", slo=facts.slo.verdict),
        model=_model(service, rollout, previous, now),
        engine=EngineStatus(facts.desired, facts.applied, f"{rollout.applied}/{rollout.available}"),
        tuning=_tuning(service, facts, previous),
        resolved=facts.resolved,
    )


def invalid_status(
    service: InferenceService, findings: tuple[Finding, ...], reason: str, previous: ServiceStatus, now: str
) -> ServiceStatus:
    """The status of a service that cannot be carried out: Stalled with every finding; what runs is left running."""
    message = "; ".join(map(str, findings))
    generation = service.metadata.generation
    kept = {c.type: c for c in previous.conditions}
    wanted = [
        Condition(names.READY, "False", reason, message, observed_generation=generation),
        kept.get(names.AVAILABLE, Condition(names.AVAILABLE, "False", names.NO_READY_PODS)),
        Condition(names.RECONCILING, "False", reason, message, observed_generation=generation),
        Condition(names.STALLED, "True", reason, message, observed_generation=generation),
    ]
    return ServiceStatus(
        observed_generation=generation,
        conditions=conditions.merge(previous.conditions, wanted, now),
        url=previous.url,
        replicas=previous.replicas,
        ready_replicas=previous.ready_replicas,
        updated_replicas=previous.updated_replicas,
        available_replicas=previous.available_replicas,
        selector=previous.selector,
        summary=_counted(service, previous),
        model=previous.model or _unserved(service),
        engine=previous.engine,
        tuning=previous.tuning,
        resolved=previous.resolved,
    )


def _conditions(service: InferenceService, rollout: RolloutStatus, facts: Facts) -> list[Condition]:
    generation = service.metadata.generation

    condition = partial(_condition, generation)

    return [
        condition(names.READY, rollout.is_ready, rollout.reason, rollout.message),
        _available(condition, rollout, facts.leaving_ready),
        condition(
            names.RECONCILING,
            rollout.progressing,
            _progress_reason(rollout),
            _progress_message(rollout),
        ),
        condition(
            names.STALLED,
            rollout.stalled,
            rollout.reason if rollout.stalled else names.AS_EXPECTED,
            rollout.message if rollout.stalled else "",
        ),
        _model_loaded(condition, service, rollout, facts.mode),
        _config_applied(condition, rollout),
        condition(
            names.SLO_MET,
            {"Met": True, "Violated": False, "Unknown": None}[facts.slo.verdict],
            facts.slo.reason,
            facts.slo.message,
        ),
        _tuning_ready(condition, service, facts),
        *_drift_detected(condition, facts),
        *_upgrade(condition, facts),
        *([condition(names.MONITORING_READY, *facts.monitoring)] if facts.monitoring is not None else []),
    ]


def _available(condition: _Make, rollout: RolloutStatus, leaving_ready: int) -> Condition:
    message = f"{rollout.available} replica{'' if rollout.available == 1 else 's'} can serve now"
    if rollout.available:
        return condition(names.AVAILABLE, True, names.ENDPOINTS_READY, message)
    if leaving_ready and rollout.wanted:
        message = f"{message}; {leaving_ready} on the way out still do{'es' if leaving_ready == 1 else ''}"
        return condition(names.AVAILABLE, True, names.LEAVING_POD_SERVES, message)
    quiet = rollout.reason if rollout.reason == names.SUSPENDED else names.NO_READY_PODS
    return condition(names.AVAILABLE, False, quiet, message)


def _drift_detected(condition: _Make, facts: Facts) -> list[Condition]:
    found = facts.drift
    return [] if found is None else [condition(names.DRIFT_DETECTED, found.met, found.reason, found.message)]


def _upgrade(condition: _Make, facts: Facts) -> list[Condition]:
    if facts.upgrade_available is None:
        return []
    if not facts.upgrade_available:
        return [
            condition(
                names.UPGRADE_AVAILABLE, False, names.UP_TO_DATE, "pods are as this operator builds them"
            )
        ]
    message = (
        "pods go on as another version or setting of the operator built them; this one's come with the next restart, "
        "or with spec.rollout.upgradePolicy Auto"
    )
    return [condition(names.UPGRADE_AVAILABLE, True, names.UPGRADE_HELD, message)]


def _condition(generation: int, kind: str, status: bool | None, reason: str, message: str) -> Condition:
    text = "Unknown" if status is None else str(status)
    return Condition(kind, text, reason, message, observed_generation=generation)


def _progress_reason(rollout: RolloutStatus) -> str:
    if rollout.stalled:
        return rollout.reason
    if not rollout.progressing:
        return names.UP_TO_DATE
    return names.DRAINING if rollout.is_ready and rollout.draining else rollout.reason


def _progress_message(rollout: RolloutStatus) -> str:
    if rollout.stalled:
        return "nothing goes on before something is changed: see Stalled"
    return rollout.message if rollout.progressing else "nothing to do"


def _model_loaded(
    condition: _Make, service: InferenceService, rollout: RolloutStatus, mode: support.Mode
) -> Condition:
    if rollout.reason == names.MODEL_LOAD_FAILED:
        return condition(names.MODEL_LOADED, False, names.MODEL_LOAD_FAILED, rollout.message)
    if rollout.wanted == 0:
        return condition(names.MODEL_LOADED, None, rollout.reason, "no replica is wanted")
    if rollout.downloading is not None:
        return condition(names.MODEL_LOADED, False, names.MODEL_DOWNLOADING, rollout.downloading)
    loaded = rollout.ready >= rollout.wanted
    message = f"{rollout.ready} of {rollout.wanted} replicas have loaded the model"
    if not loaded and mode == "cluster":
        # Nobody asks an engine how far it is but for a download, and minutes without a word look like a hang.
        message += f"; kubectl logs deployment/{names.deployment(service.name)} has each stage"
    return condition(
        names.MODEL_LOADED, loaded, names.MODEL_IS_LOADED if loaded else names.MODEL_LOADING, message
    )


def _config_applied(condition: _Make, rollout: RolloutStatus) -> Condition:
    message = f"{rollout.applied} of {rollout.available} replicas read the live config back"
    if rollout.rejected:
        refused = f"{', '.join(rollout.rejected)} refused it; {message}"
        return condition(names.CONFIG_APPLIED, False, names.ENGINE_REJECTED, refused)
    if rollout.available == 0:
        return condition(names.CONFIG_APPLIED, None, names.NO_READY_PODS, message)
    complete = rollout.applied == rollout.available
    reason = names.CONFIG_IN_FORCE if complete else names.PARTIALLY_APPLIED
    return condition(names.CONFIG_APPLIED, complete, reason, message)


def _tuning_ready(condition: _Make, service: InferenceService, facts: Facts) -> Condition:
    mode = service.spec.tuning.mode
    halt = switch(service.metadata.annotations, facts.fleet)
    waiting = "; ".join(map(str, support.later(service, facts.mode)))
    if facts.nightly_problem is not None:
        return condition(names.TUNING_READY, False, *facts.nightly_problem)
    if facts.drift is not None and facts.slo == NO_PROMETHEUS:
        return condition(names.TUNING_READY, False, names.METRICS_UNAVAILABLE, _DRIFT_IS_BLIND)
    if mode == "Off":
        message = "; ".join(filter(None, ("spec.tuning.mode is Off", waiting)))
        return condition(names.TUNING_READY, False, names.TUNING_OFF, message)
    if halt.state != "active":
        reason = names.TUNING_PAUSED if halt.state == "paused" else names.TUNING_REVERTED
        return condition(
            names.TUNING_READY, False, reason, f"{halt.by} is {halt.state}; take it away to go on"
        )
    if waiting:
        return condition(names.TUNING_READY, False, names.NOT_YET_SUPPORTED, waiting)
    if facts.quiet is not None:
        return condition(names.TUNING_READY, False, names.QUIET_TIME, str(facts.quiet))
    if facts.recommendation is not None:
        edited = superseded(service.spec, facts.recommendation)
        if edited:
            message = f"{', '.join(edited)} was edited; the recommendation no longer counts"
            return condition(names.TUNING_READY, True, names.RECOMMENDATION_SUPERSEDED, message)
    return condition(names.TUNING_READY, True, names.AS_EXPECTED, f"spec.tuning.mode is {mode}")


def _model(
    service: InferenceService, rollout: RolloutStatus, previous: ServiceStatus, now: str
) -> ModelStatus | None:
    if service.spec.model is None:
        return None
    failure = previous.model.last_failure if previous.model is not None else None
    if rollout.reason == names.MODEL_LOAD_FAILED:
        message = rollout.message[: conditions.MESSAGE_LIMIT]
        if failure is None or failure.message != message:
            failure = LoadFailure(rollout.reason, message, time=now)
        state = "FailedToLoad"
    elif rollout.total == 0:
        state = "Pending"
    elif rollout.downloading is not None:
        state = "Downloading"
    else:
        state = "Loaded" if rollout.ready >= rollout.wanted else "Loading"
    return ModelStatus(served_name(service.spec.model), state, failure)


def _counted(service: InferenceService, previous: ServiceStatus) -> Summary:
    """Of a service that cannot be carried out. A spec that cannot be read at all says no number."""
    if service.spec.model is None:
        return previous.summary
    return replace(previous.summary, replicas=f"{previous.ready_replicas}/{service.spec.wanted_replicas}")


def _unserved(service: InferenceService) -> ModelStatus | None:
    """Of a service that never ran: what it is to serve."""
    model = service.spec.model
    return None if model is None else ModelStatus(served_name(model), "Pending", None)


def _tuning(service: InferenceService, facts: Facts, previous: ServiceStatus) -> TuningStatus:
    state = switch(service.metadata.annotations, facts.fleet).state
    if service.spec.tuning.mode == "Off":
        word = "Off"
    elif state != "active":
        word = state.capitalize()
    elif facts.quiet is not None:
        word = "Quiet"
    else:
        word = "Running" if facts.tuning_running else "Idle"
    drift = None if facts.drift is None else facts.drift.kept
    return TuningStatus(word, facts.recommendation, previous.tuning.last_run, drift)
