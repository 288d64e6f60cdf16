"""TuningRuns as the operator sees them: which candidate is to be tried now, and what a finished run leaves behind. Pure.

The run's job writes candidate, trials and result; the operator reads them, says in the run's status what it did, and never
believes a value that the service's owner has not allowed. Used by `plan.cluster`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_operator import conditions, names
from trimtab_operator.api import InferenceService, Recommendation
from trimtab_operator.api.status import Condition
from trimtab_operator.errors import Finding, InvalidResource
from trimtab_operator.plan import live as plan_live
from trimtab_operator.plan.pods import unix

Json = dict[str, Any]
_PROMOTING = ("Applied", "Recommended")
_FINISHED = ("Succeeded", "Failed", "Stopped")


@dataclass(frozen=True, slots=True)
class Run:
    """One TuningRun, as far as the operator reads it."""

    name: str
    uid: str
    generation: int
    created_s: float
    service: str
    evaluator: str
    phase: str
    deleting: bool
    candidate: Mapping[str, Any] | None
    result: Mapping[str, Any] | None
    trials: Sequence[Mapping[str, Any]]
    conditions: tuple[Condition, ...]
    status: Mapping[str, Any]

    @classmethod
    def parse(cls, resource: Mapping[str, Any]) -> Run:
        """From the resource; the API server has checked its shape."""
        metadata, status = resource["metadata"], resource.get("status") or {}
        listed = tuple(
            Condition(c["type"], c["status"], c["reason"], c.get("message", ""), c["lastTransitionTime"],
                      c.get("observedGeneration", 0))
            for c in status.get("conditions") or []
        )  # fmt: skip
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            generation=metadata["generation"],
            created_s=unix(metadata.get("creationTimestamp")),
            service=resource["spec"]["service"],
            evaluator=resource["spec"].get("evaluator", "Live"),
            phase=status.get("phase", ""),
            deleting=metadata.get("deletionTimestamp") is not None,
            candidate=status.get("candidate"),
            result=status.get("result"),
            trials=status.get("trials") or (),
            conditions=listed,
            status=status,
        )

    @property
    def finished(self) -> bool:
        """Whether its result is there."""
        return bool(self.result and self.result.get("verdict"))

    @property
    def until_s(self) -> float:
        """End of the candidate as its job wants it, Unix; 0 without one."""
        return unix(self.candidate.get("until")) if self.candidate else 0.0


@dataclass(frozen=True, slots=True)
class Offer:
    """A candidate that may be tried: a whole live config, until a Unix time, for one run."""

    run: Run
    config: Json
    until_s: float


def acting(runs: Sequence[Run]) -> Run | None:
    """The one run that may act on a service: the oldest one that is neither finished nor going away."""
    alive = [run for run in runs if not run.deleting and not run.finished and run.phase not in _FINISHED]
    return min(alive, key=lambda run: (run.created_s, run.name), default=None)


def offer(service: InferenceService, run: Run, now: float) -> Offer | None:
    """What `run` wants tried now; None when nothing. Raises InvalidResource when it may not, saying why."""
    if run.candidate is None or run.until_s <= now:
        return None
    findings: list[Finding] = []
    state = plan_live.tuning_state(service.metadata.annotations)
    if run.evaluator != "Live":
        findings.append(
            Finding("spec.evaluator", run.evaluator, "Live, to try a candidate on running engines")
        )
    if state != "active":
        findings.append(Finding(f"annotation {names.ANNOTATION_TUNING}", state, "active, to try a candidate"))
    if service.spec.tuning.mode not in ("Canary", "Apply"):
        findings.append(
            Finding("spec.tuning.mode", service.spec.tuning.mode, "Canary or Apply, to try a candidate")
        )
    if findings:
        raise InvalidResource(findings, "the candidate")
    standing = plan_live.spec_config(service.spec)
    values = _values(run.candidate["config"])
    chosen = plan_live.recommend(service.spec, values).values
    return Offer(
        run, {**standing, **{plan_live.WIRE[name]: value for name, value in chosen.items()}}, run.until_s
    )


def promotion(
    service: InferenceService, runs: Sequence[Run], time: str
) -> tuple[Run, Recommendation | None] | None:
    """The newest run whose result the operator has not yet taken, and its recommendation, if it is one.

    Raises InvalidResource when the result leaves the service's bounds.
    """
    fresh = [run for run in runs if run.finished and not run.deleting and run.phase not in _FINISHED]
    if not fresh:
        return None
    run = max(fresh, key=lambda found: (found.created_s, found.name))
    assert run.result is not None
    winner = run.result.get("config")
    if run.result["verdict"] not in _PROMOTING or not winner:
        return run, None
    if service.spec.tuning.mode not in ("Recommend", "Apply"):
        return run, None
    return run, plan_live.recommend(service.spec, _values(winner), run.name, time)


def run_status(
    run: Run,
    *,
    acts: bool,
    refusal: str | None,
    missing: bool,
    applied: Mapping[str, Any] | None,
    incumbent: Mapping[str, Any] | None,
    now: str,
) -> Json:
    """The operator's part of a run's status; `applied` is {generation, pods, until} of its candidate, when it is in force."""
    phase = _phase(run, acts)
    wanted = _conditions(run, phase, refusal, missing)
    status: Json = {
        "observedGeneration": run.generation,
        "phase": phase,
        "conditions": [
            {
                "type": c.type,
                "status": c.status,
                "reason": c.reason,
                "message": c.message,
                "lastTransitionTime": c.last_transition_time,
                "observedGeneration": c.observed_generation,
            }
            for c in conditions.merge(run.conditions, wanted, now)
        ],
        "summary": {
            "trials": sum(trial.get("state") != "Running" for trial in run.trials),
            "candidate": _short(run.candidate["config"], incumbent) if applied and run.candidate else "-",
        },
    }
    # A finished run keeps what its engines ran when it ended.
    kept = (run.status.get("summary") or {}).get("incumbent") if phase in _FINISHED else None
    if kept or incumbent is not None:
        status["summary"]["incumbent"] = kept or _short({}, incumbent)
    if applied:
        status["applied"] = dict(applied)
    return status


def _values(config: Mapping[str, Any]) -> Json:
    """Values by field name of spec.engine → by key of the engine's live config; unknown names stay, to be refused by name."""
    return {plan_live.WIRE.get(name, name): value for name, value in config.items()}


