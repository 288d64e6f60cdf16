"""A Shadow run's own engines: the service's very pods, which nothing that picks those picks, and which give way to them."""

from __future__ import annotations

import base64
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.pods import T0, moment, pod
from support.services import BUDGET_PARAMETER, flag, resource, run_resource
from trimtab_engine.server.openai.auth import ApiKeys
from trimtab_operator import names, schema, support
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.plan import alerts, pods, shadow
from trimtab_operator.plan import monitors as plan_monitors
from trimtab_operator.plan.drift import drift, stamped
from trimtab_operator.plan.manifests import Context, hash_of, manifests, pod_template
from trimtab_operator.plan.rollout import Replica

Json = dict[str, Any]
CONTEXT = Context(operator_namespace="home")
SECRET = names.shadow_secret("chat-1", "run-uid")
TUNING = {"mode": "Recommend", "parameters": [BUDGET_PARAMETER], "limits": {"extraReplicas": 2}}
POD_TEMPLATE = {
    "metadata": {"labels": {"app": "chat", names.LABEL_INSTANCE: "mine"}, "annotations": {"note": "kept"}},
    "spec": {
        "priorityClassName": "first",
        "nodeSelector": {"pool": "gpu"},
        "containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": 2}}}],
    },
}


def chat(**changes: object) -> InferenceService:
    given = resource(**{"replicas": 3, "tuning": TUNING, "podTemplate": POD_TEMPLATE, **changes})
    given["metadata"] |= {"namespace": "default", "uid": "service-uid"}
    return schema.parse_service(given)


def run(name: str = "chat-1", uid: str = "run-uid", status: Json | None = None) -> TuningRun:
    built = run_resource(evaluator="Shadow")
    built["metadata"] |= {"name": name, "namespace": "default", "uid": uid, "creationTimestamp": moment(0)}
    built["status"] = status or {}
    return schema.parse_run(built)


def template(service: InferenceService) -> Json:
    """As the service's pods were made from."""
    return pod_template(service, CONTEXT.resolved)


def own(service: InferenceService, **changes: Any) -> list[Replica]:
    """The service's pods, all well, with changes to one."""
    well = Replica("chat-engine-a", hash_of(template(service)), "Running", ready=True, created_s=T0)
    return [replace(well, **changes), replace(well, name="chat-engine-b")]


def made(service: InferenceService, of: TuningRun, replicas: int = 2) -> dict[tuple[str, str], Json]:
    """The objects as they stand once they were applied."""
    found = shadow.manifests(service, of, template(service), replicas, CONTEXT)
    return {(item["kind"], item["metadata"]["name"]): stamped(item) for item in found}


def shadow_pod(of: TuningRun, name: str, **state: Any) -> Json:
    built = pod(name, **state)
    built["metadata"]["labels"] = names.shadow_labels(of.spec.service, of.name)
    return built


def planned(
    service: InferenceService,
    of: TuningRun | None,
    standing: shadow.Standing | None = None,
    replicas: list[Replica] | None = None,
    *,
    held: bool = False,
) -> shadow.Plan:
    seen = standing or shadow.Standing()
    return shadow.plan(
        service,
        of,
        seen,
        template(service),
        own(service) if replicas is None else replicas,
        {found["metadata"]["name"]: pods.replica(found) for found in seen.pods},
        CONTEXT,
        held=held,
    )


def by_kind(service: InferenceService, of: TuningRun) -> dict[str, Json]:
    return {kind: item for (kind, _), item in made(service, of).items()}


# What they are


