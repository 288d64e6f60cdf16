"""Quiet times (`spec.tuning.limits.notDuring`): is one in force, until when, and when does the next one begin. Pure.

In a quiet time no run starts, no candidate is in force and no result is promoted; what is in force by spec or by an earlier
recommendation stays, and so does every switch of a person. Entries are taken together: one that begins before another ends makes
one longer time of both. A time lasts its duration by the clock of physics, from each begin of its line. Used by `plan.cluster`,
`plan.runs` and local mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from trimtab_operator import cron
from trimtab_operator.api.service import Limits, QuietTime
from trimtab_operator.plan.pods import rfc3339

#: How often a time is followed by the next one before its end counts as unknown: lines such as `* * * * *` never end.
_MAX_FOLLOWERS = 32


@dataclass(frozen=True, slots=True)
class Quiet:
    """A quiet time in force. It lasts at least to `until_s` (Unix); `ends` says whether it is over then."""

    entry: str  # which entry, for people
    until_s: float
    ends: bool = True

    def __str__(self) -> str:
        if not self.ends:
            return f"{self.entry} is in force, and is followed by others without a pause"
        return f"{self.entry} is in force until {rfc3339(self.until_s)}"


def in_force(limits: Limits, now: float) -> Quiet | None:
    """The quiet time of `now`, or None."""
    return _in_force(limits.not_during, now) if limits.not_during else None


@lru_cache(maxsize=256)  # one look asks several times, of one moment
def _in_force(not_during: tuple[QuietTime, ...], now: float) -> Quiet | None:
    first = next((i for i, quiet in enumerate(not_during) if _end_s(quiet, now) > now), None)
    if first is None:
        return None
    quiet = not_during[first]
    zone = f", {quiet.time_zone}" if quiet.time_zone else ""
    entry = f"spec.tuning.limits.notDuring[{first}] ({quiet.schedule}{zone})"
    until_s = now
    for _ in range(_MAX_FOLLOWERS):
        end_s = max(_end_s(each, until_s) for each in not_during)
        if end_s <= until_s:
            return Quiet(entry, until_s)
        until_s = end_s
    return Quiet(entry, until_s, ends=False)


def next_begin_s(limits: Limits, now: float) -> float | None:
    """When the next entry begins, after `now`; None without entries."""
    begins = (_line(quiet).following(now) for quiet in limits.not_during)
    return min((begin for begin in begins if begin is not None), default=None)


def border_s(limits: Limits, now: float) -> float | None:
    """When this is to be asked again: the end of what is in force, else the next begin; None without entries."""
    quiet = in_force(limits, now)
    return next_begin_s(limits, now) if quiet is None else quiet.until_s


def _end_s(quiet: QuietTime, at_s: float) -> float:
    """When the last one that began at `at_s` or before is over: in force at `at_s` if that is later."""
    begin = _line(quiet).latest(at_s)
    return float("-inf") if begin is None else begin + quiet.duration_s


def _line(quiet: QuietTime) -> cron.Line:
    return cron.line(quiet.schedule, quiet.time_zone)
