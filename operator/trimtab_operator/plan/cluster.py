"""One service in a cluster: (what is observed, now) → what to apply, to say to engines, and to write as status. Pure.

Two steps, because what engines answer belongs into the status: `decide` before acting, `conclude` after. Called by
`cluster.reconcile`, which does the rest; keeps nothing between calls, so a restarted operator goes on where the old one stood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trimtab_operator import names
from trimtab_operator.api import InferenceService, Recommendation, TuningRun
from trimtab_operator.api.status import LastRun, LiveValues, ServiceStatus
from trimtab_operator.errors import InvalidResource
from trimtab_operator.plan import (
    children,
    handover,
    live_push,
    loading,
    made_runs,
    nightly,
    pod_template,
    pods,
    quiet_times,
    rollout,
    run_account,
    runs,
    tuning_drift,
    workers,
)
from trimtab_operator.plan import live as plan_live
from trimtab_operator.plan import monitors as plan_monitors
from trimtab_operator.plan import shadow as plan_shadow
from trimtab_operator.plan.drift import digest
from trimtab_operator.plan.engine_flags import from_hub
from trimtab_operator.plan.live_record import CandidateNumber, LiveRecord, candidate_key, is_number, reach
from trimtab_operator.plan.look import Conclusion, Decision, Observed, Settings
from trimtab_operator.plan.manifests import Context, farewell_s, manifests
from trimtab_operator.plan.status import Facts, service_status

__all__ = ["Conclusion", "Decision", "Observed", "Settings", "conclude", "decide", "wants_to_act"]

Json = dict[str, Any]
_MAX_RENUMBERINGS = 3
TURN_RETRY_S = 5.0  # a run that waits for its turn; it is woken sooner when a place is given back


def decide(observed: Observed, settings: Settings, now: float, time: str) -> Decision:
    """See the module. `now` is Unix, `time` the same moment as RFC 3339."""
    service, spec = observed.service, observed.service.spec
    deployment = observed.child("Deployment", names.deployment(service.name))
    pods_are = pod_template.choose(service, observed.previous, deployment, settings.defaults)
    wanted_hash = pods_are.template_hash
    limits = spec.tuning.limits
    quiet = quiet_times.in_force(limits, now)
    recommendation, taken, refusal = _recommendation(observed, time, quiet)
    chosen = plan_live.effective(spec, recommendation, service.metadata.annotations, observed.fleet)
    superseded = chosen.why if chosen.superseded else None
    if superseded is not None:
        recommendation = None
    most = reach(int(read_back["highest_generation"]) for read_back in observed.read_backs.values())
    record = LiveRecord.of(observed.child("ConfigMap", names.live_config_map(service.name))).within(most)
    floor = record.highest
    desired = observed.previous.engine.desired
    if desired is not None and is_number(desired.generation) and desired.generation <= most:
        floor = max(floor, desired.generation)
    number, floor = _incumbent_number(record, chosen, floor)

    acting = runs.acting(observed.runs, now, service)
    offered, why_not = _offer(observed, acting, record, now, chosen.config)
    refusal = refusal or why_not
    shadow_plan = _shadow(observed, acting, pods_are.built.template, settings, now)
    if observed.waits is not None or shadow_plan.ended is not None:
        offered = None
    targets = frozenset[str]()
    if offered is not None and plan_shadow.asks_for(offered.run):
        targets = shadow_plan.pods & observed.read_backs.keys()
    elif offered is not None:
        targets = _targets(observed, record)

    renumbered: set[str] = set()
    fresh_candidate = False
    for _ in range(_MAX_RENUMBERINGS):
        incumbent = {"generation": number, "source": chosen.source, "config": chosen.config}
        candidate, floor = _candidate_number(service, record, offered, floor, fresh=fresh_candidate)
        trial = None
        if offered is not None and candidate is not None:
            document = {
                "generation": candidate.generation,
                "source": "Recommendation",
                "config": offered.config,
            }
            trial = live_push.Trial(document, offered.until_s)
        verdicts = {
            name: live_push.judge(read_back, incumbent, trial if name in targets else None, now)
            for name, read_back in observed.read_backs.items()
        }
        again = {name for name, v in verdicts.items() if v.renumber_incumbent or v.renumber_candidate}
        if not again:
            break
        floor = max(floor, *(int(observed.read_backs[name]["highest_generation"]) for name in again))
        others = {name for name in again if verdicts[name].renumber_incumbent}
        renumbered |= others
        if others:
            floor += 1
            number = floor
        fresh_candidate = True
    record = replace(record, highest=max(floor, number), candidate=candidate)

    replicas_for_now = _replicas_for_now(observed, wanted_hash)
    context = Context(
        resolved=pods_are.resolved,
        admin_public_key=settings.admin_public_key,
        operator_namespace=settings.operator_namespace,
        generation=number,
        recommendation=recommendation,
        surge=_surge(observed, settings, wanted_hash, now),
        replicas=replicas_for_now,
        template=pods_are.built.template,
        hub=settings.hub,
        fleet=observed.fleet,
    )
    wanted = manifests(service, context)
    for manifest in wanted:
        if manifest["kind"] == "ConfigMap":
            manifest["metadata"]["annotations"] = record.annotations()
        elif manifest["kind"] == "Deployment":
            manifest["metadata"]["annotations"] = pods_are.built.annotations()
    halt = plan_live.switch(service.metadata.annotations, observed.fleet)
    on_schedule = nightly.manifests(service, settings.tuner, halted=halt.state != "active")
    schedule = set(nightly.possible(service.name))
    return Decision(
        template_hash=wanted_hash,
        resolved=pods_are.resolved,
        upgrade_available=pods_are.upgrade_available,
        room_patience_s=settings.room_patience_s,
        changes=children.changes(
            service, wanted, {key: live for key, live in observed.children.items() if key not in schedule}
        ),
        monitors=plan_monitors.changes(service, observed.monitors),
        nightly=nightly.changes(service, on_schedule, observed.children),
        drift=tuning_drift.verdict(
            service, observed.previous, observed.slo, observed.runs, observed.fleet, now
        ),
        superfluous=made_runs.superfluous(observed.runs, service.spec.tuning.run_history_limit),
        incumbent=incumbent,
        trial=trial,
        targets=targets,
        calls={
            name: v.calls for name, v in verdicts.items() if v.calls and not _refused(observed, name, v.calls)
        },
        recommendation=recommendation,
        superseded=superseded,
        holds=handover.to_hold(
            observed.pods,
            spec.wanted_replicas if replicas_for_now is None else replicas_for_now,
            farewell_s(spec),
            now,
        ),
        renumbered=tuple(sorted(renumbered)),
        acting_run=acting,
        taken_run=taken,
        refusal=refusal,
        shadow=shadow_plan,
        quiet=quiet,
        border_s=quiet_times.next_begin_s(limits, now) if quiet is None else quiet.until_s,
        new_worker=acting if _may_begin(observed, acting, shadow_plan, now) else None,
        end_workers=(
            *workers.leftovers(observed.runs, observed.worker_pods, now).end,
            *run_account.outdated(observed, acting, settings.tuner, now),
        ),
    )


def conclude(observed: Observed, decision: Decision, now: float, time: str) -> Conclusion:
    """The status after acting. `observed` carries what was read after the calls, where something was said."""
    service = observed.service
    number = int(decision.incumbent["generation"])
    replicas = _replicas(observed)
    wanted = rollout.Desired.of(service.spec, decision.template_hash, number, decision.room_patience_s)
    actions = rollout.plan(wanted, replicas, now)
    last = actions[-1]
    assert isinstance(last, rollout.SetStatus), "a plan ends with its status"
    deployment = observed.child("Deployment", names.deployment(service.name))
    found = _with_deployment(last.status, deployment)
    facts = Facts(
        url=f"http://{names.service(service.name)}.{service.namespace}.svc:{service.spec.service.port}",
        desired=plan_live.live_values(decision.incumbent),
        applied=_applied(observed, replicas),
        recommendation=decision.recommendation,
        tuning_running=decision.acting_run is not None
        and observed.waits is None
        and run_account.worker(observed, decision.acting_run, now)[1] is None,
        quiet=decision.quiet,
        fleet=observed.fleet,
        slo=observed.slo,
        monitoring=plan_monitors.verdict(service, observed.monitors, decision.monitors),
        resolved=decision.resolved,
        upgrade_available=decision.upgrade_available,
        leaving_ready=sum(pods.is_ready(pod) for pod in observed.pods if pods.leaving(pod)),
        mode="cluster",
        nightly_problem=observed.nightly_problem or nightly.problem(decision.nightly),
        drift=observed.drift or decision.drift,
    )
    status = service_status(service, found, facts, observed.previous, time)
    if decision.taken_run is not None:
        status = _with_last_run(status, decision.taken_run, time)
    moments = [action.until_s for action in actions if isinstance(action, rollout.Wait)]
    if observed.waits is not None:
        moments.append(now + TURN_RETRY_S)
    if decision.border_s is not None:
        moments.append(decision.border_s)
    if decision.holds:
        moments.append(now + handover.RENEW_EVERY_S)
    if decision.drift is not None and decision.drift.look_again_s is not None:
        moments.append(decision.drift.look_again_s)
    moments += run_account.moments(observed, decision, now)
    if decision.trial is not None:
        moments.append(min(now + live_push.RENEW_EVERY_S, decision.trial.until_s))
    limits = (runs.deadline_s(run) for run in observed.runs if not run.judged and not run.deleting)
    moments += [limit for limit in limits if limit is not None and limit > now]
    if from_hub(service.spec) and any(pods.loads(pod) for pod in observed.pods):
        moments.append(now + loading.LOOK_EVERY_S)
    return Conclusion(status, min(moments, default=None), run_account.statuses(observed, decision, time))


# What the service shall run with


def _recommendation(
    observed: Observed, time: str, quiet: quiet_times.Quiet | None
) -> tuple[Recommendation | None, TuningRun | None, str | None]:
    """The recommendation that stands, the run that it was taken from just now, and why a result was not taken."""
    standing = observed.previous.tuning.recommendation
    try:
        halt = plan_live.switch(observed.service.metadata.annotations, observed.fleet)
        if halt.state != "active" or quiet is not None:
            return standing, None, None  # results wait
        found = runs.promotion(observed.service, observed.runs, time)
    except InvalidResource as error:
        return standing, None, _text(error)
    if found is None:
        return standing, None, None
    run, recommendation = found
    return recommendation or standing, run, None


def _incumbent_number(record: LiveRecord, chosen: plan_live.Effective, floor: int) -> tuple[int, int]:
    """(number of the incumbent, highest number given)."""
    document = record.document
    if document is not None and (document["config"], document["source"]) == (chosen.config, chosen.source):
        return int(document["generation"]), floor
    return floor + 1, floor + 1


def _offer(
    observed: Observed, acting: TuningRun | None, record: LiveRecord, now: float, incumbent: Json
) -> tuple[runs.Offer | None, str | None]:
    """The acting run's candidate over the live config that stands, if it may be tried, else why not."""
    if acting is None:
        return None, None
    try:
        offered = runs.offer(observed.service, acting, now, observed.fleet, incumbent)
    except InvalidResource as error:
        return None, _text(error)
    if offered is not None and _edited(observed.service, record, offered):
        return None, "spec was edited since this candidate was begun; the edit wins"
    limits = observed.service.spec.tuning.limits
    if offered is None or quiet_times.in_force(limits, now) is not None:
        return None, None
    # Engines end it themselves when a quiet time begins, whoever is away then.
    begin = quiet_times.next_begin_s(limits, now)
    return (offered if begin is None else replace(offered, until_s=min(offered.until_s, begin))), None


