"""Trimtab in a test cluster: CRDs, rights, and the operator as a pod. Used by `make cluster` and by tests of the whole.

The rights are the least that the operator needs cluster-wide; on Secrets it may `create`, and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.cluster.kubectl import Kubectl, KubectlError
from trimtab_operator import names

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
NAMESPACE = "trimtab-system"
NAME = "trimtab-operator"
_READ = ["get", "list", "watch"]
_OWN = [*_READ, "create", "patch", "update", "delete"]


def install(kubectl: Kubectl, *, timeout_s: int = 120) -> None:
    """Install, and wait until the operator is ready."""
    for name in ("inferenceservice", "tuningrun"):
        kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / f"{name}.yaml"))
    kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    kubectl.apply(_namespace())
    kubectl.within(NAMESPACE).apply(*manifests())
    home = kubectl.within(NAMESPACE)
    try:
        home("rollout", "status", f"deployment/{NAME}", f"--timeout={timeout_s}s")
    except KubectlError as error:
        said = home("logs", f"deployment/{NAME}", "--tail=20", check=False)
        happened = home("get", "events", check=False)
        raise RuntimeError(f"the operator is not ready: {error}\n{happened}\n{said}") from error


def uninstall(kubectl: Kubectl) -> None:
    """Remove it, so that another operator may have the cluster; the CRDs stay."""
    kubectl("delete", "namespace", NAMESPACE, "--timeout=90s")
    kubectl("delete", f"clusterrole/{NAME}", f"clusterrolebinding/{NAME}")


def _namespace() -> Json:
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": level}}


def manifests() -> list[Json]:
    """Account, roles, bindings, Deployment."""
    account = {"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}
    rbac = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": NAME}},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": NAME},
            "rules": [
                _rule(names.GROUP, ["inferenceservices", "tuningruns"], _READ),
                _rule(
                    names.GROUP, ["inferenceservices/status", "tuningruns/status"], ["get", "patch", "update"]
                ),
                _rule("", ["pods", "namespaces"], _READ),
                _rule("", ["configmaps", "services", "serviceaccounts"], _OWN),
                _rule("", ["events"], ["create", "patch"]),
                _rule("apps", ["deployments"], _OWN),
                _rule("policy", ["poddisruptionbudgets"], _OWN),
                _rule("networking.k8s.io", ["networkpolicies"], _OWN),
            ],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": NAME},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": NAME},
            "subjects": [account],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "Role",
            "metadata": {"name": NAME},
            "rules": [
                _rule(
                    "coordination.k8s.io", ["leases"], ["get", "list", "watch", "create", "update", "patch"]
                ),
                _rule("", ["secrets"], ["create"]),
            ],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": NAME},
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": NAME},
            "subjects": [account],
        },
        _deployment(),
    ]


def _rule(group: str, resources: list[str], verbs: list[str]) -> Json:
    return {"apiGroups": [group], "resources": resources, "verbs": verbs}


def _deployment() -> Json:
    labels = {names.LABEL_COMPONENT: "operator", names.LABEL_PART_OF: "trimtab"}
    health = {"port": "health", "path": "/healthz"}
    container = {
        "name": "operator",
        "image": "trimtab/operator:test",
        "args": [
            "run",
            "--all-namespaces",
            "--admin-key-secret",
            "trimtab-admin-key",
            "--admin-key-file",
            "/key/admin-key.pem",
        ],
        "ports": [{"name": "health", "containerPort": 8080}],
        "startupProbe": {"httpGet": health, "periodSeconds": 1, "failureThreshold": 60, "timeoutSeconds": 5},
        "livenessProbe": {"httpGet": health, "periodSeconds": 10, "timeoutSeconds": 5},
        "readinessProbe": {"httpGet": {**health, "path": "/readyz"}, "periodSeconds": 1, "timeoutSeconds": 5},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "key", "mountPath": "/key", "readOnly": True},
        ],
    }
    pod = {
        "serviceAccountName": NAME,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {"name": "key", "secret": {"secretName": "trimtab-admin-key", "optional": True}},
        ],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": NAME, "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
