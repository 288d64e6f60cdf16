"""An account with exactly the rights that it needs: ServiceAccount, Role, RoleBinding. Pure.

Used for everything of ours that talks to the API server from a pod: `worker_job`, and whatever starts runs. The API server lets the
operator grant only what it has itself, so each rule here is among the chart's (`templates/_rules.tpl`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Manifest = dict[str, Any]
#: (apiVersion, kind) → an object with name, labels and owner, as `objects.child` makes it.
Head = Callable[[str, str], Manifest]
_RBAC = "rbac.authorization.k8s.io"


def rule(group: str, resource: str, *verbs: str, only: Sequence[str] = ()) -> Manifest:
    """One rule of a Role; `only` keeps it to objects of these names, which RBAC cannot do for `create` and `list`."""
    built: Manifest = {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
    return {**built, "resourceNames": list(only)} if only else built


def account_with_rights(head: Head, rules: Sequence[Manifest]) -> list[Manifest]:
    """In the order to make them: who is bound has its rights from the first moment."""
    role = {**head(f"{_RBAC}/v1", "Role"), "rules": list(rules)}
    # Pods of ours ask for their token themselves; nobody else's gets one by naming the account.
    account = {**head("v1", "ServiceAccount"), "automountServiceAccountToken": False}
    binding = head(f"{_RBAC}/v1", "RoleBinding")
    metadata = account["metadata"]
    binding["roleRef"] = {"apiGroup": _RBAC, "kind": "Role", "name": role["metadata"]["name"]}
    binding["subjects"] = [
        {"kind": "ServiceAccount", "name": metadata["name"], "namespace": metadata["namespace"]}
    ]
    return [role, account, binding]
