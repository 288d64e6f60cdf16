"""What the operator makes of a run's worker: when one may start, what is said of it, and when it has to go."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from support.pods import T0, moment, terminated, waiting
from support.services import BUDGET_PARAMETER, resource, run_resource
from trimtab_operator import names, schema
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.api.service import ImagePullSecret
from trimtab_operator.plan import cluster, runs, verdicts, worker_job, workers
from trimtab_operator.plan.live import Switch, effective
from trimtab_operator.plan.pods import rfc3339
from trimtab_operator.plan.tuner_pod import Tuner
from trimtab_operator.plan.workers import Account, Obstacle, Worker

Json = dict[str, Any]
NOW = T0 + 100
ACTIVE, PAUSED = Switch(), Switch("paused", "the fleet")
QUOTA = "exceeded quota: pods=2"


def service(
    mode: str = "Apply", extra: int = 0, annotations: Json | None = None, quiet: Json | None = None
) -> InferenceService:
    limits = {"extraReplicas": extra, "notDuring": [quiet] if quiet else []}
    given = resource(tuning={"mode": mode, "parameters": [BUDGET_PARAMETER], "limits": limits})
    given["metadata"] = {"name": "chat", "namespace": "default", "uid": "u", "annotations": annotations or {}}
    return schema.parse_service(given)


def run(name: str = "chat-1", status: Json | None = None, *, created: float = 0, **spec: Any) -> TuningRun:
    given = run_resource(**spec)
    given["metadata"] = {"name": name, "namespace": "default", "uid": f"uid-{name}", "generation": 1,
                         "creationTimestamp": moment(created)}  # fmt: skip
    given["status"] = status or {}
    return schema.parse_run(given)


def job(*conditions: str, owner: str = "uid-chat-1", kind: str = names.RUN_KIND) -> Json:
    listed = [
        {"type": c, "status": "True", "reason": "BackoffLimitExceeded", "message": "thrice"}
        for c in conditions
    ]
    owners = [
        {"apiVersion": names.API_VERSION, "kind": kind, "name": "chat-1", "uid": owner, "controller": True}
    ]
    metadata = {
        "name": "chat-1-worker",
        "uid": "uid-job",
        "ownerReferences": owners,
        "creationTimestamp": moment(5),
    }
    return {"kind": "Job", "metadata": metadata, "status": {"conditions": listed}}


def pod(
    state: Json | None = None,
    phase: str = "Pending",
    *,
    of: str = "uid-job",
    unschedulable: bool = False,
    resources: Json | None = None,
    made: float = 6,
    **status_fields: str,
) -> Json:
    """A pod of the Job; without a state its container is being created."""
    placed = {"type": "PodScheduled", "status": str(not unschedulable), "reason": "Unschedulable" if unschedulable else "",
              "message": "0/2 nodes are available: 2 Insufficient cpu." if unschedulable else ""}  # fmt: skip
    status: Json = {"phase": phase, "conditions": [placed], **status_fields}
    if not unschedulable and not status_fields:
        now = state or waiting("ContainerCreating")
        status["containerStatuses"] = [{"name": names.WORKER_CONTAINER, "image": "tuner:1", "state": now}]
    labels = {names.LABEL_COMPONENT: names.WORKER_COMPONENT, names.LABEL_RUN: "chat-1"}
    metadata = {
        "name": "chat-1-worker-x",
        "labels": labels,
        "creationTimestamp": moment(made),
        "ownerReferences": [{"uid": of, "controller": True}],
    }
    spec = {"containers": [{"name": names.WORKER_CONTAINER, "resources": resources or {}}]}
    return {"metadata": metadata, "spec": spec, "status": status}


RUNNING = pod({"running": {"startedAt": moment(6)}}, "Running")
ENDED = pod(terminated(1, "line\nno answer from the API server\n"), "Failed")
EVICTED = pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory. ")


@pytest.mark.parametrize(
    ("evaluator", "mode", "extra", "path"),
    [
        ("Live", "Off", 0, "spec.tuning.mode"),
        ("Live", "Recommend", 0, "spec.tuning.mode"),
        ("Live", "Canary", 0, None),
        ("Live", "Apply", 0, None),
        ("Shadow", "Off", 1, "spec.tuning.mode"),
        ("Shadow", "Recommend", 0, "spec.tuning.limits.extraReplicas"),
        ("Shadow", "Recommend", 1, None),
        ("Simulator", "Off", 0, None),
        ("Simulator", "Apply", 0, None),
    ],
)
def test_which_runs_a_service_allows(evaluator: str, mode: str, extra: int, path: str | None) -> None:
    given, made = service(mode, extra), run(evaluator=evaluator)
    found = workers.obstacle(given, made, ACTIVE, ready=1)
    if path is None:
        assert found is None
        return
    assert found is not None
    assert (found.reason, found.stalled) == (names.NOT_ALLOWED_BY_SERVICE, True)
    assert path in found.message
    # It lets a younger one pass, which the service allows.
    younger = run("younger", created=9, evaluator="Simulator")
    assert runs.acting([made, younger], NOW, given) is younger
    # One that has begun is not judged anew: its candidates are.
    begun = run(status={"startTime": moment(1)}, evaluator=evaluator)
    assert workers.not_allowed(given, begun) == ()


def test_a_run_that_turns_what_the_service_does_not_allow_says_so_at_once_and_whose_fields_are_meant() -> (
    None
):
    made = run(parameters=[{"name": "longPrefillTokenThreshold", "min": 0, "max": 64}])
    found = workers.obstacle(service("Off", 0), made, ACTIVE, ready=1)
    assert found is not None
    assert (found.reason, found.stalled) == (names.NOT_ALLOWED_BY_SERVICE, True)
    mode, parameter = found.message.split("; spec.")
    assert mode.startswith("InferenceService chat: spec.tuning.mode: 'Off' is not allowed")
    assert parameter.startswith(
        "parameters[0].name: 'longPrefillTokenThreshold' is not allowed; one that the service lets be tuned"
    )
    assert "InferenceService chat: spec.tuning.parameters has maxNumBatchedTokens" in parameter


def test_a_halt_and_a_service_that_cannot_be_measured_let_runs_wait() -> None:
    made = run()
    for halted, fleet in (
        (service(annotations={names.ANNOTATION_TUNING: "reverted"}), ACTIVE),
        (service(), PAUSED),
    ):
        found = workers.obstacle(halted, made, fleet, ready=1)
        assert found is not None
        assert (found.reason, found.stalled) == ("Reverted" if fleet is ACTIVE else "Paused", False)
    found = workers.obstacle(service(), made, ACTIVE, ready=0)
    assert found is not None
    assert (found.reason, found.stalled) == (names.NO_READY_PODS, False)


@pytest.mark.parametrize(
    ("worker", "state", "reason", "text"),
    [
        (Worker(), "none", None, ""),
        (Worker(job()), "starting", "Pending", "its worker starts"),
        (Worker(job(), (pod(),)), "starting", "Pending", "its worker starts"),
        (Worker(job(), (RUNNING,)), "running", None, ""),
        (Worker(job(), (pod(unschedulable=True),)), "starting", names.UNSCHEDULABLE, "2 Insufficient cpu."),
        (
            Worker(
                job(),
                (
                    pod(
                        unschedulable=True,
                        resources={"requests": {"cpu": "9"}, "limits": {"cpu": "99", "memory": "2Gi"}},
                    ),
                ),
            ),
            "starting",
            names.UNSCHEDULABLE,
            "; it asks for cpu 9, memory 2Gi, by the operator's --worker-resources (the chart's worker.resources)",
        ),
        (
            Worker(job(), (pod(waiting("ImagePullBackOff", "no such")),)),
            "starting",
            names.IMAGE_PULL_FAILED,
            "no such",
        ),
        (
            Worker(job(), (pod(waiting("InvalidImageName", "no such")),)),
            "starting",
            names.IMAGE_PULL_FAILED,
            "; it is the operator's --tuner-image (the chart's images.tuner)",
        ),
        (Worker(job(), (pod(waiting("ErrImagePull", "once")),)), "starting", "Pending", "its worker starts"),
        (
            Worker(job(), (pod(),), 'configmap "t" not found'),
            "starting",
            names.FAILED_MOUNT,
            'configmap "t" not found',
        ),
        (Worker(job(), (), QUOTA), "starting", names.PODS_NOT_CREATED, QUOTA),
        (Worker(job(), (ENDED,), QUOTA), "starting", names.PODS_NOT_CREATED, QUOTA),
        (
            Worker(job(), (EVICTED,)),
            "starting",
            "Pending",
            "started again: Evicted: The node was low on resource: memory.",
        ),
        (Worker(job(), (pod(phase="Failed"),)), "starting", "Pending", "its worker starts"),
        (
            Worker(job(), (ENDED,)),
            "starting",
            "Pending",
            "started again: exit status 1: no answer from the API server",
        ),
        (Worker(job(), (ENDED, RUNNING)), "running", None, ""),
        (Worker(job(owner="other"), ()), "starting", "Pending", "on its way out"),
        (Worker(job(owner="other", kind="CronJob"), ()), "starting", names.NAME_TAKEN, "Job/chat-1-worker"),
        (
            Worker(job(owner="other", kind="CronJob"), (RUNNING,)),
            "starting",
            names.NAME_TAKEN,
            "Job/chat-1-worker",
        ),
        (
            Worker(job(), (pod({"running": {}}, "Running", of="former"),)),
            "starting",
            "Pending",
            "its worker starts",
        ),
    ],
)
def test_how_a_worker_is(worker: Worker, state: str, reason: str | None, text: str) -> None:
    found = workers.judge(run(), worker)
    assert found.state == state
    assert (None if found.obstacle is None else found.obstacle.reason) == reason
    assert text in ("" if found.obstacle is None else found.obstacle.message)


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (Worker(job("Failed"), (ENDED,)), "exit status 1: no answer from the API server"),
        (
            Worker(job("Failed"), (pod(terminated(137, reason="OOMKilled"), "Failed"),)),
            "out of memory (OOMKilled)",
        ),
        (Worker(job("Failed"), (pod(terminated(139), "Failed"),)), "was killed by signal 11"),
        (Worker(job("Failed"), (ENDED, EVICTED)), "Evicted: The node was low on resource: memory."),
        (Worker(job("Failed")), "BackoffLimitExceeded: thrice"),
        (Worker(job("Complete")), "without a result"),
    ],
)
def test_a_failed_worker_fails_its_run_for_good_with_the_reason(worker: Worker, said: str) -> None:
    made = run(status={"startTime": moment(5)})
    account = workers.judge(made, worker)
    assert account.state == "failed"
    first = runs.run_status(made, acts=True, refusal=None, now=rfc3339(NOW), worker=account)
    ready = first["conditions"][0]
    assert (first["phase"], ready["reason"]) == ("Failed", names.WORKER_FAILED)
    assert said in ready["message"]
    # Days later its Job is gone, and the time limit over.
    later = runs.run_status(run(status=first), acts=False, refusal=None, now=rfc3339(NOW + 99_999))
    assert later == first
    judged = run(status={**first, "phase": "Running", "result": {"verdict": "KeptIncumbent"}})
    assert workers.judge(judged, Worker(job("Complete"))) == Account("ended", since=moment(5))


def refused(message: str, at: float, reason: str = "FailedCreate", **more: Any) -> Json:
    """An event of the Job."""
    return {"reason": reason, "message": message, "lastTimestamp": moment(at), **more}


def test_what_the_job_controller_said_last_is_told_alike_each_time() -> None:
    quota = 'Error creating: pods "chat-1-worker-{}" is forbidden: exceeded quota: q'
    told = 'Error creating: pods "chat-1-worker-…" is forbidden: exceeded quota: q'
    one, two = refused(quota.format("x1y2z"), 20), refused(quota.format("abcde"), 30)
    assert workers.not_made([one], job(), []) == workers.not_made([two, one], job(), []) == told
    combined = refused("(combined from similar events): " + quota.format("zzzzz"), 40)
    assert workers.not_made([combined, one], job(), []) == told
    # Another reason came later, by whichever way the time is written.
    level: Json = {"lastTimestamp": None, "eventTime": moment(50)}
    assert workers.not_made([refused("violates PodSecurity", 0, **level), two], job(), []) == "violates PodSecurity"  # fmt: skip
    series: Json = {"series": {"lastObservedTime": moment(60)}}
    assert workers.not_made([refused("no account", 1, **series), combined], job(), []) == "no account"
    # What was said before a pod was made after all says nothing of the next one.
    ended = pod(terminated(1, finished=25), "Failed")
    assert workers.not_made([one], job(), [ended]) is None
    assert workers.not_made([one, two], job(), [ended]) == told
    assert workers.not_made([refused("made it", 9, "SuccessfulCreate")], job(), []) is None


def marked(resources: Json | None = None) -> Json:
    """A Job that an operator with that for its workers' resources has made."""
    made, built = job(), worker_job.job(service(), run(), Tuner(resources=resources or {}), 60.0)
    made["metadata"]["annotations"] = built["metadata"]["annotations"]
    return made


