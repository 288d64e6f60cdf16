"""Which live config is in force: incumbent, candidate with its lease, and the rule of rising generations.

The engine process holds the one `LiveState` (through `engine_state`) and changes it between steps; the HTTP process only
shows its JSON form. Pure: times are the caller's monotonic seconds, nothing is read from clocks or files.

Rules, for a document (generation, source, config, lease):
  generation above all seen so far        taken: without a lease as the new incumbent (any candidate ends: a deliberate
                                          change wins over a trial), with one as the candidate
  same generation, same content           nothing changes; for a running candidate its lease is renewed
  more than MAX_RISE above them           GenerationConflict: whoever wrote that would leave no room for the numbers to come
  anything else                           GenerationConflict, nothing changes
A candidate ends when its lease runs out, when it is ended by request, or when a new incumbent comes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_engine.errors import ConfigError, GenerationConflict

SOURCES = ("Spec", "Recommendation")
MAX_LEASE_S = 120.0
# Numbers rise by one, or by as much as engines and operator lost sight of each other: far less than this.
MAX_RISE = 2**32
# Below which the first number stays, which nothing can be compared with.
FIRST_LIMIT = 2**61


@dataclass(frozen=True, slots=True)
class Versioned:
    """A live config with the number it came under and who wanted it (one of SOURCES)."""

    generation: int
    source: str
    config: LiveConfig

    def to_json(self) -> dict[str, object]:
        """Plain JSON form."""
        return {"generation": self.generation, "source": self.source, "config": self.config.to_json()}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A config on trial; the incumbent comes back at `until_s` unless the lease is renewed."""

    document: Versioned
    until_s: float


def check_lease(lease_s: object) -> float | None:
    """The lease of a document: None, or a number of seconds above 0 and up to MAX_LEASE_S; else ConfigError."""
    if lease_s is None:
        return None
    allowed = f"null, or a number above 0 and up to {MAX_LEASE_S:g}"
    if isinstance(lease_s, bool) or not isinstance(lease_s, int | float) or not 0 < lease_s <= MAX_LEASE_S:
        raise ConfigError("lease_s", lease_s, allowed)
    return float(lease_s)


def check_source(source: object) -> str:
    """The source of a document; raises ConfigError unless it is one of SOURCES."""
    if source not in SOURCES:
        raise ConfigError("source", source, f"one of {', '.join(SOURCES)}")
    return str(source)


def check_generation(generation: object) -> int:
    """A generation number from outside; raises ConfigError unless it is an integer of at least 0, with room for the next ones."""
    if isinstance(generation, bool) or not isinstance(generation, int) or not 0 <= generation < 2**62:
        raise ConfigError("generation", generation, "an integer from 0 to 2^62-1")
    return generation


class LiveState:
    """State machine over documents; see the module's rules. `in_force` is what the scheduler shall use now."""

    def __init__(self, incumbent: Versioned, ceilings: Ceilings, boot_error: str | None = None) -> None:
        self.incumbent = incumbent
        self.candidate: Candidate | None = None
        self.ceilings = ceilings
        self.boot_error = boot_error
        self.highest_generation = incumbent.generation

    @property
    def in_force(self) -> Versioned:
        """The candidate while there is one, else the incumbent."""
        return self.incumbent if self.candidate is None else self.candidate.document

    @property
    def next_end_s(self) -> float:
        """When the current lease runs out; infinity without one."""
        return math.inf if self.candidate is None else self.candidate.until_s

    def offer(self, document: Versioned, lease_s: float | None, now: float) -> bool:
        """Take a document, or renew, or repeat. True when the config in force has changed.

        Call `expire(now)` first: a lease that has run out cannot be renewed. Raises GenerationConflict.
        """
        if document.generation > self.highest_generation:
            if document.generation > self._most():
                raise GenerationConflict(
                    f"generation {document.generation} is not taken: numbers rise by at most {MAX_RISE} at a time, and this "
                    f"engine has seen {self.highest_generation}"
                )
            before = self.in_force
            self.highest_generation = document.generation
            if lease_s is None:
                self.incumbent, self.candidate = document, None
            else:
                self.candidate = Candidate(document, now + lease_s)
            return self.in_force != before
        if lease_s is None and document == self.incumbent:
            return False
        if lease_s is not None and self.candidate is not None and document == self.candidate.document:
            self.candidate = replace(self.candidate, until_s=now + lease_s)
            return False
        raise GenerationConflict(self._conflict(document, lease_s))

    def expire(self, now: float) -> bool:
        """End the candidate if its lease has run out. True when the config in force has changed."""
        return now >= self.next_end_s and self.end_candidate()

    def end_candidate(self) -> bool:
        """End the candidate, if there is one. True when the config in force has changed."""
        had_one = self.candidate is not None
        self.candidate = None
        return had_one

    def to_json(self, unix_offset_s: float) -> dict[str, object]:
        """The read-back. `unix_offset_s` = Unix time minus the monotonic clock, for `candidate.until`."""
        candidate = None
        if self.candidate is not None:
            candidate = {
                **self.candidate.document.to_json(),
                "until": round(self.candidate.until_s + unix_offset_s, 3),
            }
        return {
            "incumbent": self.incumbent.to_json(),
            "candidate": candidate,
            "in_force": self.in_force.to_json(),
            "ceilings": {
                "max_num_batched_tokens": self.ceilings.max_num_batched_tokens,
                "max_num_seqs": self.ceilings.max_num_seqs,
            },
            "boot_error": self.boot_error,
            "highest_generation": self.highest_generation,
        }

    def _most(self) -> int:
        """The largest number that is taken now."""
        return self.highest_generation + MAX_RISE if self.highest_generation else FIRST_LIMIT - 1

    def _conflict(self, document: Versioned, lease_s: float | None) -> str:
        known = [d for d in (self.incumbent, self.in_force) if d.generation == document.generation]
        if document.generation < self.highest_generation and not known:
            why = f"this engine has seen {self.highest_generation}"
        elif not known:
            why = "the lease under this number has ended; a new one needs a new number"
        elif known[0] != document:
            why = "it is known with other content"
        else:
            why = "a number is either an incumbent's or a candidate's, not both"
        lease = "" if lease_s is None else f" (lease {lease_s:g} s)"
        return f"generation {document.generation}{lease} is not taken: {why}"