def test_they_are_the_services_own_pods_but_for_labels_key_rank_and_farewell() -> None:
    service = chat(**{"security.apiKeySecretRef": {"name": "keys"}})
    theirs, mine = template(service), by_kind(service, run())["Deployment"]["spec"]["template"]
    before = copy.deepcopy(theirs)
    engine, usual = mine["spec"]["containers"][0], theirs["spec"]["containers"][0]
    assert flag(usual["args"], "--api-keys") == "/etc/trimtab/api-keys/keys.yaml"
    assert flag(engine["args"], "--api-keys") == "/etc/trimtab/api-keys/api-keys.json"
    engine["args"][engine["args"].index("--api-keys") + 1] = "/etc/trimtab/api-keys/keys.yaml"
    assert engine["args"] == usual["args"]
    same = ("image", "env", "resources", "securityContext", "ports", "startupProbe", "livenessProbe")
    assert {key: engine.get(key) for key in same} == {key: usual.get(key) for key in same}
    assert sorted(engine["volumeMounts"], key=str) == sorted(usual["volumeMounts"], key=str)
    assert {"name": "live", "configMap": {"name": "chat-live"}} in mine["spec"]["volumes"]
    assert "keys" not in json.dumps([v for v in mine["spec"]["volumes"] if v.get("secret", {}).get("secretName") != SECRET])  # fmt: skip
    kept = set(theirs["spec"]) - {
        "priorityClassName",
        "terminationGracePeriodSeconds",
        "containers",
        "volumes",
    }
    assert {key: mine["spec"][key] for key in kept} == {key: theirs["spec"][key] for key in kept}
    assert "priorityClassName" not in mine["spec"], "a measurement displaces nobody"
    assert mine["spec"]["terminationGracePeriodSeconds"] == shadow.GRACE_S
    assert "lifecycle" not in engine
    assert mine["metadata"]["annotations"]["note"] == "kept"
    assert theirs == before, "the service's own template is not touched"