@pytest.mark.parametrize(
    "found",
    [
        (pod(unschedulable=True),),
        (pod(waiting("ImagePullBackOff")),),
        (pod(terminated(137, reason="OOMKilled"), "Failed"),),
    ],
)
def test_a_worker_that_does_not_get_to_start_is_made_anew_once_it_would_be_another(
    found: tuple[Json],
) -> None:
    def ends(worker: Json, of: InferenceService | None = None) -> tuple[str, ...]:
        seen: Json = {"workers": {"chat-1": Worker(worker, found)}, "worker_pods": found}
        ended: tuple[str, ...] = look(run(status={"startTime": moment(5)}), of=of, **seen)[0].end_workers
        return ended

    other = {"limits": {"memory": "1Gi"}}
    assert ends(marked(other)) == ("chat-1",)
    assert ends(marked()) == (), "nothing has changed"
    assert ends(job()) == (), "an operator before this one made it"
    pulls = replace(service().spec.engine, image_pull_secrets=(ImagePullSecret("registry"),))
    assert ends(marked(), replace(service(), spec=replace(service().spec, engine=pulls))) == ("chat-1",)


def test_a_worker_that_starts_or_works_is_left_alone_whatever_made_it() -> None:
    for found in ((), (pod(),), (RUNNING,), (ENDED, RUNNING)):
        seen: Json = {"workers": {"chat-1": Worker(marked({"limits": {"memory": "1Gi"}}), found)}}
        assert look(run(), worker_pods=found, **seen)[0].end_workers == ()


