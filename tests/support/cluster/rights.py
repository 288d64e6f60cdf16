"""The operator's account in a test cluster, with exactly the chart's rights, and a kubeconfig that has no others.

Used by `support.cluster_operator`, so that no test runs the operator with an administrator's rights. The roles are what the real helm
makes of the chart; nothing is added here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from support.cluster import binaries
from support.cluster.helm import Helm, apply
from support.cluster.kubectl import Kubectl

Json = dict[str, Any]
ACCOUNT = "trimtab-operator"
FLEET_CONFIG_MAP = "trimtab-fleet"
_KINDS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")


@cache
def manifests(home: str, served: tuple[str, ...] | None) -> list[Json]:
    """Account, roles and bindings of an operator in `home`; `served` None: all namespaces, by a ClusterRole."""
    values = {
        "fullnameOverride": home,  # several operators share a test cluster, and ClusterRoles have no namespace
        "serviceAccount": {"name": ACCOUNT},
        "fleet": {"configMap": FLEET_CONFIG_MAP},
        "watchNamespaces": list(served or ()),
        "rbac": {"aggregate": False},
    }
    made = Helm.find(namespace=home).template(values)
    return [manifest for manifest in made if manifest["kind"] in _KINDS]


def rules(home: str) -> tuple[list[Json], list[Json]]:
    """Of an operator for all namespaces: the rules in its own one, and those everywhere."""
    roles = {m["kind"]: m["rules"] for m in manifests(home, None) if "rules" in m}
    return roles["Role"], roles["ClusterRole"]


def user(home: str) -> str:
    """The account's name, as the API server writes it."""
    return f"system:serviceaccount:{home}:{ACCOUNT}"


def kubeconfig(admin: Path, folder: Path, home: str, served: Sequence[str] | None) -> Path:
    """Grant the rights, and write a kubeconfig with a token of the account alone."""
    kubectl = Kubectl(binaries.find_or_build() / "kubectl", admin)
    built = manifests(home, None if served is None else tuple(served))
    apply(kubectl.within(home), built, ("--force-conflicts",))
    return kubeconfig_of(kubectl.within(home), folder, ACCOUNT)


def kubeconfig_of(kubectl: Kubectl, folder: Path, account: str) -> Path:
    """A kubeconfig with a token of a service account of kubectl's namespace, and nothing else."""
    token = kubectl("create", "token", account, "--duration=12h").strip()
    config = json.loads(kubectl("config", "view", "--raw", "-o", "json"))
    config["users"] = [{"name": config["contexts"][0]["context"]["user"], "user": {"token": token}}]
    path = folder / f"kubeconfig-{kubectl.namespace}-{account}.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(config))
    return path
