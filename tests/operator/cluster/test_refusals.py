"""What a real API server's refusals come to: one namespace of several, one watch of several, or nothing at all."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.clock import Clock
from support.cluster.story import condition, wait_until
from support.kube_api import TENANT, KubeApi
from support.services import resource, run_resource
from trimtab_operator import names
from trimtab_operator.api.status import Resolved
from trimtab_operator.cluster import kinds, tokens
from trimtab_operator.cluster.engines import Engines
from trimtab_operator.cluster.events import Recorder
from trimtab_operator.cluster.kube import Denied, Kube, KubeError, load_credentials
from trimtab_operator.cluster.leadership import Leadership
from trimtab_operator.cluster.metrics import OperatorMetrics
from trimtab_operator.cluster.observe import Observer, RunIndex
from trimtab_operator.cluster.places import PAUSES_S, Places
from trimtab_operator.cluster.reconcile import Reconciler
from trimtab_operator.cluster.resync import Resync
from trimtab_operator.cluster.store import WATCH_GRACE_S, Key, Store
from trimtab_operator.cluster.watch_rights import WatchRights
from trimtab_operator.plan.cluster import Settings

pytestmark = pytest.mark.cluster
Json = dict[str, Any]
OURS = {
    "apiGroups": [names.GROUP],
    "resources": ["inferenceservices", "tuningruns"],
    "verbs": ["get", "list", "watch"],
}


def grant(kube: Kube, namespace: str, *rules: Json) -> None:
    """Exactly these rights for the tenant."""
    kube.apply({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "r", "namespace": namespace},
                "rules": list(rules)})  # fmt: skip
    kube.apply({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "r", "namespace": namespace},
                "subjects": [{"kind": "User", "name": TENANT, "apiGroup": "rbac.authorization.k8s.io"}],
                "roleRef": {"kind": "Role", "name": "r", "apiGroup": "rbac.authorization.k8s.io"}})  # fmt: skip


class Tenant:
    """An operator's lists, with the rights of a user who has only what he was granted, in namespaces a and b."""

    def __init__(self, api: KubeApi, admin: Kube, folder: Path) -> None:
        credentials = load_credentials(str(api.kubeconfig_of_tenant(folder)))
        self.kube = Kube(credentials.configuration, pauses_s=())
        self.a, self.b = (f"t-{letter}-{uuid.uuid4().hex[:8]}" for letter in "ab")
        for namespace in (self.a, self.b):
            admin.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
            for made in (resource(), run_resource()):
                made["metadata"]["namespace"] = namespace
                admin.create(made)
        self.clock, self.index, self.store = Clock(), RunIndex(), Store(now=lambda: self.clock())
        self.asked: list[Key] = []
        self.changes: list[tuple[str | None, bool]] = []
        self.places = Places([self.a, self.b], lambda *change: self.changes.append(change), now=self.clock)
        self.resync = Resync(
            self.kube, self.places, self.index, lambda key, delay: self.asked.append(key), 300, now=self.clock
        )
        self.watches = WatchRights(self.kube, self.places, self.resync, self.store, self.asked.append)

    def key(self, namespace: str) -> Key:
        return Key(namespace, "chat")


@pytest.fixture
def tenant(api: KubeApi, kube: Kube, tmp_path: Path) -> Tenant:
    return Tenant(api, kube, tmp_path)


@pytest.fixture
def until_taken_up(tenant: Tenant) -> Callable[[str, bool], None]:
    """An API server takes a binding up a moment later."""

    def wait(namespace: str, allowed: bool) -> None:
        def may() -> bool:
            try:
                tenant.kube.list(kinds.RUN, namespace)
            except KubeError:
                return False
            return True

        wait_until(lambda: may() == allowed)

    return wait


def test_what_one_namespace_refuses_is_nothing_to_the_other(
    tenant: Tenant, kube: Kube, until_taken_up: Callable[[str, bool], None]
) -> None:
    a, b = tenant.a, tenant.b
    grant(kube, b, OURS)
    until_taken_up(b, True)
    tenant.clock.now_s += 1000
    tenant.resync.once()
    assert set(tenant.asked) == {tenant.key(b)}
    assert tenant.resync.last_s == tenant.clock.now_s, "or the process would end itself"
    assert (tenant.places.away(a), tenant.places.away(b)) == (True, False)
    assert tenant.changes == [(a, True)]
    assert "forbidden" in tenant.places.refusals()[a]
    assert tenant.places.nowhere() is None

    tenant.resync.once()
    assert tenant.changes == [(a, True)], "said once"
    grant(kube, a, OURS)
    until_taken_up(a, True)
    tenant.asked.clear()
    tenant.resync.retry()
    assert tenant.asked == [], "not yet its turn"
    tenant.clock.now_s += PAUSES_S[1]
    tenant.resync.retry()
    assert set(tenant.asked) == {tenant.key(a)}, "the other one has had its looks"
    assert tenant.changes == [(a, True), (a, False)]
    assert tenant.index.names(tenant.key(a)) == tenant.index.names(tenant.key(b)) == ["chat-1"]
    tenant.clock.now_s += PAUSES_S[1]
    assert tenant.places.due() == []