def test_at_the_time_limit_a_run_says_what_it_could_not_go_on_for() -> None:
    worker = Worker(job(), (pod(unschedulable=True),))
    first = look(run(), workers={"chat-1": worker}, worker_pods=worker.pods)[1].run_statuses["chat-1"]
    over = run(status={**first, "startTime": moment(5 - 7200)})
    said = told(look(over)[1])
    assert said[:2] == ("Stopped", names.TIME_LIMIT_REACHED)
    assert said[2] == ("spec.timeLimit (2h) is over without a result; until then its worker's pod: "
                       "0/2 nodes are available: 2 Insufficient cpu.")  # fmt: skip
    # One that was on its way has nothing to add.
    for worker in (Worker(job()), Worker(job(), (RUNNING,))):
        first = look(run(), workers={"chat-1": worker}, worker_pods=worker.pods)[1].run_statuses["chat-1"]
        over = run(status={**first, "startTime": moment(5 - 7200)})
        assert told(look(over)[1])[2] == "spec.timeLimit (2h) is over without a result"


def test_a_run_counts_its_time_from_its_workers_beginning_and_runs_while_it_does() -> None:
    started = runs.run_status(run(), acts=True, refusal=None, now=rfc3339(NOW),
                              worker=workers.judge(run(), Worker(job())))  # fmt: skip
    assert (started["phase"], started["startTime"]) == ("Pending", moment(5))
    account = workers.judge(run(), Worker(job(), (RUNNING,)))
    running = runs.run_status(run(status=started), acts=True, refusal=None, now=rfc3339(NOW), worker=account)
    assert (running["phase"], running["startTime"]) == ("Running", moment(5))


