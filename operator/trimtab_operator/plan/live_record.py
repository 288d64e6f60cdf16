"""What the live ConfigMap remembers: the incumbent, the highest number ever given, and which candidate holds which number. Pure.

The ConfigMap is the truth that outlives operator and engines. A candidate's values never enter it, only its number, so that a
restarted operator renews the same lease. Edits by hand are read as far as they make sense and written over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_operator import names
from trimtab_operator.api.run import Candidate
from trimtab_operator.plan.drift import digest

Json = dict[str, Any]
#: Below which every number stays, for the engine too (`trimtab_engine.live_state`). One that somebody else wrote beyond it counts
#: as none: there must always be a next one, and the API server holds 64 bits.
NUMBER_LIMIT = 2**62
#: As in the engine: how far above all it has seen it takes a number, and below which it takes its first one.
MAX_RISE, FIRST_LIMIT = 2**32, 2**61


@dataclass(frozen=True, slots=True)
class CandidateNumber:
    """`key` is the digest of run, trial and values; `basis` that of the spec values when the number was given."""

    key: str
    basis: str
    generation: int


@dataclass(frozen=True, slots=True)
class LiveRecord:
    """See the module. `document` is None when there is none, or none that can be read."""

    document: Json | None = None
    highest: int = 0
    candidate: CandidateNumber | None = None

    @classmethod
    def of(cls, config_map: Mapping[str, Any] | None) -> LiveRecord:
        """From the live object; never raises on what somebody wrote into it."""
        if config_map is None:
            return cls()
        document = _document((config_map.get("data") or {}).get("live.json"))
        annotations = config_map["metadata"].get("annotations") or {}
        candidate = _candidate(annotations.get(names.ANNOTATION_CANDIDATE))
        highest = max(
            _written(annotations.get(names.ANNOTATION_HIGHEST)),
            document["generation"] if document is not None else 0,
            candidate.generation if candidate is not None else 0,
        )
        return cls(document, highest, candidate)

    def within(self, reach: int) -> LiveRecord:
        """Without numbers above `reach`: engines would not take them, nor any after them."""
        document = self.document if self.document is None or self.document["generation"] <= reach else None
        candidate = self.candidate if self.candidate is None or self.candidate.generation <= reach else None
        if document is self.document and candidate is self.candidate and self.highest <= reach:
            return self
        known = [
            0 if document is None else document["generation"],
            0 if candidate is None else candidate.generation,
        ]
        return LiveRecord(document, self.highest if self.highest <= reach else max(known), candidate)

    def annotations(self) -> dict[str, str]:
        """What is written beside live.json."""
        found = {names.ANNOTATION_HIGHEST: str(self.highest)}
        if self.candidate is not None:
            found[names.ANNOTATION_CANDIDATE] = json.dumps(
                {
                    "key": self.candidate.key,
                    "basis": self.candidate.basis,
                    "generation": self.candidate.generation,
                }
            )
        return found


def candidate_key(run_uid: str, candidate: Candidate) -> str:
    """The same candidate of the same run, however often it is read."""
    return digest({"run": run_uid, "trial": candidate.trial, "config": candidate.config})


def reach(seen: Iterable[int]) -> int:
    """The largest number that can be ours, by what engines say that they have seen: half of what they would take."""
    highest = max(seen, default=0)
    return highest + MAX_RISE // 2 if highest else FIRST_LIMIT - 1


def is_number(value: object) -> bool:
    """Whether it may be the number of a document."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < NUMBER_LIMIT


def _written(text: object) -> int:
    digits = text if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 20 else "0"
    return int(digits) if is_number(int(digits)) else 0


def _document(text: object) -> Json | None:
    found = _object(text)
    if found is None or set(found) != {"generation", "source", "config"}:
        return None
    return found if is_number(found["generation"]) and isinstance(found["config"], dict) else None


def _candidate(text: object) -> CandidateNumber | None:
    found = _object(text) or {}
    key, basis, number = found.get("key"), found.get("basis"), found.get("generation")
    if isinstance(key, str) and isinstance(basis, str) and isinstance(number, int) and is_number(number):
        return CandidateNumber(key, basis, number)
    return None


def _object(text: object) -> Json | None:
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
