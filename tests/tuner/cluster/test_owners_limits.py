"""What a service's owner allows a run in a cluster, as its worker reads it."""

from __future__ import annotations

import pytest

from support.services import service
from trimtab_tuner.cluster.objects import service_of
from trimtab_tuner.cluster.worker import owners
from trimtab_tuner.guardrails import Limits


@pytest.mark.parametrize(("written", "want"), [({}, 0.03), ({"maxThroughputLoss": "7.5%"}, 0.075)])
def test_a_run_keeps_to_the_owners_limit_on_throughput(written: dict[str, str], want: float) -> None:
    resource = dict(service(**{"tuning.limits": written}).raw)  # defaulted, as the API server gives it
    resource["metadata"] = {**resource["metadata"], "uid": "u"}
    found = owners(Limits(min_requests=77), service_of(resource))
    assert found.max_throughput_loss == pytest.approx(want)
    assert found.min_requests == 77