def test_a_worker_that_is_started_again_is_no_step_back() -> None:
    tried = {"startTime": moment(5), "trials": [{"number": 0, "state": "Running", "config": {}}]}
    account = workers.judge(run(status=tried), Worker(job(), (ENDED,)))
    status = runs.run_status(run(status=tried), acts=True, refusal=None, now=rfc3339(NOW), worker=account,
                             obstacle=account.obstacle)  # fmt: skip
    ready = status["conditions"][0]
    assert (status["phase"], ready["reason"]) == ("Running", "Running")
    assert "started again: exit status 1" in ready["message"]


def finished(verdict: str | None, phase: str, over: float) -> TuningRun:
    closed = {"type": names.RECONCILING, "status": "False", "reason": names.UP_TO_DATE, "message": "",
              "lastTransitionTime": moment(over)}  # fmt: skip
    status: Json = {"phase": phase, "conditions": [closed]}
    return run(status={**status, "result": {"verdict": verdict}} if verdict else status)


def test_a_worker_with_a_result_may_end_by_itself_and_others_go_at_once() -> None:
    judged = finished("KeptIncumbent", "Succeeded", 90)
    assert workers.leftovers([judged], [RUNNING], NOW) == workers.Leftovers((), T0 + 90 + workers.PARTING_S)
    assert workers.leftovers([judged], [RUNNING], NOW + 10).end == ("chat-1",)
    assert workers.leftovers([finished(None, "Stopped", 99)], [RUNNING], NOW).end == ("chat-1",)
    assert workers.leftovers([run()], [RUNNING], NOW) == workers.Leftovers(), "it is needed"
    assert workers.leftovers([run()], [RUNNING], NOW, served=False).end == ("chat-1",)
    outside = replace(run(), metadata=replace(run().metadata, annotations={names.ANNOTATION_WORKER: "none"}))
    assert workers.leftovers([outside], [RUNNING], NOW).end == ("chat-1",)
    for gone in (ENDED, {**RUNNING, "metadata": {**RUNNING["metadata"], "deletionTimestamp": moment(1)}}):
        assert workers.leftovers([finished(None, "Stopped", 99)], [gone], NOW) == workers.Leftovers()


