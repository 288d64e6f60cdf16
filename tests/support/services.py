"""Builders of InferenceService resources for tests: the smallest valid one, and changes by dotted path."""

from __future__ import annotations

import copy
from typing import Any

from trimtab_operator import names, schema
from trimtab_operator.api import InferenceService

SMALLEST: dict[str, Any] = {
    "apiVersion": "serving.trimtab.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "chat"},
    "spec": {"model": {"uri": "file:///models/tiny"}},
}
BUDGET_PARAMETER = {"name": "maxNumBatchedTokens", "min": 64, "max": 4096}


def resource(**changes: object) -> dict[str, Any]:
    """The smallest resource with `spec` fields set by dotted path (`**{"engine.maxNumSeqs": 8}`)."""
    built = copy.deepcopy(SMALLEST)
    for path, value in changes.items():
        put(built["spec"], path, value)
    return built


def put(target: dict[str, Any], path: str, value: object) -> None:
    """Set `target`'s field at a dotted path, making the objects on the way."""
    *way, last = path.split(".")
    for step in way:
        target = target.setdefault(step, {})
    target[last] = copy.deepcopy(value)  # a later path may reach into it


def service(**changes: object) -> InferenceService:
    """The parsed form of `resource(**changes)`."""
    return schema.parse_service(resource(**changes))


def placed(given: dict[str, Any], halt: str | None = None) -> InferenceService:
    """The parsed form of a resource as an API server has it: in namespace `team`; `halt`: held by the annotation."""
    annotations = {names.ANNOTATION_TUNING: halt} if halt else {}
    given["metadata"] = {
        "name": "chat",
        "namespace": "team",
        "uid": "u",
        "generation": 1,
        "annotations": annotations,
    }
    return schema.parse_service(given)


def run_resource(**changes: object) -> dict[str, Any]:
    """A small TuningRun with `spec` fields set by dotted path."""
    built: dict[str, Any] = {
        "apiVersion": "serving.trimtab.dev/v1alpha1",
        "kind": "TuningRun",
        "metadata": {"name": "chat-1"},
        "spec": {"service": "chat"},
    }
    for path, value in changes.items():
        put(built["spec"], path, value)
    return built


def flag(arguments: list[str], name: str) -> str | None:
    """The value after `name` in a command line, or None."""
    return arguments[arguments.index(name) + 1] if name in arguments else None
