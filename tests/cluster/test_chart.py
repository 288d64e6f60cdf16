"""What helm makes of the chart, judged by the API server; and what it refuses."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.cluster.helm import CHART, Helm, HelmError, apply
from support.cluster.kubectl import Kubectl, KubectlError
from support.prometheus import prometheus_binary
from trimtab_operator.cluster.main import add_arguments

Json = dict[str, Any]
RIGHTS = Path(__file__).resolve().parents[2] / "docs" / "operator.md"
DIGEST = "sha256:" + "0123456789abcdef" * 4
MONITORING = ("monitoring.coreos.com/v1/PodMonitor", "monitoring.coreos.com/v1/PrometheusRule")
VALUE_SETS: dict[str, Json] = {
    "the defaults": {},
    "two namespaces": {"watchNamespaces": ["default", "kube-public"]},
    "two replicas by digest": {
        "replicas": 2,
        "images": {name: {"repository": f"registry.example:5000/{name}", "digest": DIGEST} for name in ("engine", "operator", "tuner")},
        "imagePullSecrets": [{"name": "registry"}],
        "fullnameOverride": "retuner",
    },
    "rights and key from elsewhere": {
        "rbac": {"create": False},
        "serviceAccount": {"create": False, "name": "default"},
        "adminKey": {"create": False, "secretName": "from-vault"},
        "crds": {"install": False},
        "networkPolicy": {"enabled": False},
    },
    "a busy platform": {
        "runAsUser": None,
        "fleet": {"configMap": "switch", "tuning": "paused", "maxConcurrentRuns": 2},
        "worker": {"resources": {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}},
        "prometheus": {"url": "https://metrics.example/prometheus", "credentialsSecret": "metrics"},
        "hub": {"endpoint": "https://hub.example", "caConfigMap": "hub-ca"},
        "operator": {"workers": 12, "resyncSeconds": 600, "roomPatienceSeconds": 900, "logLevel": "debug", "logFormat": "text",
                     "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}}}]}},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone",
                                       "whenUnsatisfiable": "ScheduleAnyway"}],
        "priorityClassName": "system-cluster-critical",
        "podLabels": {"team": "models", "app.kubernetes.io/component": "stolen"},
        "podAnnotations": {"sidecar.example/inject": "false"},
        "serviceAccount": {"annotations": {"cloud.example/role": "reader"}},
        "networkPolicy": {
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "apiServerPorts": [6443],
            "extraEgress": [{"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}],
        },
        "monitoring": {"podMonitor": {"enabled": False}, "prometheusRule": {"enabled": False}},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def helm() -> Helm:
    return Helm.find(namespace="trimtab-system")


def only(objects: list[Json], kind: str) -> Json:
    """The one object of that kind."""
    [found] = [o for o in objects if o["kind"] == kind]
    return found


def parsed(container: Json) -> argparse.Namespace:
    """The container's arguments, as the operator reads them; a flag must be whole."""
    command, *flags = container["args"]
    assert command == "run"
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return parser.parse_args(flags)


def test_lint_finds_nothing(helm: Helm) -> None:
    for values in VALUE_SETS.values():
        helm("lint", "--strict", str(CHART), values=values)


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_api_server_takes_every_object_and_the_restricted_level_the_pod(
    name: str, helm: Helm, kubectl: Kubectl
) -> None:
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
    objects = Helm(helm.program, namespace=kubectl.namespace).template(VALUE_SETS[name])
    template = only(objects, "Deployment")["spec"]["template"]
    apply(kubectl, objects, ("--dry-run=server", "--force-conflicts"))
    # Admission judges pods, not Deployments: the pod as its ReplicaSet would make it.
    spec = {**template["spec"], "serviceAccountName": "default"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "operator", **template["metadata"]},
        "spec": spec,
    }
    kubectl.apply(pod, options=("--dry-run=server",))
    spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(KubectlError, match="allowPrivilegeEscalation"):
        kubectl.apply(pod, options=("--dry-run=server",))


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_operator_has_every_flag_that_the_chart_gives_it(name: str, helm: Helm) -> None:
    container = only(helm.template(VALUE_SETS[name]), "Deployment")["spec"]["template"]["spec"]["containers"][
        0
    ]
    arguments = parsed(container)
    assert arguments.image.startswith(("trimtab/engine:", "registry.example:5000/engine@"))
    assert arguments.all_namespaces is (name != "two namespaces")
    given = VALUE_SETS[name].get("worker", {}).get("resources", {"limits": {"memory": "2Gi"}})
    assert arguments.worker_resources["limits"] == given["limits"]


