"""Pods of the tuner's image, as every Job and CronJob of ours makes them. Pure; used by `worker_job`.

They meet the `restricted` Pod Security level, and talk to the API server as an account of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab_operator.plan.manifests import USER_ID

Manifest = dict[str, Any]
TMP = "/tmp"  # the only place that it may write to


@dataclass(frozen=True, slots=True)
class Tuner:
    """What the operator was told of the tuner's pods. `prometheus_url` only where Prometheus asks for no credentials."""

    image: str = "trimtab/tuner"
    resources: Mapping[str, Any] = field(default_factory=dict)
    prometheus_url: str | None = None


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume, and the folder where its files are read."""

    name: str
    path: str
    source: Mapping[str, Any]


def tuner_pod(
    tuner: Tuner,
    *,
    container: str,
    arguments: Sequence[str],
    labels: Mapping[str, str],
    account: str,
    mounts: Sequence[Mount] = (),
    env: Sequence[Manifest] = (),
    pull_secrets: Sequence[str] = (),
    grace_s: int = 30,
) -> Manifest:
    """A pod template with one container that is never started again: whoever made the pod makes another."""
    main: Manifest = {
        "name": container,
        "image": tuner.image,
        "args": list(arguments),
        "env": [{"name": "HOME", "value": TMP}, *env],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # Its last words are the reason that people see.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "tmp", "mountPath": TMP},
            *({"name": mount.name, "mountPath": mount.path, "readOnly": True} for mount in mounts),
        ],
    }
    if tuner.resources:
        main["resources"] = dict(tuner.resources)
    pod: Manifest = {
        "serviceAccountName": account,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [main],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            *({"name": mount.name, **mount.source} for mount in mounts),
        ],
    }
    if pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in pull_secrets]
    return {"metadata": {"labels": dict(labels)}, "spec": pod}
