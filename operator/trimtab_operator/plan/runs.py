"""TuningRuns as the operator sees them: which candidate is to be tried now, and what a finished run leaves behind. Pure.

The run's worker writes candidate, trials and result; the operator reads them, says in the run's status what it did, and never
believes a value that the service's owner has not allowed. Used by `plan.cluster`; workers themselves are `workers`' business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trimtab_operator import conditions, names, support
from trimtab_operator.api import InferenceService, InvalidRun, Recommendation, RunStatus, TuningRun
from trimtab_operator.api.run import AppliedCandidate, Result, RunSummary
from trimtab_operator.api.status import Condition
from trimtab_operator.errors import Finding, InvalidResource
from trimtab_operator.plan import live as plan_live
from trimtab_operator.plan import workers
from trimtab_operator.plan.pods import unix
from trimtab_operator.plan.workers import Account, Obstacle
from trimtab_operator.quantities import format_duration

Json = dict[str, Any]
_PROMOTING = ("Applied", "Recommended")
FINISHED = workers.FINISHED
_P99_ITL, _LONGEST_S = "p99ItlSeconds", 1e6  # as a worker writes it; whatever else stands there is no latency


def created_s(run: TuningRun) -> float:
    """When it was created, Unix."""
    return unix(run.metadata.creation_timestamp)


def until_s(run: TuningRun) -> float:
    """End of the candidate as its job wants it, and its time limit at the latest, Unix; 0 without a candidate."""
    candidate, limit = run.status.candidate, deadline_s(run)
    if candidate is None:
        return 0.0
    return unix(candidate.until) if limit is None else min(unix(candidate.until), limit)


def deadline_s(run: TuningRun) -> float | None:
    """When its time limit is over, Unix; None before it began."""
    began = run.status.start_time
    return None if began is None else unix(began) + run.spec.time_limit_s


def _overdue(run: TuningRun, now: float) -> bool:
    limit = deadline_s(run)
    return limit is not None and limit <= now and not run.judged


@dataclass(frozen=True, slots=True)
class Offer:
    """A candidate that may be tried: a whole live config, until a Unix time, for one run."""

    run: TuningRun
    config: Json
    until_s: float


def acting(
    runs: Sequence[TuningRun], now: float, service: InferenceService | None = None
) -> TuningRun | None:
    """The one run that may act on a service: of those that can be carried out and are neither over nor going away the one that has a
    worker, else the oldest. With `service`, none that the service rules out."""
    alive = [
        run
        for run in runs
        if not run.deleting
        and not run.judged
        and run.status.phase not in FINISHED
        and not _overdue(run, now)
        and not (service is not None and workers.not_allowed(service, run))
    ]
    return min(alive, key=lambda run: (not begun(run), created_s(run), run.name), default=None)


def begun(run: TuningRun) -> bool:
    """Whether a worker was made for it."""
    return workers.wanted(run) and run.status.start_time is not None


def offer(
    service: InferenceService,
    run: TuningRun,
    now: float,
    fleet: plan_live.Switch = plan_live.ACTIVE,
    incumbent: Mapping[str, Any] | None = None,
) -> Offer | None:
    """What `run` wants tried now; None when nothing. Raises InvalidResource when it may not, saying why. `incumbent` is the live
    config that stands where it is not spec's: a candidate keeps what it does not turn."""
    candidate = run.status.candidate
    if candidate is None or until_s(run) <= now:
        return None
    standing = incumbent or plan_live.spec_config(service.spec)
    findings = _tuning_findings(service, run, fleet) + _run_findings(run, standing)
    if findings:
        raise InvalidResource(findings, "the candidate")
    _judged(service, candidate.config, "status.candidate")
    wanted = {plan_live.WIRE.get(name, name): value for name, value in candidate.config.items()}
    return Offer(run, {**standing, **wanted}, until_s(run))


def _tuning_findings(service: InferenceService, run: TuningRun, fleet: plan_live.Switch) -> list[Finding]:
    """Why nothing may be tried on the service, or on engines of the run's own, now."""
    tuning, theirs, findings = service.spec.tuning, workers.path_in(service), []
    halt = plan_live.switch(service.metadata.annotations, fleet)
    if halt.state != "active":
        findings.append(Finding(halt.by, halt.state, "active, to try a candidate"))
    if run.spec.evaluator == "Shadow":
        if tuning.mode == "Off":
            findings.append(Finding(f"{theirs}.mode", "Off", "any other, to try a candidate"))
    elif tuning.mode not in ("Canary", "Apply"):
        findings.append(Finding(f"{theirs}.mode", tuning.mode, "Canary or Apply, to try a candidate"))
    return findings