BAD_VALUES: dict[str, tuple[Json, str]] = {
    "a word for a number": ({"replicas": "two"}, "/replicas"),
    "an unknown value": ({"replicaCount": 2}, "replicaCount"),
    "an unknown value further down": ({"images": {"engine": {"name": "x"}}}, "/images/engine"),
    "a short digest": ({"images": {"operator": {"digest": "sha256:12"}}}, "/images/operator/digest"),
    "a tag in the repository": ({"images": {"engine": {"repository": "trimtab/engine:1"}}}, "/images/engine/repository"),
    "no name of a namespace": ({"watchNamespaces": ["a", "Team_B"]}, "/watchNamespaces/1"),
    "a namespace twice": ({"watchNamespaces": ["a", "a"]}, "/watchNamespaces"),
    "a fourth state": ({"monitoring": {"podMonitor": {"enabled": "maybe"}}}, "/monitoring/podMonitor/enabled"),
    "root": ({"runAsUser": 0}, "/runAsUser"),
    "lots of memory": ({"resources": {"limits": {"memory": "lots"}}}, "/resources/limits/memory"),
    "another's account without a name": ({"serviceAccount": {"create": False}}, "/serviceAccount/name"),
    "a level that is not logged": ({"operator": {"logLevel": "chatty"}}, "/operator/logLevel"),
    "an address without a scheme": ({"prometheus": {"url": "prometheus:9090"}}, "/prometheus/url"),
    "a switch with a fourth position": ({"fleet": {"tuning": "off"}}, "/fleet/tuning"),
    "a worker of no size": ({"worker": {"resources": {"requests": {"cpu": "much"}}}}, "/worker/resources/requests/cpu"),
    "no look ever": ({"operator": {"resyncSeconds": 0}}, "/operator/resyncSeconds"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_VALUES)
def test_a_bad_value_is_refused_by_its_path(what: str, helm: Helm) -> None:
    values, path = BAD_VALUES[what]
    with pytest.raises(HelmError, match=re.escape(path)):
        helm.template(values)


@pytest.mark.usefixtures("monitoring_kinds")
def test_the_api_server_takes_monitors_and_rules_and_promtool_the_alerts(
    helm: Helm, kubectl: Kubectl, tmp_path: Path
) -> None:
    values = {
        "crds": {"install": False},
        "monitoring": {"prometheusRule": {"runbookBase": "https://runbooks.example/#"}},
    }
    objects = Helm(helm.program, namespace=kubectl.namespace).template(values, api_versions=MONITORING)
    apply(kubectl, objects, ("--dry-run=server", "--force-conflicts"))
    rule = only(objects, "PrometheusRule")
    (tmp_path / "rules.json").write_text(json.dumps(rule["spec"]))
    promtool = prometheus_binary("promtool")
    done = subprocess.run(
        [promtool, "check", "rules", "--lint=all", "--lint-fatal", str(tmp_path / "rules.json")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for alert in rule["spec"]["groups"][0]["rules"]:
        assert alert["annotations"]["runbook_url"] == f"https://runbooks.example/#{alert['alert'].lower()}"
        assert {"summary", "description"} < set(alert["annotations"])


def test_the_same_values_give_the_same_text(helm: Helm) -> None:
    first, second = (
        helm("template", "x", str(CHART), values=VALUE_SETS["a busy platform"]) for _ in range(2)
    )
    assert first == second


def test_monitors_and_rules_are_made_where_their_kinds_exist(helm: Helm) -> None:
    kinds = {"PodMonitor", "PrometheusRule"}

    def made(values: Json, api_versions: tuple[str, ...]) -> set[str]:
        return {o["kind"] for o in helm.template(values, api_versions=api_versions)} & kinds

    def said(enabled: object) -> Json:
        return {"monitoring": {"podMonitor": {"enabled": enabled}, "prometheusRule": {"enabled": enabled}}}

    assert made({}, ()) == set()
    assert made({}, MONITORING[:1]) == {"PodMonitor"}
    assert made(said("auto"), MONITORING) == kinds
    assert made(said(False), MONITORING) == set()
    assert made(said(True), ()) == kinds


def test_a_person_s_labels_reach_monitors_and_pods_but_change_no_selector(helm: Helm) -> None:
    values = {
        "podLabels": {"team": "models", "app.kubernetes.io/component": "stolen"},
        "monitoring": {"podMonitor": {"labels": {"release": "prometheus"}}},
    }
    objects = helm.template(values, api_versions=MONITORING)
    deployment, monitor = only(objects, "Deployment"), only(objects, "PodMonitor")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels["team"] == "models"
    for selector in (deployment["spec"]["selector"], monitor["spec"]["selector"]):
        assert selector["matchLabels"].items() <= labels.items()
    assert labels["app.kubernetes.io/component"] == "operator", "engines' NetworkPolicies admit by it"
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_a_budget_and_network_policy_protect_two_operators(helm: Helm) -> None:
    objects = helm.template({"replicas": 2})
    labels = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert only(objects, kind)["spec"][field]["matchLabels"].items() <= labels.items()
    assert "PodDisruptionBudget" not in {o["kind"] for o in helm.template({"replicas": 1})}


def test_an_install_says_what_a_missing_prometheus_means(helm: Helm) -> None:
    def notes(url: str) -> str:
        values = {"prometheus": {"url": url}}
        return helm("install", "x", str(CHART), "--dry-run=client", values=values).partition("NOTES:")[2]

    assert "SLOMet stays Unknown" in notes("")
    assert "SLOMet" not in notes("http://prometheus:9090")


def test_images_are_those_of_the_values_and_a_digest_wins(helm: Helm) -> None:
    values = {"images": {
        "engine": {"repository": "r.example/e", "tag": "9", "digest": DIGEST},
        "operator": {"repository": "r.example/o", "tag": "9"},
    }}  # fmt: skip
    container = only(helm.template(values), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "r.example/o:9"
    assert f"--image=r.example/e@{DIGEST}" in container["args"]


def test_the_chart_s_crds_are_the_checkout_s_and_are_kept(helm: Helm) -> None:
    kept = {o["metadata"]["name"]: o["metadata"].get("annotations") for o in helm.template() if o["kind"] == "CustomResourceDefinition"}  # fmt: skip
    assert len(kept) == 2
    keep = {"helm.sh/resource-policy": "keep", "argocd.argoproj.io/sync-options": "Prune=false,Delete=false"}
    assert all(a == keep for a in kept.values())
    loose = helm.template({"crds": {"keep": False}})
    assert [o for o in loose if "annotations" in o["metadata"]] == []
    assert "CustomResourceDefinition" not in {o["kind"] for o in helm.template({"crds": {"install": False}})}


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://prometheus.monitoring:9090", 9090),
        ("https://metrics.example/prometheus", 443),
        ("http://p/", 80),
    ],
)
def test_prometheus_is_reached_with_its_credentials(helm: Helm, url: str, port: int) -> None:
    objects = helm.template({"prometheus": {"url": url, "credentialsSecret": "metrics"}})
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    arguments = parsed(pod["containers"][0])
    assert arguments.prometheus_url == url
    mounts = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert volumes[mounts[str(arguments.prometheus_credentials)]]["secret"] == {
        "secretName": "metrics",
        "optional": True,
    }
    allowed = [p["port"] for rule in only(objects, "NetworkPolicy")["spec"]["egress"] for p in rule["ports"]]
    assert port in allowed
    assert "--prometheus" not in str(helm.template())


def documented(where: str) -> set[tuple[str, str]]:
    """Resources and verbs of the table in docs/operator.md."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in RIGHTS.read_text().splitlines() if line.startswith("| ")]  # fmt: skip
    ours = [row for row in rows if row[0] == where and len(row) == 3]
    assert ours, f"no row says: {where}"
    return {
        (resource, verb)
        for _, resources, verbs in ours
        for resource in re.findall(r"`([a-z/]+)`", resources)
        for verb in verbs.split(", ")
    }


def granted(roles: list[Json]) -> set[tuple[str, str]]:
    """The same of rendered roles."""
    return {
        (resource, verb)
        for role in roles
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_chart_s_rights_are_the_documented_ones(helm: Helm) -> None:
    everywhere = helm.template({"rbac": {"aggregate": False}})
    home = [o for o in everywhere if o["kind"] == "Role"]
    assert granted(home) == documented("its own namespace")
    assert granted([only(everywhere, "ClusterRole")]) == documented("each served namespace")
    [named] = [rule for role in home for rule in role["rules"] if rule["resources"] == ["configmaps"]]
    assert len(named["resourceNames"]) == 1

    some = helm.template({"watchNamespaces": ["a", "b"]})
    assert not {"ClusterRole", "ClusterRoleBinding"} & {o["kind"] for o in some}
    for place in ("a", "b"):
        there = [o for o in some if o["kind"] == "Role" and o["metadata"]["namespace"] == place]
        assert granted(there) == documented("each served namespace")
    keyless = helm.template({"adminKey": {"create": False, "secretName": "from-vault"}})
    assert "secrets" not in {resource for resource, _ in granted([o for o in keyless if o["kind"] == "Role"])}


def test_no_role_has_a_wildcard_and_no_rule_reads_secrets(helm: Helm) -> None:
    for values in VALUE_SETS.values():
        roles = [o for o in helm.template(values) if o["kind"] in ("Role", "ClusterRole")]
        assert "*" not in str([role["rules"] for role in roles])
        assert {verb for resource, verb in granted(roles) if resource == "secrets"} <= {"create"}


def test_the_fleet_s_switch_is_a_person_s_unless_a_value_says_otherwise(helm: Helm) -> None:
    assert "ConfigMap" not in {o["kind"] for o in helm.template()}
    for values, name in (
        ({"tuning": "paused"}, "trimtab-fleet"),
        ({"tuning": "active", "configMap": "switch"}, "switch"),
    ):
        objects = helm.template({"fleet": values})
        switch = only(objects, "ConfigMap")
        assert switch["metadata"]["name"] == name
        assert switch["data"] == {"tuning": values["tuning"]}
        container = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
        assert parsed(container).fleet_config_map == name
        [rule] = [
            rule
            for o in objects
            if o["kind"] == "Role"
            for rule in o["rules"]
            if rule["resources"] == ["configmaps"]
        ]
        assert rule["resourceNames"] == [name]