def test_a_namespace_that_is_refused_keeps_what_is_known_of_it_and_owes_nothing(
    tenant: Tenant,
    kube: Kube,
    until_taken_up: Callable[[str, bool], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b = tenant.a, tenant.b
    for namespace in (a, b):
        grant(kube, namespace, OURS)
        until_taken_up(namespace, True)
    tenant.resync.once()
    tenant.resync.delivered(tenant.key(b), "999999999")
    grant(kube, a)
    until_taken_up(a, False)
    tenant.places.doubt(a)
    tenant.resync.retry()
    assert tenant.places.away(a), "a look that was refused has it asked at once"
    tenant.asked.clear()
    for _ in range(5):
        tenant.clock.now_s += WATCH_GRACE_S / 2
        tenant.resync.once()
        tenant.watches.turn()
        assert tenant.resync.dead_watch() is None, "nobody can open the watch of a"
    assert set(tenant.asked) == {tenant.key(b)}
    assert set(tenant.resync.known()) == {tenant.key(a), tenant.key(b)}
    assert [record.getMessage() for record in caplog.records] == ["namespace may not be looked at"], (
        "and nothing of each of its watches"
    )


def test_where_everything_is_refused_no_process_would_do_better_and_where_nobody_is_known_one_might(
    tenant: Tenant, api: KubeApi, tmp_path: Path
) -> None:
    tenant.resync.once()
    assert tenant.asked == []
    assert "forbidden" in (tenant.places.nowhere() or "")
    stranger = tmp_path / "kubeconfig"
    stranger.write_text(api.kubeconfig.read_text().replace("test-admin", "nobody-s"))
    kube = Kube(load_credentials(str(stranger)).configuration, pauses_s=())
    places = Places([tenant.a, tenant.b])
    with pytest.raises(KubeError, match="Unauthorized"):
        Resync(kube, places, RunIndex(), lambda key, delay: None, 300).once()
    assert places.refusals() == {}


def test_what_a_look_may_not_read_is_a_condition_as_what_it_may_not_write_is(
    tenant: Tenant, kube: Kube, until_taken_up: Callable[[str, bool], None]
) -> None:
    status = OURS | {"resources": ["inferenceservices/status", "tuningruns/status"], "verbs": ["patch"]}
    events = {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}
    grant(kube, tenant.a, OURS, status, events)
    until_taken_up(tenant.a, True)
    signer = tokens.Signer.new()
    engines = Engines(signer)
    observer = Observer(tenant.kube, engines, tenant.index, tenant.store)
    settings = Settings(Resolved(image="engine:1"), signer.public_pem)
    look = Reconciler(
        tenant.kube, engines, observer, settings, Recorder(tenant.kube, "test"), OperatorMetrics()
    ).reconcile
    assert look(tenant.key(tenant.a)) is not None, "it is asked again"
    found = kube.get(kinds.SERVICE, tenant.a, "chat")
    assert found is not None
    told = condition(found, names.STALLED)
    assert (told["status"], told["reason"]) == ("True", names.API_DENIED)
    assert f'in the namespace "{tenant.a}"' in told["message"]
    grant(kube, tenant.a)
    until_taken_up(tenant.a, False)
    with pytest.raises(Denied):
        look(tenant.key(tenant.a))


@pytest.mark.parametrize("verbs", [[], ["list"], ["list", "watch"]])
def test_a_watch_that_may_not_be_open_is_not_taken_for_dead(
    tenant: Tenant, kube: Kube, until_taken_up: Callable[[str, bool], None], verbs: list[str]
) -> None:
    may = [{"apiGroups": ["apps"], "resources": ["deployments"], "verbs": verbs}] if verbs else []
    grant(kube, tenant.a, OURS, *may)
    until_taken_up(tenant.a, True)
    tenant.resync.once()
    key = tenant.key(tenant.a)
    tenant.resync.delivered(key, "999999999")
    mark = tenant.store.begin(key)
    labels = {names.LABEL_SERVICE: "chat"}
    child = {
        "kind": "Deployment",
        "metadata": {"name": "chat-engine", "resourceVersion": "5", "labels": labels},
    }
    tenant.store.fill(key, mark, [child])
    tenant.clock.now_s += WATCH_GRACE_S / 2 + 1
    tenant.watches.turn()
    tenant.clock.now_s += WATCH_GRACE_S / 2 + 1
    dead = tenant.store.dead_watch()
    assert (dead is not None) == (verbs == ["list", "watch"]), "one that may be open and says nothing is dead"


def test_a_lease_that_is_refused_is_said_once_and_held_once_it_may_be(
    tenant: Tenant, kube: Kube, caplog: pytest.LogCaptureFixture
) -> None:
    leadership = Leadership(tenant.kube, tenant.a, "lease", "a", now=tenant.clock)
    for _ in range(3):
        leadership.turn()
    assert [record.getMessage() for record in caplog.records] == ["lease not renewed"]
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]}  # fmt: skip
    grant(kube, tenant.a, leases)

    def leads() -> bool:
        leadership.turn()
        return leadership.leading

    wait_until(leads)


@pytest.mark.parametrize("verb", ["get", "watch"])
def test_a_service_whose_watch_may_not_be_open_is_not_owed(
    tenant: Tenant, kube: Kube, until_taken_up: Callable[[str, bool], None], verb: str
) -> None:
    grant(kube, tenant.a, OURS | {"verbs": ["list", verb]})
    until_taken_up(tenant.a, True)
    tenant.resync.once()
    tenant.clock.now_s += WATCH_GRACE_S / 2 + 1
    tenant.watches.turn()
    tenant.clock.now_s += WATCH_GRACE_S / 2 + 1
    assert (tenant.resync.dead_watch() is not None) == (verb == "watch")