def wants_to_act(observed: Observed, now: float) -> TuningRun | None:
    """The run that may act now, as far as this service is concerned, by a candidate or a worker: the fleet may have no place for it."""
    record = LiveRecord.of(observed.child("ConfigMap", names.live_config_map(observed.service.name)))
    service = observed.service
    standing = plan_live.effective(
        service.spec, observed.previous.tuning.recommendation, service.metadata.annotations, observed.fleet
    )
    acting = runs.acting(observed.runs, now, service)
    offered, _ = _offer(observed, acting, record, now, standing.config)
    if offered is not None:
        return offered.run
    wants = run_account.works(observed, acting, now) or run_account.may_begin(observed, acting, now)
    return acting if wants else None


def _may_begin(
    observed: Observed, acting: TuningRun | None, shadow_plan: plan_shadow.Plan, now: float
) -> bool:
    """Whether a worker is to be made: what it measures has to be there."""
    if observed.waits is not None or not run_account.may_begin(observed, acting, now):
        return False
    ready = shadow_plan.waits is None and shadow_plan.ended is None and shadow_plan.engines is not None
    return ready or not plan_shadow.asks_for(acting)


def _basis(service: InferenceService) -> str:
    """Digest of everything of spec that a candidate rests on."""
    return digest({"basis": plan_live.basis(service.spec), "config": plan_live.spec_config(service.spec)})


