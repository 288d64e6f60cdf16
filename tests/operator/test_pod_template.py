"""Which pod template a Deployment carries when another version of the operator takes over: the one that its pods have."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from support.services import resource
from trimtab_operator import names, schema
from trimtab_operator.api import InferenceService
from trimtab_operator.api.status import Condition, Resolved, ServiceStatus
from trimtab_operator.plan import manifests, pod_template
from trimtab_operator.plan.pod_template import Built, Choice
from trimtab_operator.plan.template import template_hash

Json = dict[str, Any]
OURS = Resolved(image="engine:1")
THEIRS = Resolved(image="engine:2")


def service(generation: int = 1, /, **changes: Any) -> InferenceService:
    given = resource(**changes)
    given["metadata"]["generation"] = generation
    return schema.parse_service(given)


class Cluster:
    """One service's Deployment and status, as reconciles leave them."""

    def __init__(self) -> None:
        self.deployment: Json | None = None
        self.status = ServiceStatus()
        self.rolled = 0

    def reconcile(self, wanted: InferenceService, defaults: Resolved = OURS) -> Choice:
        choice = pod_template.choose(wanted, self.status, self.deployment, defaults)
        template = copy.deepcopy(choice.built.template)
        before = self.deployment
        self.rolled += before is not None and before["spec"]["template"] != template
        self.deployment = {
            "metadata": {"annotations": choice.built.annotations()},
            "spec": {"template": template},
        }
        self.status = ServiceStatus(wanted.metadata.generation, resolved=choice.resolved)
        return choice

    @property
    def leaving_s(self) -> int:
        assert self.deployment is not None
        container = self.deployment["spec"]["template"]["spec"]["containers"][0]
        found: int = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        return found


class Version:
    """Makes this operator another version: other fields in the template, and another way to hash a spec."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def next(self, *, fields: bool = True) -> None:
        self._monkeypatch.setattr(
            manifests, "template_hash", lambda spec, resolved: f"n{template_hash(spec, resolved)}"
        )
        if fields:
            self._monkeypatch.setattr(manifests, "ENDPOINT_SPREAD_S", 7)

    def back(self) -> None:
        self._monkeypatch.undo()


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Version:
    return Version(monkeypatch)


def test_another_version_of_the_operator_rolls_nothing_and_says_that_it_waits(version: Version) -> None:
    cluster = Cluster()
    assert not cluster.reconcile(service()).upgrade_available
    version.next()
    for _ in range(2):
        choice = cluster.reconcile(service(), THEIRS)
        assert choice.upgrade_available
        assert choice.resolved == OURS
    assert cluster.rolled == 0


def test_a_live_edit_under_another_version_rolls_nothing_and_a_restart_brings_it(version: Version) -> None:
    cluster = Cluster()
    cluster.reconcile(service())
    version.next()
    cluster.reconcile(service())
    cluster.reconcile(service(2, **{"engine.maxNumSeqs": 8}))
    assert cluster.rolled == 0
    choice = cluster.reconcile(service(3, **{"engine.maxNumSeqs": 8, "engine.maxModelLen": 512}), THEIRS)
    assert (cluster.rolled, cluster.leaving_s) == (1, 7)
    assert choice.resolved == THEIRS
    assert not choice.upgrade_available


def test_upgrade_policy_auto_takes_another_versions_template_and_going_back_rolls_nothing(
    version: Version,
) -> None:
    policy: Json = {"rollout.upgradePolicy": "Auto"}
    auto = service(**policy)
    cluster = Cluster()
    cluster.reconcile(auto)
    version.next()
    cluster.reconcile(auto)
    assert (cluster.rolled, cluster.leaving_s) == (1, 7)
    version.back()
    choice = cluster.reconcile(service(2))  # with upgradePolicy Manual again, edited while no operator ran
    assert (cluster.rolled, cluster.leaving_s) == (1, 7), "the older operator keeps the newer one's pods"
    assert choice.upgrade_available


def test_another_way_to_hash_alone_is_no_upgrade(version: Version) -> None:
    cluster = Cluster()
    auto: Json = {"rollout.upgradePolicy": "Auto"}
    before = cluster.reconcile(service(**auto)).template_hash
    version.next(fields=False)
    choice = cluster.reconcile(service(**auto))
    assert cluster.rolled == 0
    assert choice.template_hash == before
    assert not choice.upgrade_available
    cluster.reconcile(service(2, **auto, **{"engine.maxModelLen": 512}))
    assert cluster.rolled == 1


def test_fields_that_a_newer_crd_fills_in_are_no_edit(version: Version) -> None:
    cluster = Cluster()
    before = service()
    cluster.reconcile(before)
    version.next()
    filled = copy.deepcopy(dict(before.raw))
    filled["spec"].setdefault("engine", {})["dtype"] = "float32"
    cluster.reconcile(replace(before, raw=filled, spec=service(**{"engine.dtype": "float32"}).spec))
    assert cluster.rolled == 0


def test_other_templates_from_equal_fields_have_other_marks(version: Version) -> None:
    before = Cluster().reconcile(service()).template_hash
    version._monkeypatch.setattr(manifests, "ENDPOINT_SPREAD_S", 7)
    assert Cluster().reconcile(service()).template_hash != before


def test_an_edit_that_could_not_be_carried_out_before_still_restarts(version: Version) -> None:
    cluster = Cluster()
    cluster.reconcile(service())
    stalled = Condition(names.STALLED, "True", names.UNSUPPORTED)
    cluster.status = replace(cluster.status, observed_generation=2, conditions=(stalled,))
    version.next()
    cluster.reconcile(service(2, **{"engine.maxModelLen": 512}))
    assert cluster.rolled == 1


@pytest.mark.parametrize(
    "record", [None, "nonsense", "[]", '{"basis": "x"}', '{"basis": "x", "fields": "x", "template": {"metadata": {}}}',
               '{"basis": "x", "fields": "x", "template": {"metadata": {"annotations": {"serving.trimtab.dev/config-hash": "x"}}, "spec": {"containers": []}}}']
)  # fmt: skip
def test_a_record_that_is_lost_or_spoilt_is_written_again_and_rolls_nothing(record: str | None) -> None:
    cluster = Cluster()
    cluster.reconcile(service())
    assert cluster.deployment is not None
    annotations = cluster.deployment["metadata"]["annotations"]
    kept = dict(annotations)
    annotations[names.ANNOTATION_BUILT] = record
    assert Built.of(cluster.deployment) is None
    cluster.reconcile(service(), THEIRS)
    assert cluster.rolled == 0
    assert json.loads(cluster.deployment["metadata"]["annotations"][names.ANNOTATION_BUILT]) == json.loads(
        kept[names.ANNOTATION_BUILT]
    )
