"""What restarts an engine: the hash of restart-only fields, and the table that says why."""

from __future__ import annotations

import pytest

from support.services import service
from trimtab_operator.api.status import Resolved
from trimtab_operator.plan.template import (
    Change,
    changes,
    effect_of,
    engine_environment,
    restarts,
    template_hash,
)


def test_equal_specs_have_equal_hashes_whatever_the_order_they_were_written_in() -> None:
    one = service(podTemplate={"metadata": {"labels": {"a": "1", "b": "2"}}})
    other = service(podTemplate={"metadata": {"labels": {"b": "2", "a": "1"}}})
    assert template_hash(one.spec) == template_hash(other.spec)


def test_durations_and_quantities_written_differently_restart_nothing() -> None:
    one = service(**{"rollout.drainTimeout": "60s", "engine.kvCacheMemory": "1Gi"})
    other = service(**{"rollout.drainTimeout": "1m", "engine.kvCacheMemory": "1024Mi"})
    assert not restarts(one, other)


def test_a_new_default_image_restarts_only_services_that_name_none() -> None:
    before, after = Resolved(image="engine:1"), Resolved(image="engine:2")
    plain, pinned = service().spec, service(**{"engine.image": "mine:1"}).spec
    assert template_hash(plain, before) != template_hash(plain, after)
    assert template_hash(pinned, before) == template_hash(pinned, after)


def test_changes_name_each_field_with_effect_and_reason() -> None:
    old = service()
    new = service(
        **{"engine.maxNumSeqs": 8, "engine.dtype": "float32", "podTemplate": {"spec": {"nodeName": "n"}}}
    )
    assert changes(old, new) == (
        Change("spec.engine.dtype", "auto", "float32", "restart", "weights are converted at start"),
        Change(
            "spec.engine.maxNumSeqs",
            64,
            8,
            "live",
            "the scheduler takes it between two steps; lowering drains down",
        ),
        Change("spec.podTemplate", None, {"spec": {"nodeName": "n"}}, "restart", "it is the pod"),
    )


def test_an_unknown_field_has_no_effect_to_guess() -> None:
    with pytest.raises(KeyError, match=r"spec\.nonsense"):
        effect_of("nonsense.field")


def test_plain_environment_of_the_engine_container_is_found() -> None:
    env = [
        {"name": "A", "value": "1"},
        {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    containers = [{"name": "other", "env": [{"name": "C", "value": "3"}]}, {"name": "engine", "env": env}]
    built = service(podTemplate={"spec": {"containers": containers}})
    assert engine_environment(built.spec) == {"A": "1"}
    assert engine_environment(service().spec) == {}
