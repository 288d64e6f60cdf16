"""Builders of TuningRuns with a history, for tests of what the operator makes of them."""

from __future__ import annotations

from typing import Any

from support.pods import T0
from support.services import run_resource
from trimtab_operator import names, schema
from trimtab_operator.api import TuningRun
from trimtab_operator.plan.pods import rfc3339


def tuning_run(
    name: str = "chat-1",
    *,
    origin: str | None = None,
    phase: str = "",
    age_s: float = 0.0,
    ended_s: float | None = None,
    **spec: Any,
) -> TuningRun:
    """A run of service `chat` that is `age_s` old at T0 and in `phase` since `ended_s` (Unix)."""
    built = run_resource(**spec)
    built["metadata"] = {
        "name": name,
        "namespace": "team",
        "uid": f"uid-of-{name}",
        "generation": 1,
        "creationTimestamp": rfc3339(T0 - age_s),
        "labels": {} if origin is None else {names.LABEL_ORIGIN: origin},
    }
    built["status"] = {"phase": phase} if phase else {}
    if ended_s is not None:
        condition = {"type": names.RECONCILING, "status": "False", "reason": "Any", "message": ""}
        built["status"]["conditions"] = [{**condition, "lastTransitionTime": rfc3339(ended_s)}]
    return schema.parse_run(built)
