"""What a look at a service says to its runs: how the acting one and its worker are, why others wait, and what came of results. Pure.

Between `runs` and `workers`, which know one run each, and `cluster`, which knows the service; used by the latter alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trimtab_operator import names
from trimtab_operator.api import TuningRun
from trimtab_operator.api.run import AppliedCandidate
from trimtab_operator.plan import live as plan_live
from trimtab_operator.plan import pods, quiet_times, runs, shadow, verdicts, worker_job, workers
from trimtab_operator.plan.look import Decision, Observed
from trimtab_operator.plan.tuner_pod import Tuner

Json = dict[str, Any]
_PROBLEM_RETRY_S = 30.0  # of a worker that may not be made: rights and foreign objects are not watched


def worker(
    observed: Observed, run: TuningRun | None, now: float
) -> tuple[workers.Account, workers.Obstacle | None]:
    """How the acting run's worker is, and what keeps it, or its making, from going on."""
    if run is None or not workers.wanted(run):
        return workers.Account(), None
    account = workers.judge(run, observed.workers.get(run.name, workers.Worker()))
    if account.state != "none":
        return account, observed.worker_problem or account.obstacle
    ready = sum(pods.admin_reachable(pod) for pod in observed.pods)
    quiet = quiet_times.in_force(observed.service.spec.tuning.limits, now)
    why_not = workers.obstacle(observed.service, run, observed.fleet, ready, quiet)
    return account, observed.worker_problem or why_not


def may_begin(observed: Observed, run: TuningRun | None, now: float) -> bool:
    """Whether a worker is wanted that is not there, and nothing of the service's own is in its way."""
    if run is None or not workers.wanted(run):
        return False
    account, why_not = worker(observed, run, now)
    return account.state == "none" and why_not is None


def works(observed: Observed, run: TuningRun | None, now: float) -> bool:
    """Whether the run has a worker that is not over."""
    return worker(observed, run, now)[0].state in ("starting", "running")


def outdated(observed: Observed, run: TuningRun | None, tuner: Tuner, now: float) -> tuple[str, ...]:
    """The run whose worker does not get to start, and would be made otherwise now: what keeps it may have been mended."""
    account, _ = worker(observed, run, now)
    if run is None or not account.stuck:
        return ()
    job = observed.workers[run.name].job or {}
    mark = (job["metadata"].get("annotations") or {}).get(names.ANNOTATION_WORKER_SETTINGS)
    return () if mark in (None, worker_job.settings_mark(observed.service, tuner)) else (run.name,)


def goes_on(observed: Observed, run: TuningRun | None, now: float) -> bool:
    """Whether the run has a worker that is not over, may have one, or wants none of ours."""
    if run is None:
        return False
    return not workers.wanted(run) or works(observed, run, now) or may_begin(observed, run, now)


def moments(observed: Observed, decision: Decision, now: float) -> list[float]:
    """When something about workers is to be looked at that no watch may show, Unix."""
    account, _ = worker(observed, decision.acting_run, now)
    found = [now + workers.JOB_RETRY_S] if account.look_again else []
    parting = workers.leftovers(observed.runs, observed.worker_pods, now).next_s
    found += [] if parting is None else [parting]
    if observed.worker_problem is not None:
        found.append(now + (_PROBLEM_RETRY_S if observed.worker_problem.stalled else workers.JOB_RETRY_S))
    return found + [now + pods.CREATING_PATIENCE_S for pod in observed.worker_pods if pods.creating(pod)]


def statuses(observed: Observed, decision: Decision, time: str) -> dict[str, Json]:
    """The operator's part of each run's status, by name."""
    found = {run.name: runs.invalid_run_status(run, time) for run in observed.invalid_runs}
    halt = plan_live.switch(observed.service.metadata.annotations, observed.fleet)
    for run in observed.runs:
        if run.deleting:
            continue
        acts = decision.acting_run is not None and run.uid == decision.acting_run.uid
        account, obstacle = worker(observed, run if acts else None, pods.unix(time))
        if acts and shadow.asks_for(run):
            obstacle = _engines(observed, decision) or obstacle
            account = replace(account, since=account.since or observed.shadow.since(run))
        waits = None
        if acts and observed.waits is not None:
            waits = (names.WAITING_FOR_TURN, observed.waits)
        elif run.judged and halt.state != "active":
            waits = (names.TUNING_PAUSED, f"{halt.by} is {halt.state}; the result is taken afterwards")
        elif run.judged and decision.quiet is not None:
            waits = (names.QUIET_TIME, f"{decision.quiet}; the result is taken afterwards")
        elif acts and decision.quiet is not None:
            waits = (names.QUIET_TIME, f"{decision.quiet}; nothing is started or tried before its end")
        found[run.name] = runs.run_status(
            run,
            acts=acts,
            refusal=decision.refusal if acts else None,
            applied=_trial_in_force(observed, decision) if acts else None,
            incumbent=decision.incumbent,
            now=time,
            waits=waits,
            worker=account,
            obstacle=obstacle if acts else _behind(observed, decision, run),
            outcome=_outcome(observed, decision, run),
            ended=decision.shadow.ended if acts else None,
        )
    return found


def _engines(observed: Observed, decision: Decision) -> workers.Obstacle | None:
    """What keeps the acting run's own engines from being there."""
    plan = decision.shadow
    if plan.changes.taken:
        return workers.Obstacle(names.NAME_TAKEN, "; ".join(map(str, plan.changes.taken)), stalled=True)
    if observed.shadow_problem is not None:
        return workers.Obstacle(*observed.shadow_problem, stalled=True)
    return None if plan.waits is None else workers.Obstacle(*plan.waits)


def _behind(observed: Observed, decision: Decision, run: TuningRun) -> workers.Obstacle | None:
    """Why a run that is not over does not act."""
    findings = workers.not_allowed(observed.service, run)
    if findings:
        return workers.Obstacle(names.NOT_ALLOWED_BY_SERVICE, "; ".join(map(str, findings)), stalled=True)
    first = decision.acting_run
    return (
        None
        if first is None
        else workers.Obstacle(names.WAITING_FOR_RUN, f"run {first.name} of this service comes first")
    )


def _outcome(observed: Observed, decision: Decision, run: TuningRun) -> str:
    """What comes of a run's result now."""
    taken = decision.taken_run is not None and decision.taken_run.uid == run.uid
    newest = runs.newest_result(observed.runs) is run
    return verdicts.sentence(observed.service, run, None if taken else decision.refusal, newest=newest)


def _trial_in_force(observed: Observed, decision: Decision) -> AppliedCandidate | None:
    trial = decision.trial
    if trial is None:
        return None
    number = trial.document["generation"]
    leases = [
        float(candidate["until"])
        for name in decision.targets
        if (candidate := observed.read_backs.get(name, {}).get("candidate")) is not None
        and candidate["generation"] == number
    ]
    until = pods.rfc3339(max(leases)) if leases else None
    own = shadow.asks_for(decision.acting_run)
    meant = decision.shadow.size if own else len(decision.targets)
    return AppliedCandidate(number, f"{len(leases)}/{meant}", until)