def _run_findings(run: TuningRun, standing: Mapping[str, Any]) -> list[Finding]:
    """How the candidate leaves what the run itself is allowed."""
    candidate, findings = run.status.candidate, []
    assert candidate is not None
    if run.spec.evaluator == "Simulator":
        allowed = "Live, to try a candidate on engines; what is simulated touches none"
        findings.append(Finding("the run's spec.evaluator", run.spec.evaluator, allowed))
    if candidate.trial is not None and candidate.trial >= run.spec.max_trials:
        allowed = f"below the run's spec.maxTrials ({run.spec.max_trials}), counted from 0"
        findings.append(Finding("status.candidate.trial", candidate.trial, allowed))
    for name, value in candidate.config.items() if run.spec.parameters else ():
        parameter, where = run.spec.parameter(name), f"status.candidate.config.{name}"
        if name in plan_live.WIRE and value == standing[plan_live.WIRE[name]]:
            continue
        if parameter is None:
            findings.append(
                Finding(where, value, f"as the service has it: the run's spec.parameters has no {name}")
            )
        elif not parameter.allows(value):
            findings.append(Finding(where, value, f"{parameter.range_text()}, by the run's spec.parameters"))
    return findings


def promotion(
    service: InferenceService, runs: Sequence[TuningRun], time: str
) -> tuple[TuningRun, Recommendation | None] | None:
    """The newest run whose result the operator has not yet taken, and its recommendation, if it is one.

    Raises InvalidResource when the result leaves the service's bounds.
    """
    run = newest_result(runs)
    if run is None:
        return None
    result = run.status.result
    assert result is not None
    if kept_back(service, run) is not None:
        return run, None
    found = _judged(service, result.config, "status.result", run.name, time)
    # What was only simulated is never applied to engines, not even when the mode is changed later.
    return run, replace(found, simulated=True) if run.spec.evaluator == "Simulator" else found


def newest_result(runs: Sequence[TuningRun]) -> TuningRun | None:
    """Of those whose result the operator has not yet taken the youngest."""
    fresh = [run for run in runs if run.judged and not run.deleting and run.status.phase not in FINISHED]
    return max(fresh, key=lambda found: (created_s(found), found.name), default=None)


def kept_back(service: InferenceService, run: TuningRun) -> str | None:
    """Why the run's result becomes no recommendation; None when it does. Empty: it holds nothing to recommend."""
    result, mode = run.status.result, service.spec.tuning.mode
    if result is None or result.verdict not in _PROMOTING or not result.config:
        return ""
    if mode not in ("Recommend", "Apply"):
        return f"spec.tuning.mode is {mode}"
    if run.spec.evaluator == "Simulator" and mode == "Apply":
        return "spec.tuning.mode is Apply, and what was only simulated is never applied"
    return None


