"""Whatever is wrong with monitors' kinds, by a real API server: it is said, and no service's look is held up by it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kubernetes.client
import pytest

from support.clock import Clock
from support.cluster.monitoring_kinds import crds
from support.cluster.story import condition, wait_until
from support.kube_api import TENANT, KubeApi
from support.local_http import QuietHandler, serving
from support.services import resource
from trimtab_operator import names
from trimtab_operator.api import InferenceService
from trimtab_operator.api.status import Resolved
from trimtab_operator.cluster import kinds, tokens
from trimtab_operator.cluster.engines import Engines
from trimtab_operator.cluster.events import Recorder
from trimtab_operator.cluster.kube import Denied, Kube, KubeError, load_credentials
from trimtab_operator.cluster.metrics import OperatorMetrics
from trimtab_operator.cluster.monitors import AFTER_TROUBLE_S, ASK_AGAIN_S, MonitorKinds, MonitorObjects
from trimtab_operator.cluster.observe import Key, Observer, RunIndex
from trimtab_operator.cluster.reconcile import Reconciler
from trimtab_operator.plan import monitors
from trimtab_operator.plan.cluster import Settings

Json = dict[str, Any]
RBAC = "rbac.authorization.k8s.io"
CLUSTER_BINDING = kinds.Kind("ClusterRoleBinding", RBAC, "v1", "clusterrolebindings", namespaced=False)
CRD = kinds.Kind("CustomResourceDefinition", "apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)  # fmt: skip
WEBHOOK = kinds.Kind("ValidatingWebhookConfiguration", "admissionregistration.k8s.io", "v1", "validatingwebhookconfigurations", namespaced=False)  # fmt: skip
ENABLED = {"podMonitor": {"enabled": True}}


@pytest.fixture(autouse=True)
def further_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (CLUSTER_BINDING, CRD, WEBHOOK):
        monkeypatch.setitem(kinds.BY_NAME, kind.name, kind)


@contextmanager
def there(kube: Kube, *objects: Json) -> Iterator[None]:
    """Objects of the cluster, for a while."""
    made = [kube.create(one) for one in objects]
    try:
        yield
    finally:
        for one in made:
            kube.delete(kinds.BY_NAME[one["kind"]], "", one["metadata"]["name"], one["metadata"]["uid"])


@contextmanager
def discovery_denied(kube: Kube, tenant: Kube) -> Iterator[None]:
    """Whoever is no administrator may not find out which kinds there are."""
    bound = kube.get(CLUSTER_BINDING, None, "system:discovery")
    assert bound is not None
    kube.delete(CLUSTER_BINDING, "", "system:discovery", bound["metadata"]["uid"])
    try:
        wait_until(lambda: denied(tenant))
        yield
    finally:
        again = {k: v for k, v in bound["metadata"].items() if k in ("name", "labels", "annotations")}
        kube.create({**bound, "apiVersion": f"{RBAC}/v1", "kind": CLUSTER_BINDING.name, "metadata": again})
        wait_until(lambda: not denied(tenant))


def denied(tenant: Kube) -> bool:
    try:
        tenant.served_kinds(names.GROUP, names.VERSION)
    except Denied:
        return True
    return False


def look(kube: Kube, namespace: str) -> Json:
    """One look at service `chat`, which it makes, by an operator with these rights → the service."""
    made = resource(monitoring=ENABLED)
    made["metadata"] = {"name": "chat", "namespace": namespace}
    kube.apply(made)
    signer = tokens.Signer.new()
    engines = Engines(signer)
    settings = Settings(Resolved(image="engine:1"), signer.public_pem)
    observer = Observer(kube, engines, RunIndex())
    Reconciler(
        kube, engines, observer, settings, Recorder(kube, "test"), OperatorMetrics()
    ).reconcile(Key(namespace, "chat"))  # fmt: skip
    found = kube.get(kinds.SERVICE, namespace, "chat")
    assert found is not None
    assert kube.get(kinds.DEPLOYMENT, namespace, names.deployment("chat")) is not None
    assert condition(found, names.STALLED)["status"] == "False"
    return found


@pytest.mark.cluster
def test_a_discovery_that_is_denied_is_said_to_who_asked_for_monitors_and_holds_nothing_up(
    api: KubeApi, kube: Kube, namespace: str, tmp_path: Path
) -> None:
    tenant = Kube(load_credentials(str(api.kubeconfig_of_tenant(tmp_path))).configuration)
    role = {"kind": "ClusterRole", "name": "cluster-admin", "apiGroup": RBAC}
    binding = {"apiVersion": f"{RBAC}/v1", "kind": "RoleBinding", "metadata": {"name": "all", "namespace": namespace},
               "subjects": [{"kind": "User", "name": TENANT, "apiGroup": RBAC}], "roleRef": role}  # fmt: skip
    kube.create(binding)
    wait_until(lambda: not _refused(tenant, namespace))
    with discovery_denied(kube, tenant):
        told = condition(look(tenant, namespace), names.MONITORING_READY)
    assert (told["status"], told["reason"]) == ("False", names.API_DENIED)
    assert "monitoring.coreos.com/v1 cannot be found out" in told["message"]
    assert "/apis/monitoring.coreos.com/v1" in told["message"]
    told = condition(look(tenant, namespace), names.MONITORING_READY)
    assert told["reason"] == names.KIND_NOT_FOUND, "now it is known"


def _refused(tenant: Kube, namespace: str) -> bool:
    try:
        tenant.list(kinds.RUN, namespace)
    except Denied:
        return True
    return False


@pytest.mark.cluster
def test_a_webhook_of_the_monitors_kinds_that_fails_is_said_and_not_tried_at_each_look(
    kube: Kube, namespace: str
) -> None:
    rule = {"apiGroups": [monitors.GROUP], "apiVersions": ["*"], "resources": ["podmonitors"], "operations": ["*"]}  # fmt: skip
    webhook = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": WEBHOOK.name, "metadata": {"name": "down"},
               "webhooks": [{"name": "down.example.com", "clientConfig": {"url": "https://127.0.0.1:9/"}, "rules": [rule],
                             "sideEffects": "None", "admissionReviewVersions": ["v1"], "timeoutSeconds": 1}]}  # fmt: skip

    def served() -> bool:
        both = frozenset({monitors.POD_MONITOR, monitors.PROMETHEUS_RULE})
        return kube.served_kinds(monitors.GROUP, monitors.VERSION) >= both

    clock = Clock()
    with there(kube, *crds()):
        wait_until(served)
        with there(kube, webhook):

            def fails() -> bool:
                try:
                    kube.once().apply(monitors.pod_monitor(of(namespace)), dry_run=True)
                except KubeError as error:
                    return "webhook" in str(error)
                return False

            wait_until(fails)
            told = condition(look(kube, namespace), names.MONITORING_READY)
            assert (told["status"], told["reason"]) == ("False", names.API_UNAVAILABLE)
            assert "down.example.com" in told["message"]

            objects = MonitorObjects(kube, now=clock)
            service = of(namespace)
            found = objects.read(service, fresh=True)
            decided = monitors.changes(service, found)
            assert decided.apply
            assert objects.write(service, decided) is not None
            held = objects.read(service, fresh=True)
            assert not monitors.changes(service, held).apply
            verdict = monitors.verdict(service, held, monitors.changes(service, held))
            assert verdict is not None
            assert verdict.reason == names.API_UNAVAILABLE
        wait_until(lambda: not fails())
        clock.now_s += AFTER_TROUBLE_S
        decided = monitors.changes(service, objects.read(service, fresh=False))
        assert decided.apply
        assert objects.write(service, decided) is None
    wait_until(lambda: not kube.served_kinds(monitors.GROUP, monitors.VERSION))


def of(namespace: str) -> InferenceService:
    made = resource(monitoring=ENABLED)
    made["metadata"] = {"name": "chat", "namespace": namespace, "uid": "u", "generation": 1}
    return InferenceService.parse(made)


# A server that is scripted, since no real one fails at discovery when asked to.


class Discovery:
    """What `/apis/…` answers, from a real socket; `hangs` while it is cleared."""

    def __init__(self) -> None:
        self.status = 200
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.asked = 0


@pytest.fixture
def discovery() -> Iterator[tuple[Discovery, Kube]]:
    told = Discovery()

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            told.asked += 1
            told.goes_on.wait(60)
            resources = [{"kind": monitors.POD_MONITOR}, {"kind": monitors.PROMETHEUS_RULE}]
            body = json.dumps({"resources": resources, "message": "as told"}).encode()
            self.send_response(told.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serving(Handler) as port:
        host = f"http://127.0.0.1:{port}"
        try:
            yield told, Kube(kubernetes.client.Configuration(host=host), pauses_s=())
        finally:
            told.goes_on.set()


@pytest.mark.parametrize("status", [403, 500, 503])
def test_what_was_known_stays_known_while_discovery_fails(
    discovery: tuple[Discovery, Kube], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    (told, kube), clock = discovery, Clock()
    found = MonitorKinds(kube, clock)
    known, unknown = found.found()
    assert (len(known), unknown) == (2, None)
    told.status = status
    for _ in range(3):
        clock.now_s += ASK_AGAIN_S
        known, unknown = found.found()
        assert len(known) == 2
        assert unknown is not None
        assert unknown.reason == (names.API_DENIED if status == 403 else names.API_UNAVAILABLE)
    assert len(caplog.records) == 1, "said once"
    told.status = 200
    clock.now_s += ASK_AGAIN_S
    assert found.found() == (known, None)


def test_a_discovery_that_hangs_holds_up_the_look_that_asks_and_no_other(
    discovery: tuple[Discovery, Kube],
) -> None:
    (told, kube), clock = discovery, Clock()
    found = MonitorKinds(kube, clock)
    found.found()
    told.goes_on.clear()
    clock.now_s += ASK_AGAIN_S
    one = threading.Thread(target=found.found)
    one.start()
    wait_until(lambda: told.asked == 2)
    assert len(found.found()[0]) == 2, "or this would not end"
    assert one.is_alive()
    told.goes_on.set()
    one.join(60)
    assert told.asked == 2
