"""The live document of a service: what its engines shall run with now, and why.

`live_document` is what `live.json` holds and what is pushed to engines; its `config` is exactly what the engine's
`LiveConfig.from_json` takes (`tests/contract`). Pure; used by `manifests`, local mode and the reconciler.

Who wins: spec.engine, overlaid by a recommendation only when `tuning.mode` is Apply, tuning is not reverted, and every spec
value and bound that the recommendation was based on still stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trimtab_operator import names
from trimtab_operator.api.service import TUNABLE, InferenceService, ServiceSpec
from trimtab_operator.api.status import LiveValues, Recommendation
from trimtab_operator.errors import Finding, InvalidResource

Source = Literal["Spec", "Recommendation"]
TuningState = Literal["active", "paused", "reverted"]

#: field of spec.engine → key of the engine's live config, for everything that tuning may overlay.
WIRE = {
    "maxNumBatchedTokens": "max_num_batched_tokens",
    "maxNumSeqs": "max_num_seqs",
    "schedulingPolicy": "scheduling_policy",
    "longPrefillTokenThreshold": "long_prefill_token_threshold",
}


@dataclass(frozen=True, slots=True)
class Effective:
    """The live config in force by plan. `why` says who won, in words; `superseded` names edits that void a
    recommendation."""

    config: dict[str, Any]
    source: Source
    why: str
    superseded: tuple[str, ...] = ()


def tuning_state(annotations: Mapping[str, str]) -> TuningState:
    """What annotation `serving.trimtab.dev/tuning` asks for. An unknown value pauses: whoever wrote it wanted a halt."""
    value = annotations.get(names.ANNOTATION_TUNING)
    if value is None or value == "active":
        return "active"
    return "reverted" if value == "reverted" else "paused"


@dataclass(frozen=True, slots=True)
class Switch:
    """Whether tuning goes on. `by` says who asked for a halt, for people."""

    state: TuningState = "active"
    by: str = ""


ACTIVE = Switch()
_STRENGTH: dict[TuningState, int] = {"active": 0, "paused": 1, "reverted": 2}


def switch(annotations: Mapping[str, str], fleet: Switch = ACTIVE) -> Switch:
    """The stronger of what the service's annotation and what the fleet asks for."""
    state, by = tuning_state(annotations), f"annotation {names.ANNOTATION_TUNING}"
    value = annotations.get(names.ANNOTATION_TUNING, state)
    if value != state:
        by += f" ({value[:40]!r}, which counts as {state})"
    own = Switch(state, by)
    return fleet if _STRENGTH[fleet.state] > _STRENGTH[own.state] else own


def spec_config(spec: ServiceSpec) -> dict[str, Any]:
    """The engine's live config as spec alone wants it."""
    engine = spec.engine
    return {
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_num_seqs": engine.max_num_seqs,
        "scheduling_policy": engine.scheduling_policy,
        "long_prefill_token_threshold": engine.long_prefill_token_threshold,
        "priority_aging_s": engine.priority_aging_s,
        "slo": {
            "default_class": spec.slo.default_class,
            "classes": [
                {"name": c.name, "ttft_s": c.ttft_s, "itl_s": c.itl_s, "objective": c.objective}
                for c in spec.slo.resolved_classes()
            ],
        },
    }


def basis(spec: ServiceSpec) -> dict[str, Any]:
    """The spec values and bounds that a recommendation rests on: a person's edit of one of them voids it."""
    config = spec_config(spec)
    found: dict[str, Any] = {name: config[WIRE[name]] for name in TUNABLE}
    found["ceilings"] = {
        "maxNumBatchedTokens": spec.engine.ceilings.max_num_batched_tokens,
        "maxNumSeqs": spec.engine.ceilings.max_num_seqs,
    }
    found["parameters"] = {
        p.name: list(p.choices) if p.choices else [p.minimum, p.maximum] for p in spec.tuning.parameters
    }
    return found


def recommend(
    spec: ServiceSpec, config: Mapping[str, Any], run: str | None = None, time: str | None = None
) -> Recommendation:
    """A recommendation from an engine live config, whole or in part, as a tuner sends it.

    Keeps the values of `tuning.parameters` that differ from spec; raises InvalidResource when a value leaves its bounds, when
    a knob differs that is no parameter, or when the whole would not be a valid live config.
    """
    standing = spec_config(spec)
    errors: list[Finding] = []
    values: dict[str, Any] = {}
    for key, value in config.items():
        if key not in standing:
            errors.append(Finding(f"config.{key}", value, f"known fields are {', '.join(sorted(standing))}"))
    for name, key in WIRE.items():
        if key not in config or config[key] == standing[key]:
            continue
        parameter = spec.tuning.parameter(name)
        if parameter is None:
            errors.append(
                Finding(
                    f"config.{key}", config[key], f"{standing[key]!r}: spec.tuning.parameters has no {name}"
                )
            )
        elif not parameter.allows(config[key]):
            errors.append(Finding(f"config.{key}", config[key], parameter.range_text()))
        else:
            values[name] = config[key]
    if not errors:
        errors.extend(_whole_findings(spec, _overlay(standing, values)))
    if errors:
        raise InvalidResource(errors, "the recommendation")
    return Recommendation(values, basis(spec), run, time)


