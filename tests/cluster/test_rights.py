"""The operator with exactly the rights of its account, judged by the API server's own audit log, and under the `restricted` level.

Every cluster test runs the operator so (`support.cluster_operator`); here its whole life is looked at: no request is refused, and no
right is granted that nothing needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster import audit, rights
from support.cluster.cluster import Cluster
from support.cluster.kubectl import Kubectl, KubectlError
from support.cluster.manifests import SLEEP, pod
from support.cluster.story import (
    CHILDREN,
    OURS,
    TUNABLE,
    budgets,
    condition,
    edit_budget,
    engines,
    service,
    start_run,
    tuning_run,
    wait_condition,
    wait_ready,
    wait_until,
)
from support.cluster_operator import OperatorProcess, operator
from trimtab_operator import crds, names
from trimtab_operator.cluster import kinds, tokens
from trimtab_operator.cluster.kube import Denied, Kube, load_credentials

Json = dict[str, Any]
Right = tuple[str, str, str, str]  # where (home or served), verb, group, resource
HOME = "rights-home"
MONITORS = "podmonitors,prometheusrules"
#: Granted, and not used in a service's life.
RARE = {
    # Only where the admission plugin OwnerReferencesPermissionEnforcement is on.
    ("served", "update", names.GROUP, "inferenceservices/finalizers"),
    # When the same happens again after ten minutes, or after a restart.
    ("served", "patch", "", "events"),
    ("home", "patch", "", "events"),
    # For drift, and of finished runs beyond those that are kept: `test_tuning_drift` and `test_nightly` fail without them.
    ("served", "create", names.GROUP, "tuningruns"),
    ("served", "delete", names.GROUP, "tuningruns"),
    # Of workers; nobody may grant what he does not have.
    ("served", "list", "discovery.k8s.io", "endpointslices"),
    # As that of services.
    ("served", "update", names.GROUP, "tuningruns/finalizers"),
}


@pytest.fixture(scope="module")
def at_home(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """An operator whose own namespace no other test has."""
    cluster.kubectl("apply", "--server-side", "-f", str(crds.directory()))
    cluster.kubectl("create", "namespace", HOME)
    with operator(cluster.kubeconfig, tmp_path_factory.mktemp("operator"), "rights", "--all-namespaces", "--resync", "10",
                  "--tuner-image", "trimtab-stand-in:1", "--operator-namespace", HOME) as started:  # fmt: skip
        yield started


def account(at_home: OperatorProcess) -> Kube:
    """The API, with the operator's own credentials."""
    return Kube(load_credentials(str(at_home.kubeconfig)).configuration, pauses_s=())


def granted() -> set[Right]:
    """Every right that the account has."""
    home, served = rights.rules(HOME)
    return {
        (where, verb, group, resource)
        for where, rules in (("home", home), ("served", served))
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(requests: list[audit.Request]) -> set[Right]:
    """Every right that a request needed. Server-side apply of a new object needs `create` beside `patch`."""
    found: set[Right] = set()
    for request in requests:
        if request.resource:
            where = "home" if request.namespace == HOME else "served"
            found.add((where, request.verb, request.group, request.resource))
            if request.verb == "patch" and request.code == 201:
                found.add((where, "create", request.group, request.resource))
    return found


def write_switch(kubectl: Kubectl, value: str) -> None:
    kubectl.within(HOME).apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": rights.FLEET_CONFIG_MAP},
            "data": {"tuning": value},
        }
    )


