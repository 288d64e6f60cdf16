"""A run's worker at a real API server: made once however often its maker dies, and never in place of what is somebody else's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from support.engine_server import wait_until
from support.kube_api import KubeApi
from support.services import BUDGET_PARAMETER, resource, run_resource
from trimtab_operator import names, schema
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.api.status import ServiceStatus
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.engines import Engines
from trimtab_operator.cluster.kube import Denied, Kube, NotLeading, load_credentials
from trimtab_operator.cluster.observe import Observer, RunIndex
from trimtab_operator.cluster.tokens import Signer
from trimtab_operator.cluster.workers import WorkerObjects
from trimtab_operator.plan import worker_job
from trimtab_operator.plan.tuner_pod import Tuner
from trimtab_operator.plan.workers import Obstacle

Json = dict[str, Any]
TUNER = Tuner("tuner:1")
TOKENS = {"uid-of-a-pod": "token"}
NAME = "chat-1-worker"
QUOTA = kinds.Kind("ResourceQuota", "", "v1", "resourcequotas")
KINDS = (kinds.ROLE, kinds.SERVICE_ACCOUNT, kinds.ROLE_BINDING, kinds.SECRET, kinds.JOB)


@pytest.fixture
def pair(kube: Kube, namespace: str) -> tuple[InferenceService, TuningRun]:
    """A service and a run of it, as the API server has them."""
    made = []
    tuning = {"mode": "Apply", "parameters": [BUDGET_PARAMETER]}
    for built in (resource(tuning=tuning), run_resource()):
        built["metadata"]["namespace"] = namespace
        made.append(kube.create(built))
    return schema.parse_service(made[0]), schema.parse_run(made[1])


def dying(api: KubeApi, writes: int) -> Kube:
    """A client whose process is killed when it has written so often."""
    left = itertools.count(writes, -1)

    def guard() -> None:
        if next(left) <= 0:
            raise NotLeading("dead", None, "", "")

    return Kube(load_credentials(str(api.kubeconfig)).configuration, guard)


def there(kube: Kube, namespace: str) -> list[tuple[str, str]]:
    """Kind and name of everything with the run's label."""
    labels = {names.LABEL_RUN: "chat-1"}
    return [
        (kind.name, found["metadata"]["name"])
        for kind in KINDS
        for found in kube.list(kind, namespace, labels)
    ]


@pytest.mark.parametrize("writes", range(7))
def test_whenever_its_maker_dies_the_next_one_completes_one_worker(
    api: KubeApi, kube: Kube, namespace: str, pair: tuple[InferenceService, TuningRun], writes: int
) -> None:
    first = WorkerObjects(dying(api, writes))
    if writes < 6:
        with pytest.raises(NotLeading):
            first.make(*pair, TUNER, TOKENS)
    else:
        first.make(*pair, TUNER, TOKENS)
    made = WorkerObjects(kube).make(*pair, TUNER, TOKENS)
    found = there(kube, namespace)
    assert [item for item in found if item[0] != "Secret"] == [
        ("Role", NAME), ("ServiceAccount", NAME), ("RoleBinding", NAME), ("Job", NAME),
    ]  # fmt: skip
    if writes == 6:
        assert isinstance(made, Obstacle), "there is one"
        return
    assert not isinstance(made, Obstacle)
    [mounted] = [
        v["secret"]["secretName"]
        for v in made["spec"]["template"]["spec"]["volumes"]
        if v["name"] == "tokens"
    ]
    assert ("Secret", mounted) in found
    assert len(found) == (6 if writes == 5 else 5), "tokens that nobody may read are made anew"


def test_what_somebody_else_has_under_that_name_is_left_alone_and_named(
    kube: Kube, namespace: str, pair: tuple[InferenceService, TuningRun]
) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": NAME, "namespace": namespace},
    }
    before = kube.create(theirs)
    problem = WorkerObjects(kube).make(*pair, TUNER, TOKENS)
    assert isinstance(problem, Obstacle)
    assert (problem.reason, problem.stalled) == (names.NAME_TAKEN, True)
    assert f"ServiceAccount/{NAME}" in problem.message
    assert kube.get(kinds.SERVICE_ACCOUNT, namespace, NAME) == before
    assert kube.get(kinds.JOB, namespace, NAME) is None


