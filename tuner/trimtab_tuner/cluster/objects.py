"""What a worker reads of its TuningRun and of the service that it tunes, as plain dataclasses. Pure.

Called by everything in `cluster`. The API server has judged shapes and filled in defaults before; a status may still hold what
somebody else wrote, so what does not fit there is left out, never believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from trimtab_engine.core.live import Ceilings
from trimtab_tuner.errors import InputError
from trimtab_tuner.units import parse_duration_s

Json = Mapping[str, Any]
#: field of spec.engine → field of the live config, for everything that a run may turn.
FIELDS = {
    "maxNumBatchedTokens": "max_num_batched_tokens",
    "maxNumSeqs": "max_num_seqs",
    "schedulingPolicy": "scheduling_policy",
    "longPrefillTokenThreshold": "long_prefill_token_threshold",
}
PAUSE_ANNOTATION = "serving.trimtab.dev/tuning"
QUIET_TIME = "QuietTime"  # reason of a run that waits for the end of one of the owner's quiet times
FINISHED = ("Succeeded", "Failed", "Stopped")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One knob's bounds, by the live config's field name. Exactly one of the pair and `choices` is given."""

    name: str
    bounds: tuple[int, int] | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Service:
    """The service that is tuned."""

    name: str
    uid: str
    mode: str  # Off | Recommend | Canary | Apply
    parameters: tuple[Parameter, ...]
    window_s: float  # slo.window
    max_throughput_loss: float  # of 1
    extra_replicas: int
    ceilings: Ceilings
    port: int
    halted: str | None  # paused | reverted (by the annotation), or None
    state: str  # of tuning, as the operator says it; the fleet's switch shows here alone
    recommendation_run: str | None  # the run whose result stands
    has_api_keys: bool


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of a run."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Applied:
    """What the operator did with the candidate: its number, and how many of the pods that are meant read it back."""

    generation: int
    pods: int
    of: int

    @property
    def everywhere(self) -> bool:
        """In force in every pod that is to try it."""
        return 0 < self.of == self.pods


@dataclass(frozen=True, slots=True)
class Run:
    """A TuningRun. `raw_trials` are as they stand in the status."""

    name: str
    uid: str
    service: str
    evaluator: str  # Simulator | Shadow | Live
    workload: str  # Recorded | Trace
    slice_s: float | None  # workload.slice
    parameters: tuple[Parameter, ...]
    max_trials: int
    time_limit_s: float
    phase: str = ""
    deleting: bool = False
    started_s: float | None = None  # Unix
    applied: Applied | None = None
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    raw_trials: tuple[Json, ...] = ()
    verdict: str | None = None

    @property
    def over(self) -> bool:
        """Whether the operator counts it as ended."""
        return self.phase in FINISHED

    def condition(self, kind: str) -> Condition:
        """The condition; with empty texts when there is none."""
        return self.conditions.get(kind, Condition("", "", ""))


def service_of(raw: Json) -> Service:
    """From the defaulted resource. Raises InputError naming the field."""
    metadata, spec, status = raw["metadata"], raw["spec"], raw.get("status") or {}
    tuning, engine = spec.get("tuning") or {}, spec.get("engine") or {}
    ceilings, limits = engine.get("ceilings") or {}, tuning.get("limits") or {}
    said = (metadata.get("annotations") or {}).get(PAUSE_ANNOTATION)
    halted = None if said in (None, "active") else "reverted" if said == "reverted" else "paused"
    loss = str(limits.get("maxThroughputLoss", "3%")).rstrip("%")
    return Service(
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        mode=str(tuning.get("mode", "Off")),
        parameters=_parameters(tuning.get("parameters")),
        window_s=duration_s((spec.get("slo") or {}).get("window", "5m"), "spec.slo.window"),
        max_throughput_loss=float(loss) / 100,
        extra_replicas=int(limits.get("extraReplicas", 0)),
        ceilings=Ceilings(int(ceilings.get("maxNumBatchedTokens", 8192)), int(ceilings.get("maxNumSeqs", 256))),
        port=int((spec.get("service") or {}).get("port", 8000)),
        halted=halted,
        state=str((status.get("tuning") or {}).get("state", "")),
        recommendation_run=((status.get("tuning") or {}).get("recommendation") or {}).get("run"),
        has_api_keys=bool((spec.get("security") or {}).get("apiKeySecretRef")),
    )  # fmt: skip


