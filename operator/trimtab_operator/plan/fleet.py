"""What holds for all services together: the fleet's tuning switch, and how many runs may act at a time. Pure.

The switch is a key of one ConfigMap in the operator's namespace; the stronger of fleet and service wins. Used by `cluster.fleet`
and `cluster.slots`, which know where these facts come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from trimtab_operator import names
from trimtab_operator.api import InvalidRun, TuningRun
from trimtab_operator.plan.live import Switch
from trimtab_operator.plan.pods import unix
from trimtab_operator.plan.runs import begun, deadline_s, until_s
from trimtab_operator.plan.workers import FINISHED, wanted

SWITCH_KEY = "tuning"
#: Reasons of a run whose candidate is not tried now: it takes nobody's place.
_NOT_TRIED = frozenset({names.CANDIDATE_REFUSED, names.QUIET_TIME})
#: Reasons of a run that begins as soon as there is a place.
_MAY_BEGIN = frozenset({names.WAITING_FOR_TURN, "Pending", "Running"})
K = TypeVar("K")


class Reading(NamedTuple):
    """The switch, and what is wrong with the ConfigMap, if something is."""

    switch: Switch
    problem: str | None = None


def read_switch(config_map: Mapping[str, Any] | None, where: str) -> Reading:
    """What the ConfigMap says. `where` names it for people. An unknown value pauses: whoever wrote it wanted a halt."""
    by = f"{SWITCH_KEY} of {where}"
    value = ((config_map or {}).get("data") or {}).get(SWITCH_KEY)
    if value is None or value == "active":
        return Reading(Switch())
    if value == "reverted":
        return Reading(Switch("reverted", by))
    if value == "paused":
        return Reading(Switch("paused", by))
    problem = f"{by}: {value!r} is not allowed; one of active, paused, reverted; taken as paused"
    return Reading(Switch("paused", by), problem)


@dataclass(frozen=True, slots=True)
class Contender:
    """A run, as far as the limit of runs that act is concerned. `until_s` is until when it needs a place: with a worker the end of the
    run, else that of its candidate (0 without one); `deadline_s` ends the run."""

    name: str
    uid: str
    created_s: float
    until_s: float
    deadline_s: float
    over: bool
    refused: bool  # its candidate may not be tried, or its worker not be made, at least not now
    holds: bool  # its candidate is in engines, or its worker was made, by the status that was written last

    @classmethod
    def of(cls, run: TuningRun | InvalidRun) -> Contender:
        """From a run."""
        created = unix(run.metadata.creation_timestamp)
        if isinstance(run, InvalidRun):
            return cls(run.name, run.metadata.uid, created, 0.0, 0.0, over=True, refused=True, holds=False)
        limit = deadline_s(run)
        deadline = float("inf") if limit is None else limit
        reasons = {c.reason for c in run.status.conditions if c.type == names.READY}
        # A run that keeps waiting for something of its own must not keep others from a place.
        if wanted(run):
            refused = not begun(run) and bool(reasons - _MAY_BEGIN)
        else:
            refused = any(c.reason in _NOT_TRIED for c in run.status.conditions)
        return cls(
            name=run.name,
            uid=run.uid,
            created_s=created,
            until_s=deadline if wanted(run) else until_s(run),
            deadline_s=deadline,
            over=run.deleting
            or run.judged
            or run.status.phase in FINISHED
            or names.NOT_ALLOWED_BY_SERVICE in reasons,
            refused=refused,
            holds=run.status.applied is not None or begun(run),
        )


def contenders(by_service: Mapping[K, Iterable[Contender]], now: float) -> dict[K, Contender]:
    """The run of each service that wants a place: of those that are not over the one that has a worker, else the oldest, as in
    `plan.runs`."""
    found: dict[K, Contender] = {}
    for service, listed in by_service.items():
        alive = [run for run in listed if not run.over and run.deadline_s > now]
        first = min(alive, key=lambda run: (not run.holds, run.created_s, run.name), default=None)
        if first is not None and first.until_s > now and not first.refused:
            found[service] = first
    return found


def may_act(wanting: Mapping[K, Contender], limit: int) -> set[K]:
    """Whose runs may act: those that do already, then the oldest ones."""

    def order(item: tuple[K, Contender]) -> tuple[bool, float, str, str]:
        service, run = item
        return not run.holds, run.created_s, run.name, str(service)

    return {service for service, _ in sorted(wanting.items(), key=order)[:limit]}
