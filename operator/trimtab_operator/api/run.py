"""TuningRun as frozen dataclasses: what is to be tried, and the record that its job and the operator write.

Defaults and bounds are the CRD's (`crds/tuningrun.yaml`; `tests/contract` holds them equal). The spec is read once and never
changes. Values of a candidate or a result are judged where they would be put in force (`plan.runs`), not here. Used by `schema`,
`plan.runs` and the reconciler. Times are RFC 3339 texts in UTC.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from trimtab_operator.api.parse import decode, duration, encode, read
from trimtab_operator.api.service import Metadata, Parameter, SecretKey
from trimtab_operator.api.status import Condition
from trimtab_operator.errors import Finding, InvalidResource

EVALUATORS = ("Simulator", "Shadow", "Live")
_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Workload:
    """The traffic on which candidates are compared."""

    type: str = "Recorded"
    trace_ref: SecretKey | None = None
    slice_s: float | None = duration("slice", None, "1s", "24h")


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What is to be tried. No `parameters`: those of the service."""

    service: str
    evaluator: str = "Live"
    parameters: tuple[Parameter, ...] = ()
    max_trials: int = 20
    time_limit_s: float = duration("timeLimit", "2h", "1m", "24h")
    workload: Workload = field(default_factory=Workload)

    def parameter(self, name: str) -> Parameter | None:
        """The run's own bounds of that knob, or None."""
        return next((p for p in self.parameters if p.name == name), None)


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the job wants tried now, by field name of spec.engine; over at `until`."""

    config: Mapping[str, Any]
    until: str
    trial: int | None = None


@dataclass(frozen=True, slots=True)
class AppliedCandidate:
    """What the operator did with the candidate: its number, n/m pods that read it back, the end of their leases."""

    generation: int
    pods: str
    until: str | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate tried."""

    number: int
    state: str
    config: Mapping[str, Any] = field(default_factory=dict)
    requests: int | None = None
    violated: int | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """How the run ended. `config` is the winner; `before` and `after` hold numbers of incumbent and winner."""

    verdict: str | None = None
    diagnosis: str | None = None
    message: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Texts of the printer columns."""

    trials: int = 0
    incumbent: str | None = None
    candidate: str | None = None
    p99_itl: str | None = None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The record. The job writes candidate, trials and result, the operator everything else. `pruned`: numbers of the trials that
    guardrails ended, as far as it was told."""

    observed_generation: int = 0
    phase: str = ""
    start_time: str | None = None
    conditions: tuple[Condition, ...] = ()
    candidate: Candidate | None = None
    applied: AppliedCandidate | None = None
    trials: tuple[Trial, ...] = ()
    pruned: tuple[int, ...] = ()
    result: Result | None = None
    summary: RunSummary = field(default_factory=RunSummary)

    def to_json(self) -> dict[str, Any]:
        """Wire form, as in `status`; what is absent is left out."""
        out: dict[str, Any] = encode(self)
        return out

    @classmethod
    def from_json(cls, raw: object) -> RunStatus:
        """Inverse of `to_json`; raises InvalidResource."""
        return read(cls, raw, "status", "the status")


@dataclass(frozen=True, slots=True)
class TuningRun:
    """One parsed resource. `raw` is the wire form that it came from."""

    metadata: Metadata
    spec: RunSpec
    status: RunStatus = field(default_factory=RunStatus)
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """`metadata.name`."""
        return self.metadata.name

    @property
    def uid(self) -> str:
        """`metadata.uid`."""
        return self.metadata.uid

    @property
    def deleting(self) -> bool:
        """Whether it is on its way out."""
        return self.metadata.deletion_timestamp is not None

    @property
    def judged(self) -> bool:
        """Whether its job has written a verdict."""
        return self.status.result is not None and bool(self.status.result.verdict)

    @classmethod
    def parse(cls, resource: Mapping[str, Any]) -> TuningRun:
        """From a defaulted, schema-checked resource; raises InvalidResource with every finding that the schema language
        cannot say."""
        errors: list[Finding] = []
        metadata = decode(Metadata, resource.get("metadata"), "metadata", errors)
        spec = decode(RunSpec, resource.get("spec"), "spec", errors)
        status = decode(RunStatus, resource.get("status") or {}, "status", errors)
        if status is not None:
            until = None if status.candidate is None else status.candidate.until
            errors += _moment_findings(until, "status.candidate.until")
            errors += _moment_findings(status.start_time, "status.startTime")
        if metadata is not None and spec is not None and spec.evaluator == "Shadow":
            errors += _service_name_findings(metadata.name)
        if errors or metadata is None or spec is None or status is None:
            name = metadata.name if metadata is not None else "?"
            raise InvalidResource(errors, f'TuningRun "{name}"')
        return cls(metadata, spec, status, resource)


def _service_name_findings(name: str) -> list[Finding]:
    """None when a Service can be named after it; a run's name may be more than a Service's."""
    if _SERVICE_NAME.fullmatch(name):
        return []
    allowed = "a letter first and only a-z, 0-9 and -, with evaluator Shadow: the Service of its engines is named after it"
    return [Finding("metadata.name", name, allowed)]


def _moment_findings(text: str | None, path: str) -> list[Finding]:
    """None when `text` is a moment, or absent. The API server's date-time takes more: year 0, a day's offset."""
    try:
        if text is not None:
            datetime.fromisoformat(text.upper())
    except ValueError:
        return [Finding(path, text, "a time such as 2026-01-31T03:30:00Z")]
    return []


@dataclass(frozen=True, slots=True)
class InvalidRun:
    """A run that cannot be carried out as it is written, and why. It is told so in its status and left alone."""

    metadata: Metadata
    service: str
    findings: tuple[Finding, ...]
    conditions: tuple[Condition, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """`metadata.name`."""
        return self.metadata.name


def read_run(resource: Mapping[str, Any]) -> TuningRun | InvalidRun:
    """A run as an API server gives it; never raises on what its schema lets through."""
    try:
        return TuningRun.parse(resource)
    except InvalidResource as error:
        metadata = decode(Metadata, resource["metadata"], "metadata", [])
        if metadata is None:
            raise  # an API server gives no such object
        listed = (resource.get("status") or {}).get("conditions") or []
        found = (decode(Condition, item, "status.conditions", []) for item in listed)
        service = str(resource["spec"]["service"])
        kept = tuple(condition for condition in found if condition is not None)
        return InvalidRun(metadata, service, error.errors, kept, resource)
