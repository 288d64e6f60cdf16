"""What to say to one engine so that its live config becomes what is wanted. Pure; used by `plan.cluster`.

The engine's own account (its read-back) is compared with the service's documents, whatever happened before. Numbers only go up:
an engine that has seen a number with other content, or a higher one, makes the service take a new number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]

LEASE_S = 30.0  # what an engine is given at a time
RENEW_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate as a live document, and the Unix time at which its owner wants it ended unless renewed."""

    document: dict[str, Any]
    until_s: float


@dataclass(frozen=True, slots=True)
class Push:
    """PUT this document; with `lease_s` as a candidate."""

    document: dict[str, Any]
    lease_s: float | None = None


@dataclass(frozen=True, slots=True)
class EndCandidate:
    """DELETE the candidate."""


Call = Push | EndCandidate


@dataclass(frozen=True, slots=True)
class Verdict:
    """Calls in order. With a `renumber_…` set, nothing can be said under the present number."""

    calls: tuple[Call, ...] = ()
    renumber_incumbent: bool = False
    renumber_candidate: bool = False


def judge(read_back: Json, incumbent: Json, trial: Trial | None, now: float) -> Verdict:
    """`incumbent` is a whole live document; `trial` is None for an engine that is to try nothing."""
    has, trying = read_back["incumbent"], read_back.get("candidate")
    highest = int(read_back["highest_generation"])
    calls: list[Call] = []
    if has["generation"] == incumbent["generation"]:
        if (has["config"], has["source"]) != (incumbent["config"], incumbent["source"]):
            return Verdict(renumber_incumbent=True)
    elif highest >= incumbent["generation"]:
        return Verdict(renumber_incumbent=True)
    else:
        calls.append(Push(dict(incumbent)))
        highest, trying = int(incumbent["generation"]), None  # a new incumbent ends a candidate
    if trial is None or trial.until_s <= now:
        if trying is not None:
            calls.append(EndCandidate())
        return Verdict(tuple(calls))
    document = trial.document
    held = trying is not None and (trying["generation"], trying["config"]) == (
        document["generation"],
        document["config"],
    )
    until_s = min(now + LEASE_S, trial.until_s)
    if held and trying is not None:
        # Renewed when a renewal period's worth is gone, and when the owner shortened it.
        if abs(float(trying["until"]) - until_s) < RENEW_EVERY_S * 0.9:
            return Verdict(tuple(calls))
    elif highest >= document["generation"]:
        return Verdict(tuple(calls), renumber_candidate=True)
    calls.append(Push(document, round(until_s - now, 3)))
    return Verdict(tuple(calls))
