"""The Kubernetes objects of a service: safe pods, live fields outside the template, a user's pod template on top."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.services import BUDGET_PARAMETER, resource, service
from trimtab_operator import names, schema
from trimtab_operator.api import InferenceService
from trimtab_operator.api.status import Resolved
from trimtab_operator.plan.live import recommend
from trimtab_operator.plan.manifests import (
    HANDOVER_S,
    Context,
    Hub,
    deployment,
    live_config_map,
    manifests,
    network_policy,
)
from trimtab_operator.plan.overlay import overlay_pod_template

CONTEXT = Context(Resolved(image="engine:1"), admin_public_key="KEY")


def pod(built: InferenceService, context: Context = CONTEXT) -> dict[str, Any]:
    spec: dict[str, Any] = deployment(built, context)["spec"]["template"]["spec"]
    return spec


def engine(built: InferenceService) -> dict[str, Any]:
    container: dict[str, Any] = next(c for c in pod(built)["containers"] if c["name"] == "engine")
    return container


def test_all_children_carry_our_labels_namespace_and_owner() -> None:
    given = resource(replicas=2)
    given["metadata"] = {"name": "chat", "namespace": "team", "uid": "u-1"}
    built = manifests(schema.parse_service(given), CONTEXT)
    assert [m["kind"] for m in built] == [
        "ServiceAccount", "ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment",
    ]  # fmt: skip
    for child in built:
        metadata = child["metadata"]
        assert metadata["namespace"] == "team"
        assert metadata["labels"][names.LABEL_SERVICE] == "chat"
        assert metadata["ownerReferences"][0]["uid"] == "u-1"
        assert metadata["ownerReferences"][0]["controller"] is True
        assert len(metadata["name"]) <= names.MAX_SERVICE_NAME + 7


def test_pods_meet_the_restricted_pod_security_level() -> None:
    # https://kubernetes.io/docs/concepts/security/pod-security-standards/, level restricted
    spec = pod(service(**{"security.apiKeySecretRef": {"name": "k"}, "model.uri": "pvc://claim/x"}))
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    for volume in spec["volumes"]:
        assert set(volume) - {"name"} <= allowed
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
        assert not any("hostPort" in port for port in container["ports"])
    assert spec["automountServiceAccountToken"] is False


def test_whatever_the_engine_writes_to_is_a_volume() -> None:
    writable = {m["mountPath"] for m in engine(service())["volumeMounts"] if not m.get("readOnly")}
    assert writable == {"/tmp", "/var/lib/trimtab"}
    assert {"name": "HOME", "value": "/var/lib/trimtab"} in engine(service())["env"]


def test_mounts_and_volumes_fit_each_other() -> None:
    spec = pod(service(**{"security.apiKeySecretRef": {"name": "k"}, "model.uri": "pvc://claim/x"}))
    assert {m["name"] for c in spec["containers"] for m in c["volumeMounts"]} == {
        v["name"] for v in spec["volumes"]
    }


def test_live_json_is_a_directory_mount_so_that_edits_arrive() -> None:
    mount = next(m for m in engine(service())["volumeMounts"] if m["name"] == "live")
    assert "subPath" not in mount
    arguments = engine(service())["args"]
    assert arguments[arguments.index("--live-config") + 1] == f"{mount['mountPath']}/live.json"


def test_a_live_edit_changes_the_config_map_and_not_the_deployment() -> None:
    before, after = service(), service(**{"engine.maxNumBatchedTokens": 256, "slo.itl": "50ms"})
    assert deployment(before, CONTEXT) == deployment(after, CONTEXT)
    assert live_config_map(before, CONTEXT) != live_config_map(after, CONTEXT)


def test_a_recommendation_reaches_the_config_map_and_not_the_deployment() -> None:
    built = service(tuning={"mode": "Apply", "parameters": [BUDGET_PARAMETER]})
    found = recommend(built.spec, {"max_num_batched_tokens": 128})
    context = Context(CONTEXT.resolved, generation=4, recommendation=found)
    document = json.loads(live_config_map(built, context)["data"]["live.json"])
    assert (document["generation"], document["source"]) == (4, "Recommendation")
    assert document["config"]["max_num_batched_tokens"] == 128
    assert pod(built, context) == pod(built, Context(CONTEXT.resolved))


def test_a_leaving_pod_has_time_for_everything_it_does() -> None:
    spec = pod(service(**{"rollout.drainTimeout": "90s"}))
    container = spec["containers"][0]
    pre_stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    leaving = int(container["args"][container["args"].index("--leaving-time") + 1])
    farewell_s = pre_stop + leaving + 90 + 10
    assert spec["terminationGracePeriodSeconds"] >= farewell_s + HANDOVER_S
    # A liveness probe ends what hangs, and that hands nothing over.
    assert farewell_s <= container["livenessProbe"]["terminationGracePeriodSeconds"] < farewell_s + 60


def test_probes_ask_ready_and_progress_apart() -> None:
    container = engine(service(startupTimeout="60s"))
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 60


@pytest.mark.parametrize(
    ("rollout", "surge", "want"),
    [
        ({}, None, {"maxSurge": 1, "maxUnavailable": 0}),
        ({}, 0, {"maxSurge": 0, "maxUnavailable": 1}),
        ({"strategy": "RollingUpdate", "maxSurge": 2}, 0, {"maxSurge": 2, "maxUnavailable": 0}),
        ({"strategy": "Recreate"}, None, {"maxSurge": 0, "maxUnavailable": "100%"}),
    ],
)
def test_strategy_is_always_of_type_rolling_update(
    rollout: dict[str, Any], surge: int | None, want: Any
) -> None:
    strategy = deployment(service(rollout=rollout), Context(surge=surge))["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": want}


def test_no_disruption_budget_at_one_replica() -> None:
    assert not any(m["kind"] == "PodDisruptionBudget" for m in manifests(service(), CONTEXT))
    assert not any(
        m["kind"] == "PodDisruptionBudget" for m in manifests(service(replicas=2, suspend=True), CONTEXT)
    )


def test_the_admin_port_is_open_to_operator_and_workers_and_in_no_service() -> None:
    built = {m["kind"]: m for m in manifests(service(), CONTEXT)}
    admin = [
        rule for rule in built["NetworkPolicy"]["spec"]["ingress"] if rule["ports"][0]["port"] == "admin"
    ]
    operator, worker = admin[0]["from"]
    assert operator["podSelector"]["matchLabels"][names.LABEL_COMPONENT] == "operator"
    mine = {names.LABEL_SERVICE: "chat", names.LABEL_COMPONENT: "tuning-worker"}
    assert worker == {"podSelector": {"matchLabels": mine}}, "of this service's runs, in its namespace"
    assert [p["name"] for p in built["Service"]["spec"]["ports"]] == ["http"]


HUB = {"model.uri": "hf://organisation/name"}


def test_a_model_from_a_hub_knows_where_and_whom_to_trust() -> None:
    context = Context(CONTEXT.resolved, hub=Hub("https://mirror.example:8443", "PEM"))
    built = service(**HUB)
    data = live_config_map(built, context)["data"]
    assert (data["hub-endpoint"], data["hub-ca.pem"]) == ("https://mirror.example:8443", "PEM")
    container = pod(built, context)["containers"][0]
    mount = next(m for m in container["volumeMounts"] if m["name"] == "live")
    arguments = container["args"]
    assert arguments[arguments.index("--hub-ca-file") + 1] == f"{mount['mountPath']}/hub-ca.pem"
    endpoint = next(e for e in container["env"] if e["name"] == "HF_ENDPOINT")
    reference = {"name": "chat-live", "key": "hub-endpoint", "optional": True}
    assert endpoint["valueFrom"] == {"configMapKeyRef": reference}


def test_another_hub_restarts_nobody() -> None:
    built = service(**HUB)
    other = Context(CONTEXT.resolved, admin_public_key="KEY", hub=Hub("https://other", "PEM"))
    assert deployment(built, CONTEXT) == deployment(built, other)
    assert live_config_map(built, CONTEXT)["data"]["hub-ca.pem"] == "", (
        "the file that the flag names is always there"
    )
    assert "hub-endpoint" not in live_config_map(built, CONTEXT)["data"]


def test_models_of_other_sources_hear_nothing_of_hubs() -> None:
    context = Context(CONTEXT.resolved, hub=Hub("https://mirror", "PEM"))
    assert not {"hub-endpoint", "hub-ca.pem"} & set(live_config_map(service(), context)["data"])
    assert "--hub-ca-file" not in engine(service())["args"]
    assert not any(e["name"].startswith("HF_") for e in engine(service())["env"])


@pytest.mark.parametrize(
    ("changes", "endpoint", "want"),
    [
        pytest.param({}, "https://mirror:8443", None, id="nothing to fetch"),
        pytest.param(HUB, None, [443], id="public hub"),
        pytest.param(HUB, "https://mirror:8443", [443, 8443], id="a mirror"),
        pytest.param(HUB, "http://mirror", [80, 443], id="a mirror without TLS"),
        pytest.param({**HUB, "engine.extraArgs": ["--hub-endpoint=http://mine:81"]}, None, [81, 443], id="its own"),
        pytest.param({**HUB, "engine.extraArgs": ["--hub-endpoint=http://x:99999"]}, None, [80, 443], id="nonsense"),
        pytest.param(
            {**HUB, "podTemplate": {"spec": {"containers": [
                {"name": "engine", "env": [{"name": "HF_ENDPOINT", "value": "https://mine:82"}]}]}}},
            None, [82, 443], id="its own by environment",
        ),
    ],
)  # fmt: skip
def test_pods_reach_out_for_a_download_only(
    changes: dict[str, Any], endpoint: str | None, want: list[int] | None
) -> None:
    policy = network_policy(service(**changes), Context(hub=Hub(endpoint)))["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    ports = [port for rule in policy["egress"] for port in rule["ports"]]
    if want is None:
        assert ports == []
    else:
        names_service = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
        assert ports == names_service + [{"port": port, "protocol": "TCP"} for port in want]


def test_a_cache_with_a_limit_refuses_what_would_evict_the_pod() -> None:
    arguments = engine(service(**HUB, **{"model.cache.sizeLimit": "2Gi"}))["args"]
    assert arguments[arguments.index("--hub-limit") + 1] == str(2 * 2**30)
    assert "--hub-limit" not in engine(service(**{"model.cache.sizeLimit": "2Gi"}))["args"]


def test_users_pod_template_is_laid_over_ours() -> None:
    built = service(
        podTemplate={
            "metadata": {"labels": {"team": "a", names.LABEL_SERVICE: "stolen"}, "annotations": {"x": "y"}},
            "spec": {
                "nodeSelector": {"gpu": "yes"},
                "securityContext": {"runAsUser": 1000},
                "volumes": [
                    {"name": "tmp", "emptyDir": {"medium": "Memory"}},
                    {"name": "extra", "emptyDir": {}},
                ],
                "containers": [
                    {
                        "name": "engine",
                        "resources": {"limits": {"nvidia.com/gpu": "1"}},
                        "env": [{"name": "A", "value": "1"}, {"name": "HOME", "value": "/home/x"}],
                        "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
                    },
                    {"name": "sidecar", "image": "s:1"},
                ],
            },
        }
    )
    template = deployment(built, CONTEXT)["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["labels"][names.LABEL_SERVICE] == "chat", "the selector depends on it"
    assert template["metadata"]["annotations"]["x"] == "y"
    spec = template["spec"]
    assert spec["nodeSelector"] == {"gpu": "yes"}
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert {"name": "tmp", "emptyDir": {"medium": "Memory"}} in spec["volumes"]
    assert [c["name"] for c in spec["containers"]] == ["engine", "sidecar"]
    container = spec["containers"][0]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert container["args"][0] == "serve"
    env = {e["name"]: e for e in container["env"]}
    assert env["A"] == {"name": "A", "value": "1"}
    assert env["HOME"] == {"name": "HOME", "value": "/home/x"}
    assert {m["mountPath"] for m in container["volumeMounts"]} >= {"/extra", "/tmp"}


def test_overlay_changes_neither_side() -> None:
    ours: dict[str, Any] = {
        "spec": {"containers": [{"name": "engine", "env": [{"name": "A", "value": "1"}]}]}
    }
    theirs: dict[str, Any] = {
        "spec": {"containers": [{"name": "engine", "env": [{"name": "B", "value": "2"}]}]}
    }
    merged = overlay_pod_template(ours, theirs)
    merged["spec"]["containers"][0]["env"][0]["value"] = "changed"
    merged["spec"]["containers"][0]["env"][1]["value"] = "changed"
    assert ours["spec"]["containers"][0]["env"] == [{"name": "A", "value": "1"}]
    assert theirs["spec"]["containers"][0]["env"] == [{"name": "B", "value": "2"}]


def test_one_of_entries_replace_ours_as_a_whole() -> None:
    ours = {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}]}
    assert overlay_pod_template(ours, {"env": [{"name": "A", "value": "1"}]}) == {
        "env": [{"name": "A", "value": "1"}]
    }