def _key(offered: runs.Offer) -> str:
    assert offered.run.status.candidate is not None
    return candidate_key(offered.run.uid, offered.run.status.candidate)


def _edited(service: InferenceService, record: LiveRecord, offered: runs.Offer) -> bool:
    """Whether a person edited what this very candidate rests on, since it got its number."""
    known = record.candidate
    return known is not None and known.key == _key(offered) and known.basis != _basis(service)


def _candidate_number(
    service: InferenceService, record: LiveRecord, offered: runs.Offer | None, floor: int, *, fresh: bool
) -> tuple[CandidateNumber | None, int]:
    """(the candidate's number, highest number given). Without an offer the last one stays noted."""
    if offered is None:
        return record.candidate, floor
    key = _key(offered)
    if record.candidate is not None and record.candidate.key == key and not fresh:
        return record.candidate, floor
    return CandidateNumber(key, _basis(service), floor + 1), floor + 1


def _targets(observed: Observed, record: LiveRecord) -> frozenset[str]:
    """Pods that try a candidate: all that answer, or with mode Canary the first few, those that hold it already first."""
    tuning = observed.service.spec.tuning
    answering = [pod for pod in observed.pods if pod["metadata"]["name"] in observed.read_backs]
    if tuning.mode != "Canary":
        return frozenset(pod["metadata"]["name"] for pod in answering)
    number = record.candidate.generation if record.candidate is not None else None

    def order(pod: Mapping[str, Any]) -> tuple[bool, float, str]:
        name = pod["metadata"]["name"]
        trying = observed.read_backs[name].get("candidate") or {}
        holds = number is not None and trying.get("generation") == number
        return not holds, pods.unix(pod["metadata"].get("creationTimestamp")), name

    first = sorted(answering, key=order)[: tuning.limits.canary_pods]
    return frozenset(pod["metadata"]["name"] for pod in first)


