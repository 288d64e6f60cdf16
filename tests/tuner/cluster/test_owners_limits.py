"""What a service's owner allows a run in a cluster, as its worker reads it."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from support.pods import T0, moment
from support.services import BUDGET_PARAMETER, run_resource, service
from trimtab_engine.core.live import LiveConfig
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.api.status import Resolved
from trimtab_operator.plan import cluster
from trimtab_operator.plan.live import Switch, TuningState
from trimtab_operator.plan.pods import rfc3339
from trimtab_tuner.cluster import worker
from trimtab_tuner.cluster.kube import CONFIG_MAP, SERVICE, Kind
from trimtab_tuner.cluster.notebook import Notebook
from trimtab_tuner.cluster.objects import halt, run_of, service_of
from trimtab_tuner.cluster.run_target import RunTarget
from trimtab_tuner.cluster.worker import owners
from trimtab_tuner.guardrails import Limits


@pytest.mark.parametrize(("written", "want"), [({}, 0.03), ({"maxThroughputLoss": "7.5%"}, 0.075)])
def test_a_run_keeps_to_the_owners_limit_on_throughput(written: dict[str, str], want: float) -> None:
    resource = dict(service(**{"tuning.limits": written}).raw)  # defaulted, as the API server gives it
    resource["metadata"] = {**resource["metadata"], "uid": "u"}
    found = owners(Limits(min_requests=77), service_of(resource))
    assert found.max_throughput_loss == pytest.approx(want)
    assert found.min_requests == 77


def test_a_worker_waits_through_a_quiet_time_as_the_operator_says_it() -> None:
    tuned = {"tuning.mode": "Apply", "tuning.parameters": [BUDGET_PARAMETER]}
    quiet = service(**tuned, **{"tuning.limits.notDuring": [{"schedule": "* * * * *", "duration": "1h"}]})
    raw = run_resource()
    raw["metadata"] |= {"uid": "r", "namespace": "default", "generation": 1, "creationTimestamp": moment(0)}
    raw["status"] = {"candidate": {"config": {}, "until": moment(60)}}
    resource = dict(quiet.raw) | {"metadata": {**quiet.raw["metadata"], "uid": "s"}}

    def held(found: InferenceService) -> str | None:
        seen = cluster.Observed(found, runs=(TuningRun.parse(raw),))
        decided = cluster.decide(seen, cluster.Settings(Resolved(image="i")), T0, rfc3339(T0))
        status = cluster.conclude(seen, decided, T0, rfc3339(T0)).run_statuses["chat-1"]
        return halt(service_of(resource), run_of({**raw, "status": status}))

    assert "spec.tuning.limits.notDuring[0] (* * * * *) is in force" in (held(quiet) or "")
    assert held(service(**tuned)) is None


@pytest.mark.parametrize("word", ["paused", "reverted", "active"])
def test_a_worker_waits_while_the_fleets_switch_holds_as_the_operator_says_it(word: TuningState) -> None:
    made = service(**{"tuning.mode": "Apply", "tuning.parameters": [BUDGET_PARAMETER]})
    seen = cluster.Observed(made, fleet=Switch(word, "ConfigMap home/trimtab-fleet"))
    decided = cluster.decide(seen, cluster.Settings(Resolved(image="i")), T0, rfc3339(T0))
    status = cluster.conclude(seen, decided, T0, rfc3339(T0)).status.to_json()
    resource = dict(made.raw) | {"metadata": {**made.raw["metadata"], "uid": "s"}, "status": status}
    raw = run_resource()
    raw["metadata"] |= {"uid": "r", "namespace": "default", "generation": 1, "creationTimestamp": moment(0)}
    held = halt(service_of(resource), run_of(raw))
    assert held == (None if word == "active" else f"tuning is {word} for all services (status.tuning.state)")


class Api:
    """What a worker reads of an API server, where a person may pause tuning."""

    def __init__(self) -> None:
        self.annotations: dict[str, str] = {}

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        if kind == CONFIG_MAP:
            document = {"generation": 1, "source": "Spec", "config": LiveConfig().to_json()}
            return {"data": {"live.json": json.dumps(document)}}
        if kind == SERVICE:
            metadata = {"name": "chat", "uid": "s", "annotations": dict(self.annotations)}
            return {"metadata": metadata, "spec": {"tuning": {"mode": "Apply"}}}
        return {"metadata": {"name": "try", "uid": "r"}, "spec": {"service": "chat"}}


def test_a_pause_is_heard_before_the_next_candidate_however_fresh_the_last_answer_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "LOOK_AGAIN_S", 0.01)
    api: Any = Api()
    said = list[str]()

    async def ask() -> str | None:
        service = service_of(await api.get(SERVICE, "team", "chat"))
        notebook = Notebook(api, "team", "try", "r")
        target = RunTarget(api, "team", service, notebook)
        plan: Any = SimpleNamespace(touches_engines=True)

        def note(_: str, text: str) -> None:
            said.append(text)
            api.annotations = {}  # the person lets it go on once the worker says that it waits

        view: Any = SimpleNamespace(note=note)
        permission = worker._permission(target, plan, view, time.monotonic() + 60)
        assert await permission() is None
        api.annotations = {"serving.trimtab.dev/tuning": "paused"}
        return await permission()

    assert asyncio.run(ask()) is None
    assert said == ["tuning is paused by the annotation serving.trimtab.dev/tuning"]
