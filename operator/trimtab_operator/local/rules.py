"""Whether a tuner may try something on a service now, and with which values. Pure; asked by `service`.

The bounds are the person's: the mode and the parameters of `spec.tuning`, and the annotation that stops or reverts tuning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab_operator.api import InferenceService
from trimtab_operator.errors import Finding, InvalidResource
from trimtab_operator.names import ANNOTATION_TUNING
from trimtab_operator.plan import live as plan_live

Json = dict[str, Any]


def why_not(service: InferenceService, *modes: str) -> str | None:
    """Why tuning may not act now, where it needs one of `modes`; None when it may."""
    state = plan_live.tuning_state(service.metadata.annotations)
    if state != "active":
        return f"tuning is {state} by the annotation {ANNOTATION_TUNING}"
    if service.spec.tuning.mode not in modes:
        return f"spec.tuning.mode is {service.spec.tuning.mode}; this needs {' or '.join(modes)}"
    return None


def candidate_config(service: InferenceService, config: object) -> Json:
    """A whole live config that may be tried: spec's, but for parameters within their bounds. Raises InvalidResource."""
    standing = plan_live.spec_config(service.spec)
    if not isinstance(config, Mapping):
        raise InvalidResource(
            [Finding("config", config, "a JSON object with the whole live config")], "the candidate"
        )
    findings = [
        Finding(f"config.{key}", None, "the whole document is required; this field is missing")
        for key in standing
        if key not in config
    ]
    findings += [
        Finding(f"config.{key}", config[key], f"{standing[key]!r}, as in spec: it is not tuned")
        for key in standing
        if key in config and key not in plan_live.WIRE.values() and config[key] != standing[key]
    ]
    if findings:
        raise InvalidResource(findings, "the candidate")
    chosen = plan_live.recommend(service.spec, config).values
    return {**standing, **{plan_live.WIRE[name]: value for name, value in chosen.items()}}