def test_the_run_that_has_begun_goes_on_when_an_older_one_becomes_possible() -> None:
    older, younger = run("older"), run("younger", {"startTime": moment(50)}, created=10)
    assert runs.acting([older, younger], NOW, service()) is younger


# The whole look


def look(
    *given: TuningRun, of: InferenceService | None = None, ready: bool = True, **more: Any
) -> tuple[Any, Any]:
    from support.pods import pod as engine_pod

    seen = cluster.Observed(
        of or service(), runs=given, pods=(engine_pod(ready_since=1),) if ready else (), **more
    )
    decision = cluster.decide(seen, cluster.Settings(), NOW, rfc3339(NOW))
    return decision, cluster.conclude(seen, decision, NOW, rfc3339(NOW))


def told(conclusion: Any, name: str = "chat-1") -> tuple[str, str, str]:
    """Phase, and Ready's reason and message."""
    status = conclusion.run_statuses[name]
    return status["phase"], status["conditions"][0]["reason"], status["conditions"][0]["message"]


def test_one_look_wants_one_worker_for_the_run_whose_turn_it_is() -> None:
    first, second = run("a"), run("b", created=1)
    decision, conclusion = look(first, second)
    assert decision.new_worker is first
    assert told(conclusion, "b") == (
        "Pending",
        names.WAITING_FOR_RUN,
        "run a of this service comes first",
    )
    assert look(first, ready=False)[0].new_worker is None
    assert look(first, waits="1 run may act")[0].new_worker is None
    assert look(first, workers={"a": Worker(job(owner="uid-a"))})[0].new_worker is None
    outside = replace(first, metadata=replace(first.metadata, annotations={names.ANNOTATION_WORKER: "none"}))
    assert look(outside)[0].new_worker is None


@pytest.mark.parametrize(
    "worker",
    [
        Worker(job(), (RUNNING,)),
        Worker(job(), (pod(unschedulable=True),)),
        Worker(job("Failed"), (ENDED,)),
        Worker(job()),
    ],
)
def test_a_second_look_says_the_same(worker: Worker) -> None:
    by_run = {"chat-1": worker}
    first = look(run(), workers=by_run, worker_pods=worker.pods)[1].run_statuses["chat-1"]
    decision, conclusion = look(run(status=first), workers=by_run, worker_pods=worker.pods)
    assert conclusion.run_statuses["chat-1"] == first
    assert (decision.new_worker, decision.end_workers) == (None, ())


def test_in_a_quiet_time_no_run_of_any_kind_begins() -> None:
    always = service(quiet={"schedule": "* * * * *", "duration": "1h"})
    for evaluator in ("Live", "Simulator"):
        decision, conclusion = look(run(evaluator=evaluator), of=always)
        assert decision.new_worker is None
        assert told(conclusion)[:2] == ("Pending", names.QUIET_TIME)
    assert (
        look(run(), of=service(quiet={"schedule": "0 0 30 2 1", "duration": "1h"}))[0].new_worker is not None
    )


