"""A container's security context as the user and limits that its process gets. Pure; used by `pod`."""

from __future__ import annotations

from support.cluster.agent.api import Json
from support.cluster.agent.env import ConfigError
from support.cluster.agent.images import Image
from support.cluster.agent.process import User


def user(container: Json, spec: Json, image: Image) -> User:
    """The container's security context over the pod's; raises ConfigError where a kubelet would."""
    context = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
    uid = int(context.get("runAsUser", image.user))
    if context.get("runAsNonRoot") and uid == 0:
        raise ConfigError("container has runAsNonRoot and image will run as root")
    groups = {int(group) for group in context.get("supplementalGroups", [])}
    if "fsGroup" in context:
        groups.add(int(context["fsGroup"]))
    return User(
        uid=uid,
        gid=int(context.get("runAsGroup", uid)),
        groups=tuple(sorted(groups)),
        no_new_privileges=context.get("allowPrivilegeEscalation") is False,
        drop_capabilities="ALL" in context.get("capabilities", {}).get("drop", []),
        read_only_root=bool(context.get("readOnlyRootFilesystem", False)),
    )
