"""Trimtab in a test cluster, by its chart: CRDs, rights, and the operator as a pod. Used by `make cluster` and by tests of the whole.

Rendered by helm and applied by kubectl: what a release adds (its record, its claim on the CRDs) belongs to the tests of the chart's
life, which share a cluster with this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support.cluster.helm import RELEASE, Helm, apply
from support.cluster.kubectl import Kubectl, KubectlError

Json = dict[str, Any]
NAMESPACE = "trimtab-system"
NAME = f"{RELEASE}-operator"  # of its Deployment, account and roles


def install(kubectl: Kubectl, *, values: Mapping[str, Any] | None = None, timeout_s: int = 120) -> None:
    """Install, and wait until the operator is ready. values: of the chart."""
    home = kubectl.within(NAMESPACE)
    kubectl.apply(_namespace())
    apply(home, manifests(values), ("--force-conflicts",))
    kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    try:
        home("rollout", "status", f"deployment/{NAME}", f"--timeout={timeout_s}s")
    except KubectlError as error:
        said = home("logs", f"deployment/{NAME}", "--tail=20", check=False)
        happened = home("get", "events", check=False)
        raise RuntimeError(f"the operator is not ready: {error}\n{happened}\n{said}") from error


def uninstall(kubectl: Kubectl) -> None:
    """Remove it, so that another operator may have the cluster; the CRDs stay."""
    # The pod first: a namespace's controller that still finds one looks again only after half of its grace.
    home = kubectl.within(NAMESPACE)
    home("delete", "deployment", NAME, "--cascade=foreground", "--timeout=90s")
    kubectl("delete", "namespace", NAMESPACE, "--timeout=90s")
    for manifest in manifests():
        if manifest["kind"].startswith("ClusterRole"):
            kubectl("delete", manifest["kind"], manifest["metadata"]["name"])


def manifests(values: Mapping[str, Any] | None = None) -> list[Json]:
    """Everything that the chart makes."""
    return Helm.find(namespace=NAMESPACE).template(values)


def _namespace() -> Json:
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": level}}
