"""The head of every child: kind, name, labels, and the service as its owner. Pure; used by `manifests` and `monitors`."""

from __future__ import annotations

from typing import Any

from trimtab_operator import names
from trimtab_operator.api.service import InferenceService

Manifest = dict[str, Any]


def child(service: InferenceService, api_version: str, kind: str, name: str) -> Manifest:
    """An object without a spec. Its owner is `service`, so that it goes with it."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": service.namespace,
        "labels": names.labels(service.name),
    }
    if service.metadata.uid:
        metadata["ownerReferences"] = [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.SERVICE_KIND,
                "name": service.name,
                "uid": service.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
