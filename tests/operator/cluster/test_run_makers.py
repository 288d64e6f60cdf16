"""What makes runs without a person, against a real API server: one run whoever makes it, and only the very run that is deleted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.services import BUDGET_PARAMETER, resource
from trimtab_operator import names, schema
from trimtab_operator.api import TuningRun
from trimtab_operator.api.status import Condition, ServiceStatus
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import Kube
from trimtab_operator.cluster.run_makers import RunMakers
from trimtab_operator.plan.live import Switch
from trimtab_operator.plan.pods import rfc3339
from trimtab_operator.plan.slo import Attainment
from trimtab_operator.plan.tuning_drift import DriftVerdict, verdict

pytestmark = pytest.mark.cluster
Json = dict[str, Any]
NOW = 1_800_000_000.0


def due(kube: Kube, namespace: str) -> DriftVerdict:
    """What each of two operators finds when the time has come."""
    made = resource(tuning={"parameters": [BUDGET_PARAMETER], "drift": {"enabled": True}})
    made["metadata"] = {"name": "chat", "namespace": namespace}
    if kube.get(kinds.SERVICE, namespace, "chat") is None:
        kube.create(made)
    live = kube.get(kinds.SERVICE, namespace, "chat")
    assert live is not None
    service = schema.parse_service(live)
    since = rfc3339(NOW - 3 * service.spec.slo.window_s)
    before = ServiceStatus(conditions=(Condition(names.SLO_MET, "False", "Any", last_transition_time=since),))
    found = verdict(service, before, Attainment("Violated", names.TARGETS_MISSED), (), Switch(), NOW)
    assert found is not None
    assert found.create is not None
    return found


def test_two_operators_that_find_the_same_drift_make_one_run(kube: Kube, namespace: str) -> None:
    found = due(kube, namespace)
    for _ in range(2):
        told = RunMakers(kube).drift_run(found)
        assert told is not None
        assert (told.met, told.reason) == (True, names.RUN_CREATED)
    [run] = kube.list(kinds.RUN, namespace)
    assert run["metadata"]["labels"][names.LABEL_ORIGIN] == "drift"
    assert run["metadata"]["ownerReferences"][0]["name"] == "chat"


def test_a_run_that_the_api_server_does_not_take_is_told_and_due_again(kube: Kube, namespace: str) -> None:
    found = due(kube, namespace)
    assert found.create is not None
    spoiled = {**found.create, "spec": {**found.create["spec"], "evaluator": "Nobody"}}
    told = RunMakers(kube).drift_run(replace(found, create=spoiled))
    assert told is not None
    assert (told.met, told.reason) == (True, names.INVALID_SPEC)
    assert "spec.evaluator" in told.message
    assert told.kept is not None
    assert told.kept.run is None, "the next look tries again"


def test_only_the_very_run_that_was_seen_is_deleted(kube: Kube, namespace: str) -> None:
    created = RunMakers(kube).drift_run(due(kube, namespace))
    assert created is not None
    [live] = kube.list(kinds.RUN, namespace)
    seen = TuningRun.parse(live)
    RunMakers(kube).forget_runs([replace(seen, metadata=replace(seen.metadata, uid="another"))])
    assert len(kube.list(kinds.RUN, namespace)) == 1
    RunMakers(kube).forget_runs([seen, seen])
    assert kube.list(kinds.RUN, namespace) == []