def _phase(run: Run, acts: bool) -> str:
    if run.phase in _FINISHED:
        return run.phase
    if run.finished:
        assert run.result is not None
        return "Failed" if run.result["verdict"] == "Failed" else "Succeeded"
    return "Running" if acts and (run.candidate or run.trials) else "Pending"


def _conditions(run: Run, phase: str, refusal: str | None, missing: bool) -> list[Condition]:
    def made(kind: str, status: bool, reason: str, message: str) -> Condition:
        return Condition(kind, str(status), reason, message, observed_generation=run.generation)

    if phase in _FINISHED:
        verdict = str((run.result or {}).get("verdict", phase))
        return [
            made(names.READY, phase == "Succeeded", verdict, ""),
            made(names.RECONCILING, False, names.UP_TO_DATE, ""),
            made(names.STALLED, phase != "Succeeded", verdict, ""),
        ]
    if missing or refusal is not None:
        reason = names.SERVICE_NOT_FOUND if missing else names.CANDIDATE_REFUSED
        message = refusal or f'there is no InferenceService "{run.service}" in this namespace'
        return [
            made(names.READY, False, reason, message),
            made(names.RECONCILING, False, reason, message),
            made(names.STALLED, True, reason, message),
        ]
    return [
        made(names.READY, False, phase, ""),
        made(names.RECONCILING, True, phase, ""),
        made(names.STALLED, False, names.AS_EXPECTED, ""),
    ]


def _short(values: Mapping[str, Any], document: Mapping[str, Any] | None) -> str:
    """`2048/fcfs`: budget and policy of `values`, filled up from a live document."""
    config = document["config"] if document is not None else {}
    budget = values.get("maxNumBatchedTokens", config.get("max_num_batched_tokens", "?"))
    policy = values.get("schedulingPolicy", config.get("scheduling_policy", "?"))
    return f"{budget}/{policy}"
