"""InferenceService's status as frozen dataclasses. Only the operator writes it; values at rest do not change.

Used by `plan.status`, which computes it, and by both shells, which store it. Times are RFC 3339 texts in UTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab_operator.api.parse import encode, read


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, as in meta/v1. `status` is True, False or Unknown."""

    type: str
    status: str
    reason: str
    message: str = ""
    last_transition_time: str = ""
    observed_generation: int = 0


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Live values that a tuning run found, and the spec values and bounds in force when it did. `simulated`: no engine has run them.

    Keys are field names of `spec.engine` (`maxNumBatchedTokens`). `based_on` is `plan.live.basis(spec)` of that time:
    a person's edit of any of it voids the recommendation.
    """

    values: Mapping[str, Any]
    based_on: Mapping[str, Any]
    run: str | None = None
    time: str | None = None
    simulated: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Wire form, as in `status.tuning.recommendation`."""
        out: dict[str, Any] = {"values": dict(self.values), "basedOn": dict(self.based_on)}
        if self.run is not None:
            out["run"] = self.run
        if self.time is not None:
            out["time"] = self.time
        if self.simulated is not None:
            out["simulated"] = self.simulated
        return out

    @classmethod
    def from_json(cls, raw: object, path: str = "recommendation") -> Recommendation:
        """Inverse of `to_json`; raises InvalidResource."""
        return read(cls, raw, path, "the recommendation")


@dataclass(frozen=True, slots=True)
class LiveValues:
    """A live config in short, for `status.engine`."""

    generation: int
    source: str
    max_num_batched_tokens: int
    max_num_seqs: int
    scheduling_policy: str
    long_prefill_token_threshold: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Wanted and read-back live config."""

    desired: LiveValues | None = None
    applied: LiveValues | None = None
    applied_replicas: str | None = None


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """The last failed load."""

    reason: str
    message: str = ""
    pod: str | None = None
    time: str | None = None


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """How far loading is."""

    name: str
    state: str = "Pending"
    last_failure: LoadFailure | None = None


@dataclass(frozen=True, slots=True)
class LastRun:
    """The newest finished TuningRun."""

    name: str
    verdict: str = ""
    finished: str | None = None


@dataclass(frozen=True, slots=True)
class DriftStatus:
    """Since when targets are missed in a row, and the run that was made for it."""

    since: str | None = None
    run: str | None = None


@dataclass(frozen=True, slots=True)
class TuningStatus:
    """The standing recommendation, the last run, and targets that are missed."""

    state: str = "Off"
    recommendation: Recommendation | None = None
    last_run: LastRun | None = None
    drift: DriftStatus | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Texts of the printer columns."""

    replicas: str = "0/0"
    slo: str = "Unknown"


@dataclass(frozen=True, slots=True)
class Resolved:
    """Operator defaults that a service was built with; reused until its spec changes or upgradePolicy is Auto."""

    image: str | None = None
    template_version: int = 1


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """What is."""

    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()
    url: str | None = None
    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    available_replicas: int = 0
    selector: str | None = None
    summary: Summary = field(default_factory=Summary)
    model: ModelStatus | None = None
    engine: EngineStatus = field(default_factory=EngineStatus)
    tuning: TuningStatus = field(default_factory=TuningStatus)
    resolved: Resolved = field(default_factory=Resolved)

    def to_json(self) -> dict[str, Any]:
        """Wire form, as in `status`; what is absent is left out."""
        out: dict[str, Any] = encode(self)
        return out

    @classmethod
    def from_json(cls, raw: object) -> ServiceStatus:
        """Inverse of `to_json`; raises InvalidResource."""
        return read(cls, raw, "status", "the status")

    def condition(self, kind: str) -> Condition | None:
        """The condition of that type, or None."""
        return next((c for c in self.conditions if c.type == kind), None)
