"""Trimtab in a test cluster: CRDs, rights, and the operator as a pod. Used by `make cluster` and by tests of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.cluster import rights
from support.cluster.helm import apply
from support.cluster.kubectl import Kubectl, KubectlError
from trimtab_operator import names

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
NAMESPACE = "trimtab-system"
NAME = rights.ACCOUNT


def install(kubectl: Kubectl, *, timeout_s: int = 120) -> None:
    """Install, and wait until the operator is ready."""
    for name in ("inferenceservice", "tuningrun"):
        kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / f"{name}.yaml"))
    kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    kubectl.apply(_namespace())
    apply(kubectl.within(NAMESPACE), manifests())
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
    for manifest in rights.manifests(NAMESPACE, None):
        if manifest["kind"].startswith("ClusterRole"):
            kubectl("delete", manifest["kind"], manifest["metadata"]["name"])


def _namespace() -> Json:
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": level}}


def manifests() -> list[Json]:
    """Account, roles, bindings, Deployment."""
    return [*rights.manifests(NAMESPACE, None), _deployment()]


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
