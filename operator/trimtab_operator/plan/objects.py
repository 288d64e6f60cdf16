"""The head of every object: kind, name, labels, and the service, or the run, as its owner. Pure; used by all builders of manifests."""

from __future__ import annotations

from typing import Any

from trimtab_operator import names
from trimtab_operator.api import TuningRun
from trimtab_operator.api.service import InferenceService

Manifest = dict[str, Any]


def child(
    service: InferenceService, api_version: str, kind: str, name: str, component: str = "engine"
) -> Manifest:
    """An object without a spec. Its owner is `service`, so that it goes with it."""
    built = _head(api_version, kind, name, service.namespace, names.labels(service.name, component))
    return _owned(built, names.SERVICE_KIND, service.name, service.metadata.uid)


def run_child(run: TuningRun, api_version: str, kind: str, name: str, component: str) -> Manifest:
    """An object without a spec that goes with `run`; by its labels it is known as one of the run's service too."""
    built = _head(api_version, kind, name, run.metadata.namespace, run_labels(run, component))
    return _owned(built, names.RUN_KIND, run.name, run.uid)


def run_labels(run: TuningRun, component: str) -> dict[str, str]:
    """Labels of what is made for a run, its pods included."""
    return {**names.labels(run.spec.service, component), names.LABEL_RUN: run.name}


def _head(api_version: str, kind: str, name: str, namespace: str, labels: dict[str, str]) -> Manifest:
    metadata: dict[str, Any] = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def _owned(built: Manifest, kind: str, name: str, uid: str) -> Manifest:
    if uid:
        built["metadata"]["ownerReferences"] = [
            {
                "apiVersion": names.API_VERSION,
                "kind": kind,
                "name": name,
                "uid": uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return built
