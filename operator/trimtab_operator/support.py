"""What is valid but cannot be served yet, or not in this mode: clear findings instead of half-working engines.

Used by both shells before planning. In a cluster the findings become condition Stalled/Unsupported, in local mode an error.
"""

from __future__ import annotations

from typing import Literal

from trimtab_operator.api import InferenceService
from trimtab_operator.errors import Finding, Unsupported

Mode = Literal["local", "cluster"]


def findings(service: InferenceService, mode: Mode) -> tuple[Finding, ...]:
    """Everything that `mode` cannot carry out; empty when the service can be served."""
    spec, found = service.spec, []
    if spec.target_ref is not None:
        found.append(
            Finding(
                "spec.targetRef",
                spec.target_ref.name,
                "tuning a server of yours is not there yet; set spec.model",
            )
        )
    if spec.engine.runtime == "vllm":
        found.append(Finding("spec.engine.runtime", "vllm", "this release serves with runtime trimtab only"))
    if spec.model is not None:
        scheme = spec.model.uri.partition("://")[0]
        if scheme == "hf":
            found.append(
                Finding(
                    "spec.model.uri",
                    spec.model.uri,
                    "downloads from a hub are not there yet; use file:// or package://",
                )
            )
        if scheme == "pvc" and mode == "local":
            found.append(
                Finding(
                    "spec.model.uri",
                    spec.model.uri,
                    "local mode has no volume claims; use file:// or package://",
                )
            )
    return tuple(found)


def check(service: InferenceService, mode: Mode) -> None:
    """Raise Unsupported with every finding."""
    found = findings(service, mode)
    if found:
        raise Unsupported(found, f'InferenceService "{service.name}"')
