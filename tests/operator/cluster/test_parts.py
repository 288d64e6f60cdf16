"""Parts of the running operator against a real API server: the Lease, the key's Secret, events, any resource at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.clock import Clock
from support.cluster.story import wait_until
from support.crd_fields import leaves
from support.kube_api import KubeApi, decode_secret
from support.services import BUDGET_PARAMETER, put, resource, run_resource
from trimtab_operator import names
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.api.status import Resolved
from trimtab_operator.cluster import kinds, tokens
from trimtab_operator.cluster.engines import Engines
from trimtab_operator.cluster.events import BURST, REPEAT_AFTER_S, Recorder
from trimtab_operator.cluster.kube import Kube, NotLeading, Refused, load_credentials
from trimtab_operator.cluster.leadership import LEASE_S, SAFE_S, Leadership
from trimtab_operator.cluster.metrics import OperatorMetrics
from trimtab_operator.cluster.monitors import MonitorObjects
from trimtab_operator.cluster.observe import Key, Observer, RunIndex
from trimtab_operator.cluster.reconcile import Reconciler
from trimtab_operator.cluster.slots import Slots
from trimtab_operator.cluster.store import Store
from trimtab_operator.plan.cluster import Settings
from trimtab_operator.plan.events import Happening
from trimtab_operator.plan.tuner_pod import Tuner

pytestmark = pytest.mark.cluster
Json = dict[str, Any]


def service(kube: Kube, namespace: str, name: str = "chat") -> Json:
    made = resource()
    made["metadata"] = {"name": name, "namespace": namespace}
    return kube.create(made)


# The Lease


def pair(kube: Kube, namespace: str, clock: Clock) -> tuple[Leadership, Leadership]:
    return Leadership(kube, namespace, "lease", "a", now=clock), Leadership(
        kube, namespace, "lease", "b", now=clock
    )


def test_one_of_two_leads_and_stops_writing_before_the_other_may_take_over(
    kube: Kube, namespace: str
) -> None:
    clock = Clock()
    first, second = pair(kube, namespace, clock)
    first.turn()
    second.turn()
    assert (first.leading, second.leading) == (True, False)
    for _ in range(20):  # renewed: the other waits for ever
        clock.now_s += 3
        first.turn()
        second.turn()
        assert (first.leading, second.leading) == (True, False)
    for _ in range(40):  # cut off: never two at a time
        clock.now_s += 0.5
        second.turn()
        assert not (first.leading and second.leading)
    assert (first.leading, second.leading) == (False, True)
    assert SAFE_S < LEASE_S
    with pytest.raises(NotLeading):
        first.guard()
    first.turn()
    assert not first.leading


def test_a_leader_that_ends_hands_over_at_once(kube: Kube, namespace: str) -> None:
    clock = Clock()
    first, second = pair(kube, namespace, clock)
    first.turn()
    second.turn()
    assert (first.leading, second.leading) == (True, False)
    first.hand_over()
    second.turn()
    assert second.leading


# The key


def test_the_key_is_created_once_and_read_from_the_mounted_file_alone(
    kube: Kube, namespace: str, tmp_path: Path
) -> None:
    file = tmp_path / "admin-key.pem"
    first = tokens.obtain(kube, namespace, "key", file)
    assert first is not None
    assert tokens.obtain(kube, namespace, "key", file) is None, "it exists, and is not mounted yet"
    secret = kube.get(kinds.SECRET, namespace, "key")
    assert secret is not None
    assert secret["immutable"] is True
    file.write_bytes(decode_secret(secret, tokens.KEY_ENTRY))
    file.chmod(stat.S_IRUSR)
    second = tokens.obtain(kube, namespace, "key", file)
    assert second is not None
    assert second.public_pem == first.public_pem


# Events


def test_an_event_is_written_once_in_a_while_and_counted_up_after_that(kube: Kube, namespace: str) -> None:
    made, clock = service(kube, namespace), Clock()
    happening = Happening("Warning", "ModelLoadFailed", "no such file")
    recorder = Recorder(kube, "i", now=clock, elapsed=clock)
    for _ in range(50):
        recorder.record(made, happening)
    clock.now_s += REPEAT_AFTER_S + 1
    recorder.record(made, happening)
    Recorder(kube, "another life", now=clock, elapsed=clock).record(made, happening)
    [event] = kube.list(kinds.EVENT, namespace)
    assert event["count"] in (1, 2)
    assert event["involvedObject"]["uid"] == made["metadata"]["uid"]
    assert event["reason"] == "ModelLoadFailed"


def test_an_event_that_could_not_be_written_or_was_forgotten_is_written_when_it_comes_again(
    kube: Kube, namespace: str
) -> None:
    made, clock = service(kube, namespace), Clock()
    happening = Happening("Normal", "QuietTime", "until four")
    recorder = Recorder(kube, "i", now=clock, elapsed=clock)
    nowhere = {**made, "metadata": {**made["metadata"], "namespace": f"{namespace}-2"}}
    recorder.record(nowhere, happening)
    kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"{namespace}-2"}})
    recorder.record(nowhere, happening)
    [event] = kube.list(kinds.EVENT, f"{namespace}-2")
    # As the API server does after an hour.
    kube.delete(kinds.EVENT, f"{namespace}-2", event["metadata"]["name"], event["metadata"]["uid"])
    clock.now_s += REPEAT_AFTER_S + 1
    recorder.record(nowhere, happening)
    [again] = kube.list(kinds.EVENT, f"{namespace}-2")
    assert (again["reason"], again["count"]) == ("QuietTime", 2)


def test_a_resource_that_changes_for_ever_does_not_flood_the_api_server(kube: Kube, namespace: str) -> None:
    made, clock = service(kube, namespace), Clock()
    recorder = Recorder(kube, "i", now=clock, elapsed=clock)
    for index in range(3 * BURST):
        recorder.record(made, Happening("Normal", "ConfigApplied", f"generation {index}"))
    assert len(kube.list(kinds.EVENT, namespace)) == BURST


def test_a_clock_that_is_set_back_silences_no_event(kube: Kube, namespace: str) -> None:
    made, wall, elapsed = service(kube, namespace), Clock(), Clock()
    recorder = Recorder(kube, "i", now=wall, elapsed=elapsed)
    recorder.record(made, Happening("Normal", "ConfigApplied", "generation 1"))
    wall.now_s -= 24 * 3600
    elapsed.now_s += 1
    recorder.record(made, Happening("Normal", "ConfigApplied", "generation 2"))
    assert len(kube.list(kinds.EVENT, namespace)) == 2


# Any resource at all


@pytest.fixture
def reconciler(kube: Kube) -> Callable[[Key], float | None]:
    signer = tokens.Signer.new()
    engines = Engines(signer)
    return Reconciler(
        kube, engines, Observer(kube, engines, RunIndex()), Settings(Resolved(image="engine:1"), signer.public_pem),
        Recorder(kube, "test"), OperatorMetrics(),
    ).reconcile  # fmt: skip


def test_a_service_that_becomes_invalid_gives_its_place_back(kube: Kube, namespace: str) -> None:
    woken: list[Key] = []
    slots, signer = Slots(1, RunIndex(), woken.append), tokens.Signer.new()
    engines = Engines(signer)
    settings = Settings(Resolved(image="engine:1"), signer.public_pem)
    made = Reconciler(
        kube, engines, Observer(kube, engines, RunIndex()), settings, Recorder(kube, "test"), OperatorMetrics(), slots=slots
    )  # fmt: skip

    def ask(name: str) -> str | None:
        run = {"apiVersion": names.API_VERSION, "kind": names.RUN_KIND, "metadata": {"name": name, "namespace": namespace, "uid": name,
               "creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": {"service": name, "evaluator": "Live"}}  # fmt: skip
        return slots.ask(Key(namespace, name), TuningRun.parse(run), 1.0)

    assert ask("chat") is None
    assert ask("other") is not None
    unsupported = resource()
    unsupported["metadata"] = {"name": "chat", "namespace": namespace}
    put(unsupported["spec"], "engine.runtime", "vllm")
    kube.create(unsupported)
    made.reconcile(Key(namespace, "chat"))
    assert woken == [Key(namespace, "other")]
    assert ask("other") is None


def test_a_service_made_again_under_its_name_has_none_of_the_former_ones_monitors(kube: Kube) -> None:
    objects = MonitorObjects(kube)

    def of(uid: str) -> InferenceService:
        metadata = {"name": "chat", "namespace": "team", "uid": uid, "generation": 1}
        return InferenceService.parse(resource() | {"metadata": metadata})

    first = objects.read(of("a"), fresh=True)
    assert objects.read(of("a"), fresh=False) is first
    assert objects.read(of("b"), fresh=False) is not first


FIELDS = sorted(path for path in leaves(names.SERVICE_KIND) if "[]" not in path)
STRANGE: st.SearchStrategy[object] = st.sampled_from(["", "0", "x" * 60, "1h", "0s", "-1", -1, 0, 1, 2**31, 1.5, True, None, [], {}, ["a", "a"], {"name": "x"},
                           {"spec": []}, {"spec": {"containers": [{"name": "engine", "command": ["x"]}]}},
                           {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"cpu": "lots"}}}]}},
                           {"spec": {"volumes": [{"name": "v", "secret": {}}]}}, {"metadata": {"labels": {"a b": "c"}}}])  # fmt: skip


# What the CRD's schema lets through, although it cannot work or is odd.
POD_TEMPLATES: list[object] = [
    {"spec": []},
    {"spec": {"containers": [{"name": "engine", "command": ["x"]}]}},
    {"spec": {"containers": [{"name": "engine"}, {"name": "engine"}]}},
    {"spec": {"containers": [{"name": "other"}]}},
    {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"cpu": "lots"}}}]}},
    {"spec": {"containers": [{"name": "engine", "env": {"A": "B"}}]}},
    {"spec": {"containers": [{"name": "engine", "ports": [{"containerPort": 99999999}]}]}},
    {"spec": {"volumes": [{"name": "v", "secret": {}, "emptyDir": {}}]}},
    {"spec": {"restartPolicy": "Never"}},
    {"spec": {"noSuchField": 1}},
    {"spec": {"nodeSelector": {"a b": "c d"}}},
    {"metadata": {"labels": {"a b": "c"}}},
    {"metadata": {"annotations": {"a": 1}}},
    {"spec": {"terminationGracePeriodSeconds": -5}},
]
ODD = st.sampled_from(
    [
        *(("podTemplate", template) for template in POD_TEMPLATES),
        *((path, text) for path in ("rollout.drainTimeout", "rollout.progressDeadline", "startupTimeout", "slo.ttft")
          for text in ("0.5ms", "1ms", "100000h", "1h1h1h", "0.0000001ms", "2m")),
        *(("model.uri", uri) for uri in ("file:///%zz", "package://x/y", "pvc://claim/a/../b", "hf://a/b", "file:///a b")),
        ("service.annotations", {"a b": "c"}), ("service.type", "LoadBalancer"), ("service.port", 65535),
        ("model.cache.claimName", "Not Valid!"), ("model.cache.sizeLimit", "1Ei"), ("model.servedName", "a" * 200),
        ("security.networkPolicy.ingressFrom", [{"bogus": 1}]), ("security.networkPolicy.ingressFrom", [{"podSelector": {}}]),
        ("security.apiKeySecretRef", {"name": "x"}), ("engine.extraArgs", ["--record-steps", "\n"]), ("engine.image", "a b c"),
        ("engine.imagePullSecrets", [{"name": ""}]), ("podDisruptionBudget.minAvailable", 5), ("replicas", 3), ("suspend", True),
        ("monitoring.podMonitor.labels", {"a b": "c"}), ("engine.runtime", "vllm"), ("rollout.maxSurge", 0),
        ("targetRef", {"apiVersion": "apps/v1", "kind": "Deployment", "name": "x"}), ("engine.kvCacheMemory", "1"),
    ]
)  # fmt: skip


@settings(
    max_examples=int(os.environ.get("TRIMTAB_INVALID_SERVICES", "120")),
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(ODD | st.tuples(st.sampled_from(FIELDS), STRANGE) | ODD, min_size=1, max_size=3))
def test_whatever_is_written_is_refused_by_the_api_server_or_answered_by_a_condition(
    api: KubeApi,
    kube: Kube,
    namespace: str,
    reconciler: Callable[[Key], float | None],
    changes: list[tuple[str, object]],
) -> None:
    made = resource()
    made["metadata"] = {"name": "chat", "namespace": namespace}
    for path, value in changes:
        try:
            put(made["spec"], path, value)
        except (TypeError, AttributeError):
            return  # two changes of which one is no object for the other
    try:
        uid = kube.create(made)["metadata"]["uid"]
    except Refused:
        return
    try:
        reconciler(Key(namespace, "chat"))
        found = kube.get(kinds.SERVICE, namespace, "chat")
        assert found is not None
        conditions = {c["type"]: c for c in found["status"]["conditions"]}
        assert found["status"]["observedGeneration"] == found["metadata"]["generation"]
        if conditions["Stalled"]["status"] == "True":
            assert len(conditions["Stalled"]["message"]) > 20, "says path, value and what is allowed"
    finally:
        kube.delete(kinds.SERVICE, namespace, "chat", uid)
        for kind in kinds.CHILDREN:
            for child in kube.list(kind, namespace, {names.LABEL_SERVICE: "chat"}):
                metadata = child["metadata"]
                kube.delete(kind, namespace, metadata["name"], metadata["uid"])


def test_a_second_reconcile_writes_nothing(
    kube: Kube, namespace: str, reconciler: Callable[[Key], float | None]
) -> None:
    service(kube, namespace)
    reconciler(Key(namespace, "chat"))
    before = {
        k.name: [o["metadata"]["resourceVersion"] for o in kube.list(k, namespace)]
        for k in (*kinds.CHILDREN, kinds.SERVICE)
    }
    for _ in range(3):
        reconciler(Key(namespace, "chat"))
    after = {
        k.name: [o["metadata"]["resourceVersion"] for o in kube.list(k, namespace)]
        for k in (*kinds.CHILDREN, kinds.SERVICE)
    }
    assert after == before
    [made] = kube.list(kinds.SERVICE, namespace)
    assert set(made["metadata"]) & {"annotations", "finalizers"} == set()


# What is read, and when


class Died(BaseException):
    """The operator, once the API server has answered."""


class Looks:
    """A reconciler for one service, what it asks the API server, and the store that it goes by."""

    def __init__(self, api: KubeApi, namespace: str, tuner: Tuner | None = None) -> None:
        signer = tokens.Signer.new()
        engines = Engines(signer)
        self.asked: list[tuple[str, str]] = []
        self.dies_after: tuple[str, str] | None = None
        kube = Kube(load_credentials(str(api.kubeconfig)).configuration, observe=self._observe)
        self.store = Store()
        self.runs = RunIndex()
        self.key = Key(namespace, "chat")
        self._reconciler = Reconciler(
            kube, engines, Observer(kube, engines, self.runs, self.store),
            Settings(Resolved(image="engine:1"), signer.public_pem, tuner=tuner or Tuner()), Recorder(kube, "test"), OperatorMetrics(),
        )  # fmt: skip

    def _observe(self, verb: str, kind: str, status: int) -> None:
        self.asked.append((verb, kind))
        if self.dies_after == (verb, kind):
            raise Died

    def look(self) -> list[tuple[str, str]]:
        """One look → what was asked for it."""
        self.asked.clear()
        self._reconciler.reconcile(self.key)
        return list(self.asked)

    def watch_says_gone(self, live: Json) -> None:
        """A deletion that never happened, or long ago."""
        later = str(int(live["metadata"]["resourceVersion"]) + 1)
        shown = {**live, "metadata": {**live["metadata"], "resourceVersion": later}}
        self.store.delivered(self.key, live["kind"], shown, deleted=True)


@pytest.fixture
def looks(api: KubeApi, kube: Kube, namespace: str) -> Looks:
    """A service that was looked at and is at rest."""
    service(kube, namespace)
    made = Looks(api, namespace)
    made.look()
    return made


def test_a_look_that_finds_nothing_to_do_asks_for_the_service_alone(looks: Looks) -> None:
    assert looks.look() == [("GET", "InferenceService")]
    looks.store.distrust(looks.key)
    fresh = looks.look()
    assert {kind for _, kind in fresh} >= {kind.name for kind in kinds.CHILDREN}
    assert {verb for verb, _ in fresh} == {"GET"}


@pytest.mark.parametrize(
    "last", [("POST", "Event"), ("PATCH", "InferenceService"), ("PATCH", "TuningRun"), ("GET", "TuningRun")]
)
def test_events_are_told_once_although_an_operator_dies_between_them_and_the_status(
    api: KubeApi, kube: Kube, namespace: str, last: tuple[str, str]
) -> None:
    for made in (resource(**{"engine.runtime": "vllm"}), run_resource()):
        made["metadata"]["namespace"] = namespace
        kube.create(made)
    lives = [Looks(api, namespace) for _ in range(3)]
    for life in lives:
        life.runs.put(made)
    lives[0].dies_after = last
    with pytest.raises(Died):
        lives[0].look()
    for life in lives[1:]:
        life.look()
    found = [
        (event["involvedObject"]["kind"], event["reason"], event["count"])
        for event in kube.list(kinds.EVENT, namespace)
    ]
    assert sorted(found) == [
        ("InferenceService", names.UNSUPPORTED, 1),
        ("TuningRun", names.SERVICE_NOT_SERVED, 1),
    ]


SCHEDULE = {kind.name for kind in kinds.NIGHTLY}


def set_tuning(kube: Kube, namespace: str, **tuning: Any) -> None:
    kube.merge(kinds.SERVICE, namespace, "chat", {"spec": {"tuning": tuning}})


def test_a_schedule_costs_requests_only_where_there_is_one(looks: Looks, kube: Kube, namespace: str) -> None:
    looks.store.distrust(looks.key)
    assert not SCHEDULE & {kind for _, kind in looks.look()}, "nobody asked for one"
    set_tuning(kube, namespace, parameters=[BUDGET_PARAMETER], nightly={"schedule": "@daily"})
    assert {("PATCH", kind) for kind in SCHEDULE} <= set(looks.look())
    looks.look()  # the status that was written last
    assert looks.look() == [("GET", "InferenceService")]
    looks.store.distrust(looks.key)
    assert {verb for verb, kind in looks.look() if kind in SCHEDULE} == {"GET"}

    set_tuning(kube, namespace, nightly=None)
    asked = looks.look()
    assert {("DELETE", kind) for kind in (*SCHEDULE, "ServiceAccount")} <= set(asked)
    for kind in (*kinds.NIGHTLY, kinds.SERVICE_ACCOUNT):
        for live in [o for o in kube.list(kind, namespace) if o["metadata"]["name"] == "chat-nightly"]:
            raise AssertionError(f"{kind.name} is left: {live}")


def test_a_binding_to_another_role_is_made_anew_since_it_cannot_be_changed(
    looks: Looks, kube: Kube, namespace: str
) -> None:
    set_tuning(kube, namespace, parameters=[BUDGET_PARAMETER], nightly={"schedule": "@daily"})
    looks.look()
    [binding] = kube.list(kinds.ROLE_BINDING, namespace)
    kube.delete(kinds.ROLE_BINDING, namespace, "chat-nightly", binding["metadata"]["uid"])
    other = {**binding, "roleRef": {**binding["roleRef"], "name": "another"}}
    other["metadata"] = {
        k: binding["metadata"][k] for k in ("name", "namespace", "labels", "ownerReferences")
    }
    looks.store.delivered(looks.key, "RoleBinding", kube.create(other), deleted=False)
    looks.look()
    [binding] = kube.list(kinds.ROLE_BINDING, namespace)
    assert binding["roleRef"]["name"] == "chat-nightly"


def test_a_schedule_that_the_api_server_does_not_take_is_told_and_stops_nothing(
    api: KubeApi, kube: Kube, namespace: str
) -> None:
    service(kube, namespace)
    set_tuning(kube, namespace, parameters=[BUDGET_PARAMETER], nightly={"schedule": "@daily"})
    looks = Looks(api, namespace, Tuner(image=""))
    looks.look()
    found = kube.get(kinds.SERVICE, namespace, "chat")
    assert found is not None
    conditions = {c["type"]: c for c in found["status"]["conditions"]}
    told = conditions[names.TUNING_READY]
    assert (told["status"], told["reason"]) == ("False", names.INVALID_SPEC)
    assert told["message"].startswith("spec.tuning.nightly: ")
    assert "containers[0].image" in told["message"]
    assert conditions[names.STALLED]["status"] == "False"
    assert kube.list(kinds.DEPLOYMENT, namespace)
    assert ("PATCH", "InferenceService") not in looks.look(), "it is told once"


def test_the_first_look_at_a_service_knows_the_pods_that_one_of_its_name_has_left(
    api: KubeApi, kube: Kube, namespace: str
) -> None:
    left = kube.create({"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "engine", "image": "engine:0"}]},
                        "metadata": {"name": "left", "namespace": namespace, "labels": names.selector("chat")}})  # fmt: skip
    wait_until(lambda: kube.list(kinds.POD, namespace, cached=True))
    service(kube, namespace)
    looks = Looks(api, namespace)
    looks.look()
    noted = looks.store.all(looks.key)
    assert noted is not None
    assert noted[("Pod", "left")]["metadata"]["uid"] == left["metadata"]["uid"]


def test_nothing_is_written_because_a_watch_said_so(looks: Looks, kube: Kube, namespace: str) -> None:
    live = kube.get(kinds.CONFIG_MAP, namespace, names.live_config_map("chat"))
    assert live is not None
    looks.watch_says_gone(live)
    assert looks.look() == [("GET", "InferenceService"), ("GET", "ConfigMap")]
    assert kube.get(kinds.CONFIG_MAP, namespace, names.live_config_map("chat")) == live


@pytest.mark.parametrize(("component", "replicas"), [("engine", 1), ("debug", 0)])
def test_a_pod_that_somebody_took_out_by_its_labels_is_no_replica_any_more(
    looks: Looks, kube: Kube, namespace: str, component: str, replicas: int
) -> None:
    labels = {**names.selector("chat"), names.LABEL_COMPONENT: component}
    metadata = {"name": "a", "namespace": namespace, "uid": "a", "resourceVersion": "9", "labels": labels}
    looks.store.delivered(looks.key, "Pod", {"metadata": metadata, "spec": {}, "status": {}}, deleted=False)
    looks.look()
    made = kube.get(kinds.SERVICE, namespace, "chat")
    assert made is not None
    assert made["status"]["replicas"] == replicas


def test_a_name_that_somebody_took_meanwhile_is_not_taken_over(
    looks: Looks, kube: Kube, namespace: str
) -> None:
    ours = kube.get(kinds.CLUSTER_SERVICE, namespace, "chat")
    assert ours is not None
    kube.delete(kinds.CLUSTER_SERVICE, namespace, "chat", ours["metadata"]["uid"])
    theirs = kube.create({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat", "namespace": namespace},
                          "spec": {"ports": [{"port": 1}]}})  # fmt: skip
    looks.watch_says_gone(ours)  # and no watch shows theirs: it has not our label
    looks.look()
    assert kube.get(kinds.CLUSTER_SERVICE, namespace, "chat") == theirs
    found = kube.get(kinds.SERVICE, namespace, "chat")
    assert found is not None
    stalled = next(c for c in found["status"]["conditions"] if c["type"] == "Stalled")
    assert stalled["reason"] == names.NAME_TAKEN


def test_an_edit_during_a_look_does_not_pass_for_our_own_status_write(
    looks: Looks, kube: Kube, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version() -> str:
        found = kube.get(kinds.SERVICE, namespace, "chat")
        assert found is not None
        return str(found["metadata"]["resourceVersion"])

    kube.merge(kinds.SERVICE, namespace, "chat", {"spec": {"replicas": 2}})
    looks.look()
    assert looks.store.is_own(looks.key, version()), "nobody else wrote"
    kube.merge(kinds.SERVICE, namespace, "chat", {"spec": {"replicas": 3}})
    plain = Kube.apply_status

    def edited_before(self: Kube, *arguments: Any, **options: Any) -> Json:
        kube.merge(kinds.SERVICE, namespace, "chat", {"metadata": {"annotations": {"by": "a person"}}})
        return plain(self, *arguments, **options)

    monkeypatch.setattr(Kube, "apply_status", edited_before)
    looks.look()
    assert not looks.store.is_own(looks.key, version())


def test_in_a_namespace_that_is_going_nothing_is_made_and_nothing_complained_of(
    looks: Looks, kube: Kube, namespace: str
) -> None:
    found = kube.get(kinds.NAMESPACE, None, namespace)
    assert found is not None
    kube.delete(kinds.NAMESPACE, namespace, namespace, found["metadata"]["uid"])
    live = kube.get(kinds.CLUSTER_SERVICE, namespace, "chat")
    assert live is not None
    kube.delete(kinds.CLUSTER_SERVICE, namespace, "chat", live["metadata"]["uid"])
    before = kube.get(kinds.SERVICE, namespace, "chat")
    looks.store.distrust(looks.key)
    assert [kind for verb, kind in looks.look() if verb != "GET"] == ["Service"], "tried once, then given up"
    assert kube.get(kinds.SERVICE, namespace, "chat") == before
