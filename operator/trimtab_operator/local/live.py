"""The live config of a whole local service: its incumbent, its candidate, and the one row of generation numbers.

Owned by `service`. The same state machine as in each engine, one level up: the operator gives the numbers, engines take
what is above all they have seen. Pure: no files, no clock, no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trimtab_operator.plan.live_record import MAX_RISE

Json = dict[str, Any]
MAX_LEASE_S = 120.0


class GenerationConflict(Exception):
    """The number is not new, or known with other content. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Document:
    """A live config, the number it came under and who wanted it (Spec or Recommendation)."""

    generation: int
    source: str
    config: Json

    def to_json(self) -> Json:
        """The form of `live.json` and of the admin ports."""
        return {"generation": self.generation, "source": self.source, "config": self.config}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A config on trial until `until_s`, unless renewed."""

    document: Document
    until_s: float  # Unix
    targets: frozenset[str] | None  # names of the replicas that try it; None: all


class ServiceLive:
    """See the module. `highest` is above every number that was ever given away for this service."""

    def __init__(self, incumbent: Document | None = None, highest: int = 0) -> None:
        self.incumbent = incumbent
        self.candidate: Candidate | None = None
        self.highest = max(highest, incumbent.generation if incumbent is not None else 0)

    def want(self, config: Json, source: str) -> bool:
        """Make this the incumbent; under a new number, which ends a candidate, if it differs. True when it did."""
        if self.incumbent is not None and (self.incumbent.config, self.incumbent.source) == (config, source):
            return False
        self.highest += 1
        self.incumbent = Document(self.highest, source, config)
        self.candidate = None
        return True

    def renumber(self) -> None:
        """Give the incumbent a new number: an engine has seen its number with other content."""
        assert self.incumbent is not None
        self.highest += 1
        self.incumbent = replace(self.incumbent, generation=self.highest)
        self.candidate = None

    def offer(
        self,
        generation: int | None,
        source: str,
        config: Json,
        lease_s: float,
        now: float,
        targets: frozenset[str] | None = None,
    ) -> Candidate:
        """Begin or renew a candidate; `now` is Unix time. None as number takes the next. Raises GenerationConflict."""
        self.expire(now)
        current = self.candidate
        if generation is not None and generation <= self.highest:
            if current is None or current.document.generation != generation:
                raise GenerationConflict(
                    f"generation {generation} is not taken: this service has seen {self.highest}"
                    + (", and the lease under that number has ended" if current is None else "")
                )
            if current.document.config != config:
                raise GenerationConflict(
                    f"generation {generation} is not taken: it is known with other content"
                )
            self.candidate = replace(current, until_s=now + lease_s)
            return self.candidate
        if generation is not None and generation - self.highest > MAX_RISE:
            raise GenerationConflict(
                f"generation {generation} is not taken: numbers rise by at most {MAX_RISE} at a time, and this service has seen "
                f"{self.highest}"
            )
        self.highest = self.highest + 1 if generation is None else generation
        self.candidate = Candidate(Document(self.highest, source, config), now + lease_s, targets)
        return self.candidate

    def end_candidate(self) -> bool:
        """Back to the incumbent; True when there was a candidate."""
        had_one = self.candidate is not None
        self.candidate = None
        return had_one

    def expire(self, now: float) -> bool:
        """End the candidate if its lease has run out; True when it had."""
        return self.candidate is not None and now >= self.candidate.until_s and self.end_candidate()

    def desired(self, replica: str) -> Document | None:
        """What one replica should have in force."""
        candidate = self.candidate
        if candidate is not None and (candidate.targets is None or replica in candidate.targets):
            return candidate.document
        return self.incumbent