def run_of(raw: Json) -> Run:
    """From the defaulted resource. Raises InputError naming the field."""
    metadata, spec, status = raw["metadata"], raw["spec"], raw.get("status") or {}
    workload = spec.get("workload") or {}
    part = workload.get("slice")
    return Run(
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        service=str(spec["service"]),
        evaluator=str(spec.get("evaluator", "Live")),
        workload=str(workload.get("type", "Recorded")),
        slice_s=None if part is None else duration_s(part, "spec.workload.slice"),
        parameters=_parameters(spec.get("parameters")),
        max_trials=int(spec.get("maxTrials", 20)),
        time_limit_s=duration_s(spec.get("timeLimit", "2h"), "spec.timeLimit"),
        phase=str(status.get("phase") or ""),
        deleting=metadata.get("deletionTimestamp") is not None,
        started_s=unix_s(status.get("startTime")),
        applied=_applied(status.get("applied")),
        conditions={
            str(c.get("type")): Condition(str(c.get("status")), str(c.get("reason")), str(c.get("message")))
            for c in status.get("conditions") or ()
        },
        raw_trials=tuple(status.get("trials") or ()),
        verdict=(status.get("result") or {}).get("verdict"),
    )


_HALTED = ("Paused", "Reverted")


def halt(service: Service, run: Run) -> str | None:
    """Why nothing may be tried for now, which ends by itself or by a person's word; None when nothing stands against it."""
    if service.halted is not None:
        return f"tuning is {service.halted} by the annotation {PAUSE_ANNOTATION}"
    if service.state in _HALTED:
        return f"tuning is {service.state.lower()} for all services (status.tuning.state)"
    ready = run.condition("Ready")
    return (ready.message or "a quiet time is in force") if ready.reason == QUIET_TIME else None


def duration_s(text: object, path: str) -> float:
    """`1h30m` → seconds: what a resource may hold, where several units follow each other."""
    rest, total = str(text), 0.0
    while rest:
        length = next((i for i, letter in enumerate(rest) if letter.isalpha()), len(rest))
        end = length + (2 if rest[length : length + 2] == "ms" else 1)
        total += parse_duration_s(rest[:end], path)
        rest = rest[end:]
    if not total:
        raise InputError(path, text, "a duration such as 90s or 1h30m")
    return total


def unix_s(text: object) -> float | None:
    """An RFC 3339 text → Unix seconds; None for none, or for what is no time."""
    try:
        return datetime.fromisoformat(text.upper()).timestamp() if isinstance(text, str) else None
    except (ValueError, OverflowError):
        return None


def rfc3339(moment_s: float) -> str:
    """Unix seconds → text, never later than the moment itself."""
    return datetime.fromtimestamp(int(moment_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def allowed(service: Service, run: Run) -> tuple[Parameter, ...]:
    """What this run may turn: its own parameters within the service's, or the service's. Raises InputError when nothing is left."""
    if not run.parameters:
        if not service.parameters:
            raise InputError("spec.tuning.parameters", None, "the service allows no parameter to be tuned")
        return service.parameters
    outer = {parameter.name: parameter for parameter in service.parameters}
    found = []
    for parameter in run.parameters:
        limit = outer.get(parameter.name)
        where = f"spec.parameters[{_wire(parameter.name)}]"
        if limit is None:
            has = ", ".join(_wire(name) for name in outer) or "none"
            raise InputError(where, None, f"the service's spec.tuning.parameters does not have it, but {has}")
        if parameter.bounds is not None and limit.bounds is not None:
            low, high = max(parameter.bounds[0], limit.bounds[0]), min(parameter.bounds[1], limit.bounds[1])
            if low > high:
                raise InputError(
                    where,
                    list(parameter.bounds),
                    f"within the service's {limit.bounds[0]} to {limit.bounds[1]}",
                )
            found.append(Parameter(parameter.name, bounds=(low, high)))
        else:
            choices = tuple(choice for choice in parameter.choices if choice in limit.choices)
            if not choices:
                raise InputError(
                    where, list(parameter.choices), f"among the service's {', '.join(limit.choices)}"
                )
            found.append(Parameter(parameter.name, choices=choices))
    return tuple(found)


def _wire(name: str) -> str:
    return next(wire for wire, field_name in FIELDS.items() if field_name == name)


def _parameters(listed: object) -> tuple[Parameter, ...]:
    found = []
    for item in listed if isinstance(listed, list) else ():
        name = FIELDS.get(item.get("name"))
        if name is None:
            continue  # of a later version
        if item.get("choices"):
            found.append(Parameter(name, choices=tuple(map(str, item["choices"]))))
        else:
            found.append(Parameter(name, bounds=(int(item["min"]), int(item["max"]))))
    return tuple(found)


def _applied(raw: object) -> Applied | None:
    if not isinstance(raw, Mapping):
        return None
    have, slash, wanted = str(raw.get("pods", "")).partition("/")
    if not (slash and have.isdecimal() and wanted.isdecimal() and isinstance(raw.get("generation"), int)):
        return None
    return Applied(raw["generation"], int(have), int(wanted))
