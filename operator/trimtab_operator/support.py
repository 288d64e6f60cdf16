"""What is valid but cannot be carried out yet, or not in this mode: clear findings instead of silence.

`findings` stop a service: in a cluster condition Stalled/Unsupported, in local mode an error. `later` stops nothing: the service is served, and its conditions (`plan.status`), `validate` and `render` name the fields that wait.
"""

from __future__ import annotations

from typing import Literal

from trimtab_operator.api import InferenceService
from trimtab_operator.api.service import Limits
from trimtab_operator.errors import Finding, Unsupported, Waiting

Mode = Literal["local", "cluster"]

NO_WORKER = "the run's annotation wants no worker: status.candidate, status.trials and status.result come from outside"


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
        if scheme == "pvc" and mode == "local":
            found.append(
                Finding(
                    "spec.model.uri",
                    spec.model.uri,
                    "local mode has no volume claims; use file://, package:// or hf://",
                )
            )
    return tuple(found)


def check(service: InferenceService, mode: Mode) -> None:
    """Raise Unsupported with every finding."""
    found = findings(service, mode)
    if found:
        raise Unsupported(found, f'InferenceService "{service.name}"')


def later(service: InferenceService, mode: Mode = "cluster") -> tuple[Waiting, ...]:
    """Fields of a served service that say something and are not acted on yet, or not in this mode."""
    tuning, limits = service.spec.tuning, service.spec.tuning.limits
    usual, found = Limits(), list[Waiting]()
    if mode == "local":
        by_hand = "local mode starts no run by itself; trimtab-tuner run does"
        if tuning.nightly is not None and not tuning.nightly.suspend:
            found.append(Waiting("spec.tuning.nightly", tuning.nightly.schedule, by_hand))
        if tuning.drift.enabled:
            found.append(Waiting("spec.tuning.drift.enabled", True, by_hand))
        if limits.extra_replicas != usual.extra_replicas:
            allowed = "local mode adds no engines for a run"
            found.append(Waiting("spec.tuning.limits.extraReplicas", limits.extra_replicas, allowed))
    return tuple(found)