def effective(
    spec: ServiceSpec,
    recommendation: Recommendation | None = None,
    annotations: Mapping[str, str] | None = None,
    fleet: Switch = ACTIVE,
) -> Effective:
    """Who wins: spec or recommendation (see the module's head)."""
    standing = spec_config(spec)
    if recommendation is None:
        return Effective(standing, "Spec", "no recommendation")
    edited = superseded(spec, recommendation)
    if edited:
        return Effective(standing, "Spec", f"{', '.join(edited)} was edited since the recommendation", edited)
    if spec.tuning.mode != "Apply":
        return Effective(standing, "Spec", f"spec.tuning.mode is {spec.tuning.mode}")
    if recommendation.simulated:
        return Effective(standing, "Spec", "the recommendation was only simulated")
    halt = switch(annotations or {}, fleet)
    if halt.state == "reverted":
        return Effective(standing, "Spec", f"{halt.by} is reverted")
    config = _overlay(standing, recommendation.values)
    if _whole_findings(spec, config) or not all(
        _allowed(spec, *item) for item in recommendation.values.items()
    ):
        return Effective(standing, "Spec", "the recommendation does not fit the spec")
    run = f" of {recommendation.run}" if recommendation.run else ""
    return Effective(config, "Recommendation", f"recommendation{run}")


def superseded(spec: ServiceSpec, recommendation: Recommendation) -> tuple[str, ...]:
    """Paths of the spec fields that a person edited since `recommendation`; empty when it still stands."""
    now, then = basis(spec), recommendation.based_on
    paths = {name: f"spec.engine.{name}" for name in (*TUNABLE, "ceilings")}
    paths["parameters"] = "spec.tuning.parameters"
    return tuple(paths[name] for name in now if then.get(name) != now[name])


def live_document(
    spec: ServiceSpec,
    generation: int,
    recommendation: Recommendation | None = None,
    annotations: Mapping[str, str] | None = None,
    fleet: Switch = ACTIVE,
) -> dict[str, Any]:
    """The content of `live.json`: generation, source and the whole config."""
    chosen = effective(spec, recommendation, annotations, fleet)
    return {"generation": generation, "source": chosen.source, "config": chosen.config}


def next_generation(
    previous: Mapping[str, Any] | None, service: InferenceService, recommendation: Recommendation | None
) -> int:
    """The number for the document wanted now: that of `previous` (a live document) while nothing changed, else one more."""
    if previous is None:
        return 1
    chosen = effective(service.spec, recommendation, service.metadata.annotations)
    number = int(previous["generation"])
    same = previous["config"] == chosen.config and previous["source"] == chosen.source
    return number if same else number + 1


def live_values(document: Mapping[str, Any]) -> LiveValues:
    """A live document in short, for status."""
    config = document["config"]
    return LiveValues(
        generation=int(document["generation"]),
        source=str(document["source"]),
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_num_seqs=config["max_num_seqs"],
        scheduling_policy=config["scheduling_policy"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
    )


def _allowed(spec: ServiceSpec, name: str, value: object) -> bool:
    """Whether the owner lets tuning give `name` this value: a status may hold what somebody else wrote into it."""
    parameter = spec.tuning.parameter(name)
    return parameter is not None and parameter.allows(value)


def _overlay(standing: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {**standing, **{WIRE[name]: value for name, value in values.items() if name in WIRE}}


def _whole_findings(spec: ServiceSpec, config: Mapping[str, Any]) -> list[Finding]:
    """What the engine would refuse of a config whose parts are each within bounds."""
    ceilings = spec.engine.ceilings
    budget, seqs = config["max_num_batched_tokens"], config["max_num_seqs"]
    found = []
    for key, value, low, high in (
        ("max_num_batched_tokens", budget, 1, ceilings.max_num_batched_tokens),
        ("max_num_seqs", seqs, 1, ceilings.max_num_seqs),
        (
            "long_prefill_token_threshold",
            config["long_prefill_token_threshold"],
            0,
            ceilings.max_num_batched_tokens,
        ),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            found.append(Finding(f"config.{key}", value, f"an integer from {low} to {high}"))
    if not found and budget < seqs:
        found.append(Finding("config.max_num_batched_tokens", budget, f"at least max_num_seqs ({seqs})"))
    return found
