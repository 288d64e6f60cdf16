"""What came of a finished run, in one sentence for people. Pure; used by `plan.cluster` for the run's condition Ready."""

from __future__ import annotations

from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.plan.runs import kept_back

_LONGEST = 800  # characters of what the worker itself says
_WITHOUT_WINNER = {
    "KeptIncumbent": "nothing that was tried is surely better than what is in force",
    "RolledBack": "what was tried has been taken back",
    "Inconclusive": "the measurements do not decide, so what is in force stays",
    "Failed": "the run failed",
}


def sentence(service: InferenceService, run: TuningRun, refusal: str | None, *, newest: bool = True) -> str:
    """`refusal`: why its result, which is to be taken now, may not be. `newest`: no younger run has a result to take."""
    result = run.status.result
    if result is None or result.verdict is None:
        return ""
    said = (result.message or "").strip().partition("\n")[0]
    said = (
        said
        if len(said) <= _LONGEST
        else (said[: _LONGEST - 2].rpartition(" ")[0] or said[: _LONGEST - 2]) + " …"
    )
    return ": ".join(part for part in (_outcome(service, run, refusal, newest), said) if part)


def _outcome(service: InferenceService, run: TuningRun, refusal: str | None, newest: bool) -> str:
    result = run.status.result
    assert result is not None
    verdict = result.verdict or ""
    kept = kept_back(service, run)
    if kept == "":
        return _WITHOUT_WINNER.get(verdict, "it names no values to recommend")
    values = ", ".join(f"{name} {value}" for name, value in result.config.items())
    better = "would be better, by the simulation" if run.spec.evaluator == "Simulator" else "is better"
    if not newest:
        return f"{values} {better}, and is not taken: a younger run's result counts"
    if refusal is not None or kept is not None:
        return f"{values} {better}, and is not taken: {refusal or kept}"
    if service.spec.tuning.mode == "Apply":
        return f"{values} {better}, and is in force until somebody edits it"
    return f"{values} {better}, and is recommended: put it into spec.engine to have it in force"
