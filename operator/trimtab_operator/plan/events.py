"""What is worth an event: differences between two statuses of a service, in words that people search for. Pure.

Used by `cluster.reconcile`, which records them. States, not steps: the same two statuses give the same events, so a repeated
reconcile adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trimtab_operator import names
from trimtab_operator.api.status import ServiceStatus

Severity = Literal["Normal", "Warning"]
_CREATED, _APPLIED = "Created", "ConfigApplied"
#: Whoever was not Ready for one of these has not been replaced by anybody.
_NO_ROLLOUT = {
    names.PODS_NOT_READY,
    names.INVALID_SPEC,
    names.UNSUPPORTED,
    names.NAME_TAKEN,
    names.API_DENIED,
    names.SUSPENDED,
}


@dataclass(frozen=True, slots=True)
class Happening:
    """One event to be."""

    severity: Severity
    reason: str
    message: str


def transitions(before: ServiceStatus, after: ServiceStatus) -> list[Happening]:
    """Events of going from one status to the next."""
    found: list[Happening] = []
    found += _rollout(before, after)
    found += _stalled(before, after)
    found += _drift(before, after)
    live = _live(before, after)
    if any(happening.reason == _CREATED for happening in found):
        # What a service starts with was mounted before there was an engine, and the status shows it.
        live = [happening for happening in live if happening.reason != _APPLIED]
    return found + live


def _rollout(before: ServiceStatus, after: ServiceStatus) -> list[Happening]:
    was, now = before.condition(names.READY), after.condition(names.READY)
    if now is None:
        return []
    started = now.reason == names.ROLLOUT_IN_PROGRESS and (was is None or was.reason != now.reason)
    if started:
        return [Happening("Normal", "RolloutStarted", now.message)]
    if now.status == "True" and (was is None or was.status != "True"):
        again = was is not None and was.reason in _NO_ROLLOUT
        reason = _CREATED if _first_time(before) else "ReadyAgain" if again else "RolloutCompleted"
        return [Happening("Normal", reason, now.message)]
    if now.reason == names.PODS_NOT_READY and (was is None or was.message != now.message):
        # Engines that were ready and are not any more: a restart is soon over, and the event is what is left of its reason.
        return [Happening("Warning", names.PODS_NOT_READY, now.message)]
    return []


def _first_time(before: ServiceStatus) -> bool:
    """Whether the service has not been Ready before: that condition has stood since the first look, as others have. Its reason does not
    tell: between a pod's startup probe and its readiness probe it is PodsNotReady."""
    was = before.condition(names.READY)
    since = [c.last_transition_time for c in before.conditions if c.last_transition_time]
    return was is None or (was.status != "True" and was.last_transition_time == min(since, default=None))


def _stalled(before: ServiceStatus, after: ServiceStatus) -> list[Happening]:
    was, now = before.condition(names.STALLED), after.condition(names.STALLED)
    if now is None or now.status != "True":
        return []
    if was is not None and (was.status, was.reason) == (now.status, now.reason):
        return []
    return [Happening("Warning", now.reason, now.message)]


def _drift(before: ServiceStatus, after: ServiceStatus) -> list[Happening]:
    was, now = before.condition(names.DRIFT_DETECTED), after.condition(names.DRIFT_DETECTED)
    if now is None or now.status != "True" or (was is not None and was.reason == now.reason):
        return []
    return [Happening("Warning", names.DRIFT_DETECTED, now.message)]


def _live(before: ServiceStatus, after: ServiceStatus) -> list[Happening]:
    was, now = before.condition(names.CONFIG_APPLIED), after.condition(names.CONFIG_APPLIED)
    if now is None:
        return []
    if now.reason == names.ENGINE_REJECTED and (was is None or was.reason != now.reason):
        return [Happening("Warning", "ConfigRejected", now.message)]
    applied, old = after.engine.applied, before.engine.applied
    if now.status == "True" and applied is not None and applied == after.engine.desired and applied != old:
        text = (
            f"generation {applied.generation} ({applied.source}) is in force: {applied.max_num_batched_tokens} tokens a step, "
            f"{applied.max_num_seqs} requests, {applied.scheduling_policy}"
        )
        return [Happening("Normal", _APPLIED, text)]
    return []