@pytest.mark.usefixtures("monitoring_kinds")
def test_a_services_whole_life_under_the_restricted_level_uses_every_right_and_is_refused_none(
    kubectl: Kubectl, at_home: OperatorProcess, cluster: Cluster, tiny_model: Path
) -> None:
    for file in tiny_model.iterdir():
        file.chmod(0o644)  # safetensors writes for its own user alone
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
    with pytest.raises(KubectlError, match="restricted"):
        kubectl.apply(pod("not-restricted", SLEEP))

    # The image holds the model, since the restricted level allows no hostPath.
    tuning = {**TUNABLE, "nightly": {"schedule": "@yearly"}, "limits": {"extraReplicas": 1}}
    made = service(tiny_model, replicas=2, tuning=tuning, podTemplate={},
                   security={"apiKeySecretRef": {"name": "keys"}})  # fmt: skip
    kubectl.apply(made)
    found = wait_condition(kubectl, "Ready", "False", names.FAILED_MOUNT)
    assert 'secret "keys" not found' in condition(found, "Ready")["message"]
    assert condition(found, "Stalled")["status"] == "False", "it goes on by itself"
    kubectl.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"},
                   "stringData": {"keys.yaml": "team: key-of-team"}})  # fmt: skip
    wait_ready(kubectl)
    wait_until(
        lambda: len(kubectl.items(MONITORS, "-l", OURS)) == 2, 90
    )  # their kinds are looked for now and then

    edit_budget(kubectl, 256)
    wait_until(lambda: budgets(at_home, kubectl) == [256, 256])
    start_run(kubectl, 128, 110)
    wait_until(lambda: budgets(at_home, kubectl) == [128, 128])
    kubectl("delete", "trun", "chat-1")
    wait_until(lambda: budgets(at_home, kubectl) == [256, 256])
    kubectl.apply(tuning_run("aside", worker=False, evaluator="Shadow"))
    shadow = f"{OURS}=chat.shadow"
    wait_until(lambda: len(kubectl.items("deployments,services,networkpolicies", "-l", shadow)) == 3)
    kept = json.dumps({"status": {"result": {"verdict": "KeptIncumbent"}}})
    kubectl("patch", "trun", "aside", "--subresource=status", "--type=merge", "-p", kept)
    wait_until(lambda: kubectl.items("deployments,services,networkpolicies", "-l", shadow) == [])
    kubectl.apply(tuning_run("waits"))
    wait_until(lambda: [one["status"]["phase"] for one in kubectl.items("pods", "-l", f"{names.LABEL_RUN}=waits")] == ["Running"], 90)  # fmt: skip
    kubectl("annotate", "trun", "waits", f"{names.ANNOTATION_WORKER}=none")
    wait_until(lambda: kubectl.items("jobs,pods", "-l", f"{names.LABEL_RUN}=waits") == [], 90)
    kubectl("delete", "trun", "waits")
    wait_until(lambda: kubectl.items("roles,rolebindings", "-l", f"{names.LABEL_RUN}=waits") == [], 90)
    write_switch(kubectl, "of")
    wait_until(lambda: "InvalidFleetSwitch" in {e["reason"] for e in kubectl.within(HOME).items("events")})
    kubectl.within(HOME)("delete", "configmap", rights.FLEET_CONFIG_MAP)

    before = {one["metadata"]["uid"] for one in engines(kubectl)}
    patch = {"spec": {"replicas": 1, "tuning": {"nightly": None}, "engine": {"maxModelLen": 512}, "security": {"networkPolicy": {"enabled": False}},
                      "monitoring": {"podMonitor": {"enabled": False}, "prometheusRule": {"enabled": False}}}}  # fmt: skip
    kubectl("patch", "infsvc", "chat", "--type=merge", "-p", json.dumps(patch))
    kubectl.wait_for("observed", "infsvc", "chat",
                     condition=lambda s: s["status"]["observedGeneration"] == s["metadata"]["generation"])  # fmt: skip
    wait_ready(kubectl)
    assert not before & {one["metadata"]["uid"] for one in engines(kubectl)}, "a restart-only field"
    gone = f"networkpolicies,poddisruptionbudgets,cronjobs,roles,rolebindings,{MONITORS}"
    assert kubectl.items(gone, "-l", OURS) == []
    kubectl("delete", "infsvc", "chat", timeout_s=60)
    wait_until(lambda: kubectl.items(CHILDREN, "-l", OURS) == [])
    assert tokens.obtain(account(at_home), HOME, "admin-key", None) is not None, "the key's Secret is made"

    requests = audit.requests(cluster.control_plane.audit_log, rights.user(HOME))
    # Nothing may be made in a namespace that another test has just deleted.
    mine = ("", HOME, kubectl.namespace)
    assert [r for r in requests if r.code in (401, 403) and r.namespace in mine] == []
    assert at_home.metric("trimtab_operator_reconcile_total") > 0
    assert used(requests) <= granted()
    assert granted() - used(requests) == RARE


def test_the_account_may_make_secrets_and_read_none(kubectl: Kubectl, at_home: OperatorProcess) -> None:
    kube = account(at_home)
    for namespace in (HOME, kubectl.namespace):
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mine", "namespace": namespace}}
        kube.create(secret)
        with pytest.raises(Denied):
            kube.get(kinds.SECRET, namespace, "mine")
    for place in (HOME, kubectl.namespace, None):
        with pytest.raises(Denied):
            kube.list(kinds.SECRET, place)
    with pytest.raises(Denied):
        kube.merge(kinds.SECRET, HOME, "mine", {"metadata": {"labels": {"a": "b"}}})