def _shadow(
    observed: Observed, acting: TuningRun | None, template: Json, settings: Settings, now: float
) -> plan_shadow.Plan:
    """What to do about the engines of Shadow runs; they stand only while the run they belong to may act."""
    service = observed.service
    halted = plan_live.switch(service.metadata.annotations, observed.fleet).state != "active"
    quiet = quiet_times.in_force(service.spec.tuning.limits, now) is not None
    held = observed.waits is not None or halted or quiet
    goes_on = held or run_account.goes_on(observed, acting, now)
    run = acting if plan_shadow.asks_for(acting) and goes_on else None
    context = Context(operator_namespace=settings.operator_namespace, hub=settings.hub)
    replicas = {replica.name: replica for replica in _replicas(observed, observed.shadow.pods)}
    own = _replicas(observed)
    return plan_shadow.plan(service, run, observed.shadow, template, own, replicas, context, held=held)


def _refused(observed: Observed, pod: str, calls: tuple[live_push.Call, ...]) -> bool:
    """Whether the engine has said no to exactly this already; asking again gives the same answer."""
    refusal = observed.refusals.get(pod)
    first = calls[0]
    return (
        refusal is not None
        and isinstance(first, live_push.Push)
        and first.document["generation"] == refusal[0]
    )


# How the rollout stands


