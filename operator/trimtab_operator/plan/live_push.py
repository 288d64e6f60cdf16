"""What to say to one engine so that its live config becomes what is wanted. Pure; used by `plan.cluster`.

The engine's own account (its read-back) is compared with the service's documents, whatever happened before. Numbers only go up:
an engine that has seen a number with other content, or a higher one, makes the service take a new number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_operator.plan.live_record import MAX_RISE, NUMBER_LIMIT, is_number

Json = Mapping[str, Any]

LEASE_S = 30.0  # what an engine is given at a time
RENEW_EVERY_S = 10.0
# What the status holds of a read-back, and what can be written as a time.
_COUNT_LIMIT, _LONGEST_NAME, _LAST_MOMENT_S = 2**31, 64, 253_402_300_800


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


def is_read_back(answer: Json) -> bool:
    """Whether an engine's account of its live config is one. Its image is the service owner's choice, so it may say anything."""
    trying = answer.get("candidate")
    return (
        is_number(answer.get("highest_generation"))
        and answer["highest_generation"] < NUMBER_LIMIT - MAX_RISE  # there must be a next one
        and all(_is_document(answer.get(name)) for name in ("incumbent", "in_force"))
        and (trying is None or (_is_document(trying) and _is_moment(trying.get("until"))))
    )


def _is_document(value: object) -> bool:
    if not isinstance(value, Mapping) or not is_number(value.get("generation")):
        return False
    config, policy = value.get("config"), None
    if isinstance(config, Mapping):
        policy = config.get("scheduling_policy")
    counts = ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")
    return (
        value.get("source") in ("Spec", "Recommendation")
        and isinstance(policy, str)
        and len(policy) <= _LONGEST_NAME
        and isinstance(config, Mapping)
        and all(is_number(config.get(name)) and config[name] < _COUNT_LIMIT for name in counts)
    )


def _is_moment(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < _LAST_MOMENT_S


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