def run_status(
    run: TuningRun,
    *,
    acts: bool,
    refusal: str | None,
    now: str,
    applied: AppliedCandidate | None = None,
    incumbent: Mapping[str, Any] | None = None,
    unserved: str | None = None,
    waits: tuple[str, str] | None = None,
    worker: Account = Account(),  # noqa: B008  it is frozen
    obstacle: Obstacle | None = None,
    outcome: str = "",
    ended: tuple[str, str] | None = None,
) -> Json:
    """The operator's part of a run's status; `applied` says what came of its candidate, when it is in force. `unserved` says
    why nothing is done for its service; `waits` is (reason, message) of what its candidate, or its result, waits for; `obstacle` keeps
    it, or its worker, from beginning; `outcome` is what came of its result, in a sentence; `ended` is (reason, message) of what stops
    it before it has one."""
    # The result of a run whose service has to be mended first is taken, and judged, afterwards.
    held = waits is not None or unserved not in (None, names.SERVICE_NOT_FOUND)
    phase = _phase(run, acts and waits is None, unix(now), worker, held=held)
    if unserved == names.SERVICE_NOT_FOUND:
        outcome = _no_service(run)
    if ended is not None and not run.judged and phase not in FINISHED:
        phase = "Stopped"
    candidate = run.status.candidate
    wanted = _conditions(
        run, phase, _End(worker, outcome, ended), refusal, unserved, unix(now), waits, obstacle
    )
    # A finished run keeps what its engines ran when it ended.
    kept = run.status.summary.incumbent if phase in FINISHED else None
    pruned = tuple(sorted(trial.number for trial in run.status.trials if trial.state == "Pruned"))
    status = RunStatus(
        observed_generation=run.metadata.generation,
        phase=phase,
        start_time=run.status.start_time or worker.since or (now if phase == "Running" else None),
        conditions=conditions.merge(run.status.conditions, wanted, now),
        applied=applied,
        pruned=run.status.pruned if run.status.phase in FINISHED else pruned,
        summary=RunSummary(
            trials=sum(trial.state != "Running" for trial in run.status.trials),
            incumbent=kept or (None if incumbent is None else _short({}, incumbent)),
            candidate=_short(candidate.config, incumbent) if applied and candidate else "-",
            p99_itl=_p99_itl(run.status.result),
        ),
    )
    return status.to_json()


def invalid_run_status(run: InvalidRun, now: str) -> Json:
    """The status of a run that cannot be read as it is written: Stalled with every finding. Spec and name never change, so a wrong
    one has failed for good."""
    message = "; ".join(map(str, run.findings))
    generation, written = run.metadata.generation, run.raw.get("status") or {}
    spoiled = any(finding.path.startswith(("spec", "metadata.name")) for finding in run.findings)
    return RunStatus(
        observed_generation=generation,
        phase="Failed" if spoiled else "Pending",
        conditions=conditions.merge(run.conditions, _stopped(generation, names.INVALID_SPEC, message), now),
        pruned=tuple(written.get("pruned") or ()),
        summary=RunSummary(candidate="-"),
    ).to_json()


def _judged(
    service: InferenceService,
    config: Mapping[str, Any],
    where: str,
    run: str | None = None,
    time: str | None = None,
) -> Recommendation:
    """What a run says by field name of spec.engine; raises InvalidResource with the paths of the run, under `where`."""
    known = {**plan_live.WIRE, **{key: key for key in plan_live.WIRE.values()}}
    unknown = [
        Finding(f"{where}.config.{name}", value, f"known fields are {', '.join(plan_live.WIRE)}")
        for name, value in config.items()
        if name not in known
    ]
    if unknown:
        raise InvalidResource(unknown, where)
    values = {known[name]: value for name, value in config.items()}
    try:
        return plan_live.recommend(service.spec, values, run, time)
    except InvalidResource as error:
        written = {f"config.{key}": f"config.{name}" for name, key in plan_live.WIRE.items()}
        findings = [
            Finding(f"{where}.{written.get(f.path, f.path)}", f.value, f.allowed) for f in error.errors
        ]
        raise InvalidResource(findings, error.what) from error


def _phase(run: TuningRun, acts: bool, now: float, worker: Account, *, held: bool) -> str:
    if run.status.phase in FINISHED:
        return run.status.phase
    if held and run.judged:
        return run.status.phase or "Running"  # its result is not taken yet
    if run.judged:
        assert run.status.result is not None
        return "Failed" if run.status.result.verdict == "Failed" else "Succeeded"
    if _overdue(run, now):
        return "Stopped"
    if worker.state == "failed":
        return "Failed"
    works = run.status.candidate or run.status.trials or worker.state == "running"
    return "Running" if acts and works else "Pending"


@dataclass(frozen=True, slots=True)
class _End:
    """What a run's end is told from."""

    worker: Account
    outcome: str
    stopped: tuple[str, str] | None = None

    def of(self, run: TuningRun, now: float) -> tuple[str, str]:
        """Reason and message. A run that was over before keeps what was said then: its worker's traces go sooner than it does."""
        said = next((c for c in run.status.conditions if c.type == names.READY), None)
        if run.status.phase in FINISHED and said is not None:
            return said.reason, said.message
        if run.judged:
            assert run.status.result is not None
            return run.status.result.verdict or "", self.outcome
        if _overdue(run, now):
            message = f"spec.timeLimit ({format_duration(run.spec.time_limit_s)}) is over without a result"
            # What it could not go on for is no less true now, and nobody can look at its worker any more.
            if said is not None and said.message and (said.reason, said.message) not in _usual(run):
                message += f"; until then {said.message}"
            return names.TIME_LIMIT_REACHED, message
        if self.worker.state == "failed":
            return names.WORKER_FAILED, f"its worker failed: {self.worker.failure}"
        return self.stopped or (run.status.phase, "")