def test_a_run_that_waits_for_something_of_its_own_does_not_ask_for_a_place() -> None:
    seen = cluster.Observed(service(), runs=(run(),))
    assert cluster.wants_to_act(seen, NOW) is None
    _, conclusion = look(run(), ready=False)
    assert told(conclusion)[1] == names.NO_READY_PODS
    assert conclusion.status.tuning.state == "Idle"
    problem = Obstacle(names.API_DENIED, "may not", stalled=True)
    assert told(look(run(), worker_problem=problem)[1]) == ("Pending", names.API_DENIED, "may not")


# Simulated results


def judged_run(verdict: str = "Recommended", tokens: int = 256, **spec: Any) -> TuningRun:
    result = {
        "verdict": verdict,
        "config": {"maxNumBatchedTokens": tokens},
        "message": "3 % before, 1 % after",
    }
    return run(status={"phase": "Running", "result": result}, **spec)


def test_what_was_only_simulated_is_recommended_and_never_put_in_force() -> None:
    simulated = judged_run(evaluator="Simulator", verdict="Applied")
    decision, conclusion = look(simulated, of=service("Recommend"))
    found = decision.recommendation
    assert found.simulated is True
    assert conclusion.status.to_json()["tuning"]["recommendation"]["simulated"] is True
    assert json.dumps(told(conclusion)).count("recommended") == 1
    # The mode is changed afterwards.
    chosen = effective(service("Apply").spec, found)
    assert (chosen.source, chosen.config["max_num_batched_tokens"]) == ("Spec", 2048)
    for mode in ("Off", "Canary", "Apply"):
        decision, conclusion = look(simulated, of=service(mode))
        assert decision.recommendation is None
        assert f"is not taken: spec.tuning.mode is {mode}" in told(conclusion)[2]
    decision, _ = look(judged_run(), of=service("Apply"))
    assert decision.recommendation.simulated is None
    assert decision.incumbent["config"]["max_num_batched_tokens"] == 256, "what was measured is put in force"


def test_a_simulators_candidate_reaches_no_engine() -> None:
    candidate = {"trial": 0, "config": {"maxNumBatchedTokens": 128}, "until": rfc3339(NOW + 60)}
    decision, conclusion = look(run(status={"candidate": candidate}, evaluator="Simulator"))
    assert decision.trial is None
    assert told(conclusion)[1] == names.CANDIDATE_REFUSED


@pytest.mark.parametrize(
    ("verdict", "mode", "refusal", "text"),
    [
        (
            "Applied",
            "Apply",
            None,
            "maxNumBatchedTokens 256 is better, and is in force until somebody edits it: 3 % before",
        ),
        ("Recommended", "Recommend", None, "maxNumBatchedTokens 256 is better, and is recommended"),
        ("Applied", "Canary", None, "is not taken: spec.tuning.mode is Canary"),
        ("Applied", "Apply", "out of bounds", "is not taken: out of bounds"),
        ("KeptIncumbent", "Apply", None, "nothing that was tried is surely better than what is in force"),
        ("Inconclusive", "Apply", None, "the measurements do not decide"),
        ("Failed", "Apply", None, "the run failed: 3 % before"),
    ],
)
def test_a_finished_run_says_in_a_sentence_what_came_of_it(
    verdict: str, mode: str, refusal: str | None, text: str
) -> None:
    found = verdicts.sentence(service(mode), judged_run(verdict), refusal)
    assert text in found
    assert "\n" not in found


def test_a_result_that_leaves_the_bounds_is_not_told_as_taken() -> None:
    decision, conclusion = look(judged_run("Applied", tokens=16))
    assert decision.recommendation is None
    assert "is not taken: status.result.config.maxNumBatchedTokens: 16 is not allowed" in told(conclusion)[2]
    older, younger = judged_run(), replace(judged_run(), metadata=run("newer", created=9).metadata)
    _, conclusion = look(older, younger)
    assert "is not taken: a younger run's result counts" in told(conclusion)[2]
    assert "is in force" in told(conclusion, "newer")[2]