def test_what_a_former_run_of_that_name_has_left_is_waited_for(
    kube: Kube, namespace: str, pair: tuple[InferenceService, TuningRun]
) -> None:
    WorkerObjects(kube).make(*pair, TUNER, TOKENS)
    kube.delete(kinds.RUN, namespace, "chat-1", pair[1].uid)
    built = run_resource()
    built["metadata"]["namespace"] = namespace
    again = schema.parse_run(kube.create(built))
    problem = WorkerObjects(kube).make(pair[0], again, TUNER, TOKENS)
    assert isinstance(problem, Obstacle)
    assert (problem.reason, problem.stalled) == ("Pending", False)
    WorkerObjects(kube).end(again)
    assert kube.get(kinds.JOB, namespace, NAME) is not None, "not its own"


def test_what_the_api_server_refuses_is_said_with_its_words(
    kube: Kube, namespace: str, pair: tuple[InferenceService, TuningRun]
) -> None:
    problem = WorkerObjects(kube).make(*pair, Tuner("tuner:1", {"requests": {"cpu": "lots"}}), TOKENS)
    assert isinstance(problem, Obstacle)
    assert (problem.reason, problem.stalled) == (names.INVALID_SPEC, True)
    assert "quantities must match" in problem.message or "lots" in problem.message


def test_a_quota_that_forbids_the_job_is_told_and_tries_leave_nothing_behind(
    kube: Kube, namespace: str, pair: tuple[InferenceService, TuningRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kinds.BY_NAME, QUOTA.name, QUOTA)
    none = {"count/jobs.batch": "0"}
    quota = {"apiVersion": "v1", "kind": QUOTA.name, "metadata": {"name": "no-jobs", "namespace": namespace},
             "spec": {"hard": none}}  # fmt: skip
    kube.create(quota)
    kube.apply_status(QUOTA, namespace, "no-jobs", {"hard": none, "used": none})  # no controller counts here
    wait_until(lambda: forbidden(kube, worker_job.job(*pair, TUNER, 60.0)))
    for _ in range(2):
        problem = WorkerObjects(kube).make(*pair, TUNER, TOKENS)
        assert isinstance(problem, Obstacle)
        assert (problem.reason, problem.stalled) == (names.API_DENIED, True)
        assert "exceeded quota: no-jobs, requested: count/jobs.batch=1" in problem.message
    assert "Secret" not in {kind for kind, _ in there(kube, namespace)}


def forbidden(kube: Kube, manifest: Json) -> bool:
    try:
        kube.create(manifest, dry_run=True)
    except Denied:
        return True
    return False


class Hasty(Kube):
    """Between the look at a run and that at its Job, the worker writes its result and ends."""

    def get(self, kind: kinds.Kind, namespace: str | None, name: str) -> Json | None:
        if kind is kinds.JOB and namespace is not None:
            self.apply_status(
                kinds.RUN, namespace, "chat-1", {"result": {"verdict": "KeptIncumbent"}}, manager="w"
            )
        found = super().get(kind, namespace, name)
        if kind is kinds.JOB and found is not None:
            found["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        return found


def test_a_result_that_is_written_during_a_look_is_not_missed(
    api: KubeApi, kube: Kube, namespace: str, pair: tuple[InferenceService, TuningRun]
) -> None:
    WorkerObjects(kube).make(*pair, TUNER, TOKENS)
    index = RunIndex()
    index.put(pair[1].raw)
    hasty = Hasty(load_credentials(str(api.kubeconfig)).configuration)
    seen, _ = Observer(hasty, Engines(Signer.new()), index).everything(pair[0], ServiceStatus(), {})
    assert [run.judged for run in seen.runs] == [True]


def test_a_worker_is_ended_with_its_own_job_alone(
    kube: Kube, namespace: str, pair: tuple[InferenceService, TuningRun]
) -> None:
    objects = WorkerObjects(kube)
    objects.end(pair[1])  # there is none
    made = objects.make(*pair, TUNER, TOKENS)
    assert objects.read(pair[1], [], {}).job == made
    objects.end(pair[1])
    found = kube.get(kinds.JOB, namespace, NAME)
    assert found is None or "deletionTimestamp" in found["metadata"]
