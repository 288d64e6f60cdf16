"""What a service's owner allows a run in a cluster, as its worker reads it."""

from __future__ import annotations

import pytest

from support.pods import T0, moment
from support.services import BUDGET_PARAMETER, run_resource, service
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.api.status import Resolved
from trimtab_operator.plan import cluster
from trimtab_operator.plan.pods import rfc3339
from trimtab_tuner.cluster.objects import halt, run_of, service_of
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