def test_without_keys_of_the_service_they_ask_for_one_all_the_same() -> None:
    service = chat()
    engine = by_kind(service, run())["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert flag(template(service)["spec"]["containers"][0]["args"], "--api-keys") is None
    assert flag(engine["args"], "--api-keys") == "/etc/trimtab/api-keys/api-keys.json"
    assert [m["name"] for m in engine["volumeMounts"] if m["mountPath"] == "/etc/trimtab/api-keys"] == [
        shadow.KEYS_VOLUME
    ]


def selects(selector: Json, labels: Json) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def test_nothing_that_picks_the_services_pods_picks_theirs() -> None:
    service = chat()
    labels = by_kind(service, run())["Deployment"]["spec"]["template"]["metadata"]["labels"]
    children = {item["kind"]: item for item in manifests(service, CONTEXT)}
    usual = children["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = {
        "Service": children["Service"]["spec"]["selector"],
        "PodDisruptionBudget": children["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        "NetworkPolicy": children["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        "Deployment": children["Deployment"]["spec"]["selector"]["matchLabels"],
        "PodMonitor": plan_monitors.pod_monitor(service)["spec"]["selector"]["matchLabels"],
        "scale": names.selector(service.name),  # status.scale.selector
        # What users write: a label of podTemplate's, or one of ours alone, as examples/gpu.yaml does for spreading.
        "theirs": {"app": "chat"},
        "spread": {names.LABEL_SERVICE: "chat"},
        "instance": {names.LABEL_INSTANCE: usual[names.LABEL_INSTANCE]},
    }
    assert all(selects(selector, usual) for selector in selectors.values()), "the test can fail"
    assert [name for name, selector in selectors.items() if selects(selector, labels)] == []


def test_what_picks_theirs_picks_no_pod_of_the_service_and_none_of_another_run() -> None:
    service = chat()
    first, second = by_kind(service, run()), by_kind(service, run("chat-2"))
    mine = first["Deployment"]["spec"]["template"]["metadata"]["labels"]
    others = [
        template(service)["metadata"]["labels"],
        second["Deployment"]["spec"]["template"]["metadata"]["labels"],
    ]
    for selector in (
        first["Service"]["spec"]["selector"],
        first["Deployment"]["spec"]["selector"]["matchLabels"],
        first["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selects(selector, mine)
        assert not any(selects(selector, labels) for labels in others)


def test_alerts_do_not_count_them_whatever_their_run_is_called() -> None:
    # A Deployment's long name is cut to 58 characters in its pods' names, and then has as many parts as the service's own.
    name = "a" * 34
    service = schema.parse_service({**resource(), "metadata": {"name": name, "namespace": "default"}})
    assert f'pod!~"{name}-engine-shadow-.*"' in json.dumps(alerts.groups(service)).replace('\\"', '"')


def test_only_the_runs_worker_may_ask_them_and_only_the_operator_reaches_their_admin_port() -> None:
    worker = {
        "podSelector": {"matchLabels": {names.LABEL_COMPONENT: "tuning-worker", names.LABEL_RUN: "chat-1"}}
    }
    open_to_all = by_kind(chat(), run())["NetworkPolicy"]["spec"]
    serving, admin = open_to_all["ingress"]
    assert serving == {"ports": [{"port": "http", "protocol": "TCP"}], "from": [worker]}
    assert [port["port"] for port in admin["ports"]] == ["admin"]
    assert admin["from"][0]["podSelector"]["matchLabels"][names.LABEL_COMPONENT] == "operator"
    assert (open_to_all["policyTypes"], open_to_all["egress"]) == (["Ingress", "Egress"], [])
    # Who wants no policy for the service still gets one for what is nobody's address.
    without = by_kind(chat(**{"security.networkPolicy": {"enabled": False}}), run())["NetworkPolicy"]["spec"]
    assert (without["policyTypes"], without["ingress"]) == (["Ingress"], open_to_all["ingress"])


def test_everything_belongs_to_the_run_and_is_found_by_its_service() -> None:
    of = run()
    objects = [*by_kind(chat(), of).values(), shadow.secret(chat(), of, "k")]
    for item in objects:
        assert item["metadata"]["name"] == (SECRET if item["kind"] == "Secret" else "chat-1-shadow")
        [owner] = item["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("TuningRun", "run-uid", True)
        assert names.service_of_label(item["metadata"]["labels"][names.LABEL_SERVICE]) == "chat"


@pytest.mark.parametrize(("replicas", "extra", "want"), [(3, 2, 2), (2, 5, 2), (1, 1, 1), (4, 1, 1)])
def test_there_are_as_many_as_allowed_and_never_more_than_the_service_has(
    replicas: int, extra: int, want: int
) -> None:
    service = chat(replicas=replicas, tuning={**TUNING, "limits": {"extraReplicas": extra}})
    found = planned(service, run())
    assert found.size == want
    assert found.changes.apply[-1]["spec"]["replicas"] == want


# When they are


def test_they_are_made_with_key_and_policy_first_and_then_left_alone() -> None:
    service, of = chat(), run()
    first = planned(service, of)
    assert first.keys
    assert [item["kind"] for item in first.changes.apply] == ["NetworkPolicy", "Service", "Deployment"]
    assert first.waits == (names.SHADOW_NOT_READY, "0 of 2 shadow pods are ready")
    standing = shadow.Standing(
        made(service, of), tuple(shadow_pod(of, f"s{i}", ready_since=5) for i in (1, 2))
    )
    second = planned(service, of, standing)
    assert (second.changes.apply, second.changes.delete, second.keys) == ((), (), False)
    assert (second.pods, second.waits, second.ended) == (frozenset({"s1", "s2"}), None, None)
    for key, item in standing.objects.items():
        assert drift(made(service, of)[key], item) == ()


@pytest.mark.parametrize(
    ("address", "url"), [("10.96.0.9", "http://10.96.0.9:8000"), ("fd00::9", "http://[fd00::9]:8000")]
)
def test_their_address_is_told_once_there_is_one(address: str, url: str) -> None:
    service, of = chat(), run()
    objects = made(service, of)
    assert planned(service, of, shadow.Standing(objects)).engines is None
    objects["Service", "chat-1-shadow"]["spec"]["clusterIP"] = address
    found = planned(service, of, shadow.Standing(objects)).engines
    assert found == shadow.Engines(2, url, SECRET, "api-key")


def test_a_key_that_a_former_run_of_that_name_had_is_never_taken_for_this_one_s() -> None:
    """It goes with that run, and engines that mount it would wait for it for ever."""
    of = run(uid="new")
    mine = shadow.secret(chat(), of, "k")["metadata"]["name"]
    assert mine != SECRET
    volumes = by_kind(chat(), of)["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert [v["secret"]["secretName"] for v in volumes if v["name"] == shadow.KEYS_VOLUME] == [mine]
    longest = names.shadow_secret("r" * names.MAX_RUN_NAME, "u")
    assert len(longest) <= 253


def test_the_key_is_given_as_engines_read_it_and_as_a_worker_shows_it(tmp_path: Path) -> None:
    data = shadow.secret(chat(), run(), "k-1")["data"]
    content = {name: base64.b64decode(text).decode() for name, text in data.items()}
    assert content["api-key"] == "k-1"
    file = tmp_path / "api-keys.json"
    file.write_text(content["api-keys.json"])
    assert ApiKeys(file).tenant("Bearer k-1") == "shadow"


def test_an_autoscaler_does_not_change_how_many_there_are_once_a_run_has_begun() -> None:
    of = run()
    standing = shadow.Standing(made(chat(), of))
    found = planned(chat(replicas=1), of, standing)
    assert (found.size, found.changes.apply) == (2, ())


def test_who_scales_them_by_hand_is_put_right() -> None:
    of = run()
    objects = made(chat(), of)
    objects["Deployment", "chat-1-shadow"]["spec"]["replicas"] = 5
    [applied] = planned(chat(), of, shadow.Standing(objects)).changes.apply
    assert applied["spec"]["replicas"] == 2


@pytest.mark.parametrize("noted", [None, "", "x", "-1", "\u0663", "9" * 6])
def test_a_number_that_no_operator_noted_is_not_believed(noted: str | None) -> None:
    of = run()
    objects = made(chat(), of)
    marks = objects["Deployment", "chat-1-shadow"]["metadata"]["annotations"]
    del marks[names.ANNOTATION_ENGINES]
    marks |= {} if noted is None else {names.ANNOTATION_ENGINES: noted}
    assert planned(chat(), of, shadow.Standing(objects)).size == 2
    # One that could be a number is held against what the service allows.
    marks[names.ANNOTATION_ENGINES] = "9"
    ended = planned(chat(), of, shadow.Standing(objects)).ended
    assert ended is not None
    assert "spec.tuning.limits.extraReplicas: 2 is not allowed; at least 9" in ended[1]


def resting(service: InferenceService, of: TuningRun) -> dict[tuple[str, str], Json]:
    """As they stand while the run is held."""
    found = made(service, of)
    found["Service", "chat-1-shadow"]["spec"]["clusterIP"] = "10.96.0.9"
    for item in planned(service, of, shadow.Standing(found), held=True).changes.apply:
        found[item["kind"], item["metadata"]["name"]] = item
    return found


def test_a_run_that_is_held_has_no_pods_and_finds_address_and_number_again() -> None:
    service, of = chat(), run()
    standing = shadow.Standing(made(service, of))
    held = planned(service, of, standing, held=True)
    assert (held.changes.delete, held.waits, held.ended, held.keys) == ((), None, None, False)
    assert [(item["kind"], item["spec"]["replicas"]) for item in held.changes.apply] == [("Deployment", 0)]
    rest = shadow.Standing(resting(service, of))
    again = planned(service, of, rest, held=True)
    assert (again.changes.apply, again.changes.delete) == ((), ())
    # Whatever the service has become meanwhile, the worker counts on what it was told.
    for after in (service, chat(replicas=1)):
        found = planned(after, of, rest)
        assert [item["spec"]["replicas"] for item in found.changes.apply] == [2]
        assert (found.size, found.keys) == (2, False)
        assert found.engines == shadow.Engines(2, "http://10.96.0.9:8000", SECRET, "api-key")
        assert found.waits == (names.SHADOW_NOT_READY, "0 of 2 shadow pods are ready")


def test_a_run_that_is_held_before_it_begins_gets_nothing() -> None:
    found = planned(chat(), run(), held=True)
    assert (found.changes.apply, found.waits, found.ended) == ((), None, None)


def test_what_a_held_run_measured_is_void_once_the_services_pods_are_others() -> None:
    of = run()
    ended = planned(chat(**{"engine.maxModelLen": 512}), of, shadow.Standing(resting(chat(), of)), held=True)
    assert ended.ended is not None
    assert ended.ended[0] == names.SERVICE_CHANGED


def test_a_held_run_has_no_place_to_give_and_goes_on_once_the_service_has_its_own() -> None:
    service, of = chat(), run()
    rest, looking = shadow.Standing(resting(service, of)), own(service, **UNPLACED)
    held = planned(service, of, rest, looking, held=True)
    assert (held.ended, held.changes.apply, held.changes.delete) == (None, (), ())
    released = planned(service, of, rest, looking)
    assert (released.ended, released.changes.apply, released.changes.delete) == (None, (), ())
    assert released.waits is not None
    assert "the service's own pods come first" in released.waits[1]


def test_a_pod_without_a_place_is_told_by_the_schedulers_words() -> None:
    service, of = chat(), run()
    listed = (shadow_pod(of, "s1", ready_since=5), shadow_pod(of, "s2", unschedulable_since=5))
    found = planned(service, of, shadow.Standing(made(service, of), listed))
    assert found.waits is not None
    assert found.waits == (
        names.SHADOW_NOT_READY,
        "1 of 2 shadow pods are ready; s2: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    )


def test_pods_that_may_not_be_made_are_told_by_the_deployments_words() -> None:
    service, of = chat(), run()
    objects = made(service, of)
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    objects["Deployment", "chat-1-shadow"]["status"] = {"conditions": [failure]}
    found = planned(service, of, shadow.Standing(objects))
    assert found.waits == (names.SHADOW_NOT_READY, "0 of 2 shadow pods are ready; exceeded quota: gpus")


@pytest.mark.parametrize("gone", [None, run("chat-2", "other-uid")])
def test_they_go_when_their_run_may_act_no_longer(gone: TuningRun | None) -> None:
    service, of = chat(), run()
    found = planned(service, gone, shadow.Standing(made(service, of)))
    assert {(item["kind"], item["metadata"]["name"]) for item in found.changes.delete} == set(
        made(service, of)
    )


def test_only_what_is_a_shadow_is_removed() -> None:
    service, of = chat(), run()
    objects = made(service, of)
    another = copy.deepcopy(objects["NetworkPolicy", "chat-1-shadow"])
    another["metadata"]["name"] = "chat-1-worker"  # of the same run
    theirs = copy.deepcopy(objects["Service", "chat-1-shadow"])
    theirs["metadata"] |= {"name": "x-shadow", "ownerReferences": []}
    leaving = objects["Deployment", "chat-1-shadow"]
    leaving["metadata"]["deletionTimestamp"] = moment(9)
    objects |= {("NetworkPolicy", "chat-1-worker"): another, ("Service", "x-shadow"): theirs}
    found = planned(service, None, shadow.Standing(objects))
    assert [(item["kind"], item["metadata"]["name"]) for item in found.changes.delete] == [
        ("NetworkPolicy", "chat-1-shadow"),
        ("Service", "chat-1-shadow"),
    ]


def test_a_name_that_somebody_else_holds_is_left_alone() -> None:
    service, of = chat(), run()
    objects = made(service, of)
    objects["Service", "chat-1-shadow"]["metadata"]["ownerReferences"] = []
    del objects["Deployment", "chat-1-shadow"]
    found = planned(service, of, shadow.Standing(objects))
    assert [finding.path for finding in found.changes.taken] == ["Service/chat-1-shadow"]
    assert found.changes.delete == ()
    assert not found.keys


def test_what_a_former_run_of_the_name_has_left_is_waited_for() -> None:
    service = chat()
    found = planned(service, run(uid="new"), shadow.Standing(made(service, run(uid="old"))))
    assert set(found.changes.waiting) == {f"{kind}/chat-1-shadow" for kind in shadow.KINDS}
    assert found.changes.apply == ()
    assert not found.keys


# The service comes first

UNPLACED = {"ready": False, "phase": "Starting", "unschedulable_since_s": T0, "message": "no GPU is free"}


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        (UNPLACED, names.MADE_ROOM, "chat-engine-a: no GPU is free"),
        ({"ready": False}, None, ""),
        ({"template_hash": "old"}, None, ""),
    ],
)
def test_a_run_makes_room_for_a_pod_of_the_service_that_has_no_place(
    changes: Json, reason: str | None, words: str
) -> None:
    service, of = chat(), run()
    found = planned(service, of, shadow.Standing(made(service, of)), own(service, **changes))
    assert (None if found.ended is None else found.ended[0]) == reason
    if found.ended is not None:
        assert words in found.ended[1]
        assert len(found.changes.delete) == len(shadow.KINDS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine.image": "engine:2"}, "another image"),
        ({"engine.maxModelLen": 512}, "another value of a field that restarts"),
        (
            {"tuning": {**TUNING, "limits": {"extraReplicas": 1}}},
            "spec.tuning.limits.extraReplicas: 1 is not",
        ),
        ({"tuning": {**TUNING, "limits": {}}}, "spec.tuning.limits.extraReplicas: 0 is not allowed"),
        ({"tuning": {**TUNING, "mode": "Off"}}, "spec.tuning.mode: 'Off' is not allowed"),
        ({"suspend": True}, "no replicas"),
    ],
)
def test_a_run_is_over_when_its_engines_are_no_longer_the_services_or_not_allowed(
    changes: Json, words: str
) -> None:
    of = run()
    found = planned(chat(**changes), of, shadow.Standing(made(chat(), of)))
    assert found.ended is not None
    assert found.ended[0] == names.SERVICE_CHANGED
    assert words in found.ended[1]
    assert len(found.changes.delete) == len(shadow.KINDS)


def test_a_live_edit_of_the_service_ends_no_run() -> None:
    of = run()
    found = planned(chat(**{"engine.maxNumBatchedTokens": 512}), of, shadow.Standing(made(chat(), of)))
    assert (found.ended, found.changes.apply) == (None, ())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"template_hash": "old"}, "1 of the service's own pods are still to be replaced"),
        (UNPLACED, "the service's own pods come first: chat-engine-a: no GPU is free"),
    ],
)
def test_a_run_does_not_begin_before_the_service_has_what_it_needs(changes: Json, words: str) -> None:
    service = chat()
    found = planned(service, run(), replicas=own(service, **changes))
    assert found.waits == (names.SHADOW_NOT_READY, words)
    assert (found.size, found.changes.apply) == (0, ())


@pytest.mark.parametrize(
    ("tuning", "path"),
    [
        ({**TUNING, "mode": "Off"}, "spec.tuning.mode"),
        ({**TUNING, "limits": {}}, "spec.tuning.limits.extraReplicas"),
    ],
)
def test_the_service_has_to_allow_them(tuning: Json, path: str) -> None:
    found = planned(chat(tuning=tuning), run())
    assert found.ended is not None
    assert path in found.ended[1]


def test_local_mode_which_adds_no_engines_says_so() -> None:
    assert [found.path for found in support.later(chat(), "local")] == [shadow.LIMIT]
    assert support.later(chat(), "cluster") == ()
