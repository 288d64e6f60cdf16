"""Sets conditions so that kstatus, `kubectl wait` and GitOps tools read them truthfully. Pure.

`lastTransitionTime` moves only when `status` does; every condition carries the generation that it speaks of; types that are no
longer wanted go. Used by `plan.status`; knows nothing of what conditions mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from trimtab_operator import names
from trimtab_operator.api.status import Condition

#: Characters that the API server takes in a message; a status that it refuses would say nothing at all.
MESSAGE_LIMIT = 32_768
KstatusVerdict = Literal["InProgress", "Failed", "Current", "Terminating"]


def merge(previous: Sequence[Condition], wanted: Sequence[Condition], now: str) -> tuple[Condition, ...]:
    """`wanted`, each with the transition time of its predecessor when the status is the same, else `now` (RFC 3339)."""
    before = {condition.type: condition for condition in previous}
    merged = []
    for condition in wanted:
        old = before.get(condition.type)
        since = old.last_transition_time if old is not None and old.status == condition.status else now
        message = condition.message[:MESSAGE_LIMIT]
        merged.append(replace(condition, message=message, last_transition_time=since or now))
    return tuple(merged)


def kstatus(
    conditions: Sequence[Condition], observed_generation: int, generation: int, *, deleting: bool = False
) -> KstatusVerdict:
    """What cli-utils' kstatus makes of a status, in its order of rules."""
    if deleting:
        return "Terminating"
    if observed_generation != generation:
        return "InProgress"
    by_type = {condition.type: condition.status for condition in conditions}
    if by_type.get(names.RECONCILING) == "True":
        return "InProgress"
    if by_type.get(names.STALLED) == "True":
        return "Failed"
    if names.READY in by_type:
        return "Current" if by_type[names.READY] == "True" else "InProgress"
    return "Current"
