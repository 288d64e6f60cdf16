"""What is worth an event on a TuningRun: differences between its status and the one about to be written, in words for people. Pure.

Used by `cluster.reconcile`, which records them before it writes the status: from then on that says that they were told, so a restart
in between neither loses one nor tells it twice. Begin, waits, trouble, verdict, and what guardrails ended; not one per trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab_operator import names
from trimtab_operator.api import InvalidRun, RunStatus, TuningRun
from trimtab_operator.api.run import RunSpec
from trimtab_operator.api.status import Condition
from trimtab_operator.plan.events import Happening
from trimtab_operator.plan.workers import FINISHED
from trimtab_operator.quantities import format_duration

STARTED, PRUNED = "RunStarted", "CandidatePruned"
#: Reasons with which a run is on its way; every other one says what it waits for.
_UNDER_WAY = ("Pending", "Running")
#: What a run waits for that may need a person.
_WORRYING = frozenset(
    {
        names.UNSCHEDULABLE,
        names.INSUFFICIENT_GPU,
        names.FAILED_MOUNT,
        names.CONTAINER_CONFIG_ERROR,
        names.PODS_NOT_CREATED,
    }
)


def transitions(run: TuningRun | InvalidRun, status: Mapping[str, Any]) -> list[Happening]:
    """Events of giving `run` the operator's part `status` in place of what it has."""
    after = RunStatus.from_json(status)
    if isinstance(run, InvalidRun):
        phase = str((run.raw.get("status") or {}).get("phase", ""))
        before, found = RunStatus(phase=phase, conditions=run.conditions), list[Happening]()
    else:
        before = run.status
        found = _begun(run.spec, before, after) + _pruned(before, after)
    if before.phase in FINISHED:
        return []  # all was told; what is written now is only put right
    if after.phase in FINISHED:
        return [*found, *_verdict(after)]
    return [*found, *_stalled(before, after), *_waiting(before, after)]


def _begun(spec: RunSpec, before: RunStatus, after: RunStatus) -> list[Happening]:
    if after.start_time is None or before.start_time is not None:
        return []
    longest = format_duration(spec.time_limit_s)
    limit = f"evaluator {spec.evaluator}, up to {spec.max_trials} candidates, for {longest} at most"
    return [Happening("Normal", STARTED, limit)]


def _pruned(before: RunStatus, after: RunStatus) -> list[Happening]:
    fresh = set(after.pruned) - set(before.pruned)
    return [
        Happening(
            "Warning",
            PRUNED,
            f"a guardrail ended trial {trial.number}: {_first_line(trial.message)} "
            f"({', '.join(f'{name} {value}' for name, value in trial.config.items())})",
        )
        for trial in before.trials
        if trial.number in fresh
    ]


def _verdict(after: RunStatus) -> list[Happening]:
    ready = _condition(after, names.READY)
    if ready is None:
        return []
    return [Happening("Normal" if ready.status == "True" else "Warning", ready.reason, ready.message)]


def _stalled(before: RunStatus, after: RunStatus) -> list[Happening]:
    was, now = _condition(before, names.STALLED), _condition(after, names.STALLED)
    if now is None or now.status != "True":
        return []
    # Each refused candidate is news; of other trouble the message may change from look to look.
    told = was is not None and (was.status, was.reason) == (now.status, now.reason)
    if was is not None and told and (now.reason != names.CANDIDATE_REFUSED or was.message == now.message):
        return []
    return [Happening("Warning", now.reason, now.message)]


def _waiting(before: RunStatus, after: RunStatus) -> list[Happening]:
    was, now = _condition(before, names.RECONCILING), _condition(after, names.RECONCILING)
    if now is None or now.status != "True" or now.reason in _UNDER_WAY:
        return []
    if was is not None and (was.status, was.reason) == (now.status, now.reason):
        return []
    return [Happening("Warning" if now.reason in _WORRYING else "Normal", now.reason, now.message)]


def _condition(status: RunStatus, kind: str) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == kind), None)


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]