def _replicas(observed: Observed, listed: Sequence[Mapping[str, Any]] | None = None) -> list[rollout.Replica]:
    """Of `listed` pods, those of the service by default."""
    return [
        pods.replica(
            pod,
            observed.read_backs.get(name),
            observed.refusals.get(name, (None, ""))[0],
            loading=observed.loading.get(name),
            complaint=observed.complaints.get(name),
        )
        for pod in (observed.pods if listed is None else listed)
        if not pods.over(pod)
        for name in (pod["metadata"]["name"],)
    ]


def _surge(observed: Observed, settings: Settings, wanted_hash: str, now: float) -> int | None:
    """0 when strategy Auto has found no room, and then until the rollout is over: each further pod would wait in vain again."""
    spec = observed.service.spec
    if spec.rollout.strategy != "Auto":
        return None
    alive = [r for r in _replicas(observed) if r.phase != "Draining"]
    current = [r for r in alive if r.template_hash == wanted_hash]
    if rollout.no_room(current, now, settings.room_patience_s):
        # An old pod that leaves for nothing would be missed: the next one must fit into its place.
        mine, old = _by_template(observed, wanted_hash)
        return 0 if old and all(pods.fits_into_place_of(new, one) for new in mine for one in old) else None
    deployment = observed.child("Deployment", names.deployment(observed.service.name))
    pace = (deployment or {}).get("spec", {}).get("strategy", {}).get("rollingUpdate") or {}
    under_way = len(current) < len(alive) or not all(r.ready for r in current)
    return 0 if under_way and pace.get("maxSurge") == 0 else None


def _replicas_for_now(observed: Observed, wanted_hash: str) -> int | None:
    """0 while strategy Recreate waits for old pods to be gone: a Deployment would start new ones while they still finish."""
    if observed.service.spec.rollout.strategy != "Recreate":
        return None
    _, old = _by_template(observed, wanted_hash)
    return 0 if old else None


def _by_template(
    observed: Observed, wanted_hash: str
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """(pods of this template, pods of others), leaving ones included, but for those that have ended."""
    standing = [pod for pod in observed.pods if not pods.over(pod)]
    mine = [pod for pod in standing if pods.template_hash(pod) == wanted_hash]
    return mine, [pod for pod in standing if pods.template_hash(pod) != wanted_hash]


def _with_deployment(
    found: rollout.RolloutStatus, deployment: Mapping[str, Any] | None
) -> rollout.RolloutStatus:
    """What only the Deployment knows: pods that the API server does not let it create (quota, admission)."""
    status = (deployment or {}).get("status", {})
    if deployment is None or status.get("observedGeneration") != deployment["metadata"].get("generation"):
        return found
    listed = {c["type"]: c for c in status.get("conditions") or []}
    failure = listed.get("ReplicaFailure")
    if failure is None or failure["status"] != "True" or found.is_ready or found.stalled:
        return found
    late = listed.get("Progressing", {}).get("reason") == names.PROGRESS_DEADLINE_EXCEEDED
    return replace(
        found,
        reason=names.PODS_NOT_CREATED,
        message=str(failure.get("message", "")),
        stalled=late,
        progressing=not late,
    )


def _applied(observed: Observed, replicas: list[rollout.Replica]) -> LiveValues | None:
    """What every ready replica has in force; None while they differ or one has not said."""
    documents = [observed.read_backs.get(r.name, {}).get("in_force") for r in replicas if r.ready]
    first = documents[0] if documents else None
    if first is None or any(document != first for document in documents):
        return None
    return plan_live.live_values(first)


# What runs are told


def _with_last_run(status: ServiceStatus, run: TuningRun, time: str) -> ServiceStatus:
    verdict = (run.status.result.verdict if run.status.result else None) or ""
    return replace(status, tuning=replace(status.tuning, last_run=LastRun(run.name, verdict, time)))


def _text(error: InvalidResource) -> str:
    return "; ".join(map(str, error.errors))