def _conditions(
    run: TuningRun,
    phase: str,
    end: _End,
    refusal: str | None,
    unserved: str | None,
    now: float,
    waits: tuple[str, str] | None,
    obstacle: Obstacle | None,
) -> list[Condition]:
    generation = run.metadata.generation
    if phase in FINISHED:
        verdict, message = end.of(run, now)
        good = phase == "Succeeded"
        return [
            _made(generation, names.READY, good, verdict, message),
            _made(generation, names.RECONCILING, False, names.UP_TO_DATE, ""),
            _made(generation, names.STALLED, not good, verdict, "" if good else message),
        ]
    if unserved == names.SERVICE_NOT_FOUND:
        return _stopped(generation, names.SERVICE_NOT_FOUND, _no_service(run))
    if unserved is not None:
        message = f"{unserved}; the result is taken afterwards" if run.judged else unserved
        return _stopped(generation, names.SERVICE_NOT_SERVED, message)
    if obstacle is not None and obstacle.stalled:
        return _stopped(generation, obstacle.reason, obstacle.message)
    if refusal is not None:
        return _stopped(generation, names.CANDIDATE_REFUSED, refusal)
    reason, message = waits or _progress(run, phase, obstacle)
    return [
        _made(generation, names.READY, False, reason, message),
        _made(generation, names.RECONCILING, True, reason, message),
        _made(generation, names.STALLED, False, names.AS_EXPECTED, ""),
    ]


def _progress(run: TuningRun, phase: str, obstacle: Obstacle | None) -> tuple[str, str]:
    """Reason and message of a run that is on its way."""
    if obstacle is not None:
        # A worker that starts once more is no step back for its run.
        return phase if obstacle.reason == "Pending" else obstacle.reason, obstacle.message
    if phase == "Running":
        told = f"kubectl logs job/{names.worker(run.name)} has each measurement"
        return phase, told if workers.wanted(run) else ""
    return phase, "its worker starts" if workers.wanted(run) else support.NO_WORKER


def _usual(run: TuningRun) -> tuple[tuple[str, str], ...]:
    """What is said of a run that nothing keeps from going on."""
    return _progress(run, "Pending", None), _progress(run, "Running", None)


def _no_service(run: TuningRun) -> str:
    return f'there is no InferenceService "{run.spec.service}" in this namespace'


def _stopped(generation: int, reason: str, message: str) -> list[Condition]:
    return [
        _made(generation, names.READY, False, reason, message),
        _made(generation, names.RECONCILING, False, reason, message),
        _made(generation, names.STALLED, True, reason, message),
    ]


def _made(generation: int, kind: str, status: bool, reason: str, message: str) -> Condition:
    return Condition(kind, str(status), reason, message, observed_generation=generation)


def _p99_itl(result: Result | None) -> str | None:
    """`1530ms → 210ms`: before and after, as far as the result has them."""
    if result is None:
        return None
    shown = [
        _latency(seconds)
        for numbers in (result.before, result.after)
        if isinstance(seconds := numbers.get(_P99_ITL), int | float) and 0 <= seconds < _LONGEST_S
    ]
    return " → ".join(shown) or None


def _latency(seconds: float) -> str:
    """Three digits at least, and whole seconds of a stall in seconds."""
    if seconds >= 9.9995:
        return f"{seconds:.1f}s"
    return f"{seconds * 1000:.3g}ms" if seconds < 0.0995 else f"{seconds * 1000:.0f}ms"


def _short(values: Mapping[str, Any], document: Mapping[str, Any] | None) -> str:
    """`2048/fcfs`: budget and policy of `values`, filled up from a live document."""
    config = document["config"] if document is not None else {}
    budget = values.get("maxNumBatchedTokens", config.get("max_num_batched_tokens", "?"))
    policy = values.get("schedulingPolicy", config.get("scheduling_policy", "?"))
    return f"{budget}/{policy}"
