"""The operator's own metrics: as many series for a thousand services as for one, and none for services that are gone."""

from __future__ import annotations

from trimtab_operator import names
from trimtab_operator.api.status import Condition, ServiceStatus
from trimtab_operator.cluster.metrics import OperatorMetrics
from trimtab_operator.cluster.store import Key


def ready(reason: str) -> ServiceStatus:
    return ServiceStatus(conditions=(Condition(names.READY, "True", reason),))


def samples(metrics: OperatorMetrics) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in metrics.render().decode().splitlines() if line[0] != "#")
    return {name: float(value) for name, _, value in lines}


def test_series_do_not_grow_with_services_and_go_with_them() -> None:
    metrics = OperatorMetrics()
    keys = [Key("team", f"llm-{i}") for i in range(1000)]
    metrics.status(keys[0], ready("AsExpected"))
    few = samples(metrics)
    for key in keys:
        metrics.status(key, ready("AsExpected"))
        metrics.request("GET", names.SERVICE_KIND, 200)
    many = samples(metrics)
    assert len(many) == len(few) + 1, "the requests"
    assert many['trimtab_operator_services{reason="AsExpected"}'] == 1000
    for key in keys:
        metrics.forget(key)
    assert not any(name.startswith("trimtab_operator_services{") for name in samples(metrics))


def test_services_of_a_namespace_that_is_refused_are_not_counted_and_it_is_named() -> None:
    metrics = OperatorMetrics()
    metrics.away("team", False)
    assert samples(metrics)['trimtab_operator_namespace_refused{namespace="team"}'] == 0
    for namespace in ("team", "other"):
        metrics.status(Key(namespace, "llm"), ready("Serving"))
    metrics.away("team", True)
    found = samples(metrics)
    assert found['trimtab_operator_namespace_refused{namespace="team"}'] == 1
    assert found['trimtab_operator_services{reason="Serving"}'] == 1


def test_an_operator_that_leads_no_more_speaks_of_no_service() -> None:
    metrics = OperatorMetrics()
    metrics.leads(True)
    metrics.status(Key("team", "llm"), ready("ModelLoadFailed"))
    metrics.leads(False)
    metrics.status(Key("team", "late"), ready("ModelLoadFailed"))  # by a look that was under way
    found = samples(metrics)
    assert found["trimtab_operator_leading"] == 0
    assert not any(name.startswith("trimtab_operator_services{") for name in found), (
        "an alert would never end"
    )
