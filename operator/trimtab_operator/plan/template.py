"""What restarts an engine and what does not, and why.

`template_hash` covers restart-only fields alone, so that a live edit leaves pods and processes as they are. `changes` compares
two services field by field for `render --diff`. Pure; `EFFECTS` is the one table of when a change takes effect, held equal to
the CRD's descriptions by `tests/contract`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trimtab_operator.api.service import InferenceService, ServiceSpec
from trimtab_operator.api.status import Resolved
from trimtab_operator.plan.engine_flags import engine_arguments

Effect = Literal["live", "restart", "at once"]

#: Field of spec (the longest matching prefix counts) → when a change takes effect, and why.
EFFECTS: dict[str, tuple[Effect, str]] = {
    "model": ("restart", "the weights are loaded at start"),
    "targetRef": ("at once", "the target is never written"),
    "replicas": ("at once", "engines that stay are not touched"),
    "engine": ("restart", "it is a start argument or part of the pod"),
    "engine.maxNumBatchedTokens": ("live", "the scheduler takes it between two steps"),
    "engine.maxNumSeqs": ("live", "the scheduler takes it between two steps; lowering drains down"),
    "engine.schedulingPolicy": ("live", "the scheduler takes it between two steps"),
    "engine.longPrefillTokenThreshold": ("live", "the scheduler takes it between two steps"),
    "engine.priorityAging": ("live", "the scheduler takes it between two steps"),
    "engine.ceilings": ("restart", "buffers are sized by it at start"),
    "engine.kvBlockSize": ("restart", "the KV cache is laid out at start"),
    "engine.kvCacheMemory": ("restart", "the KV cache is allocated at start"),
    "engine.gpuMemoryUtilization": ("restart", "the KV cache is allocated at start"),
    "engine.maxModelLen": ("restart", "buffers are sized by it at start"),
    "engine.dtype": ("restart", "weights are converted at start"),
    "slo": ("live", "targets travel in the live config"),
    "slo.window": ("at once", "only the operator judges it"),
    "slo.trustedHeaders": ("restart", "it is a start argument"),
    "tuning": ("at once", "only the operator and the tuner act on it"),
    "tuning.mode": ("live", "it decides whether a recommendation overlays the live config"),
    "tuning.parameters": ("live", "editing bounds voids a recommendation that was based on them"),
    "rollout": ("at once", "only the operator acts on it"),
    "rollout.drainTimeout": ("restart", "it is a start argument and the pod's grace period"),
    "podTemplate": ("restart", "it is the pod"),
    "service": ("at once", "engines do not see the Service"),
    "security": ("at once", "engines do not see the NetworkPolicy"),
    "security.apiKeySecretRef": (
        "restart",
        "the file of keys is mounted and named at start; its content is reread",
    ),
    "monitoring": ("at once", "engines do not see monitors and alerts"),
    "podDisruptionBudget": ("at once", "engines do not see it"),
    "startupTimeout": ("restart", "it is the pod's startup probe"),
    "suspend": ("at once", "it stops or starts engines"),
}


@dataclass(frozen=True, slots=True)
class Change:
    """One changed field: `path` below the resource, values as written (None: absent)."""

    path: str
    old: object
    new: object
    effect: Effect
    why: str


def template_hash(spec: ServiceSpec, resolved: Resolved = Resolved()) -> str:  # noqa: B008 - frozen
    """Ten hex digits over everything that only a restart can change. Equal specs give equal hashes on every machine."""
    content = {
        "arguments": engine_arguments(spec) if spec.model is not None else None,
        "model": None if spec.model is None else _plain(spec.model),
        "image": spec.engine.image or resolved.image,
        "imagePullPolicy": spec.engine.image_pull_policy,
        "imagePullSecrets": [secret.name for secret in spec.engine.image_pull_secrets],
        "runtime": spec.engine.runtime,
        "tensorParallelSize": spec.engine.tensor_parallel_size,
        "apiKeys": _plain(spec.security.api_key_secret_ref),
        "podTemplate": spec.pod_template,
        "startupTimeout": spec.startup_timeout_s,
        "version": resolved.template_version,
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _plain(value: object) -> str | None:
    return None if value is None else repr(value)


def effect_of(path: str) -> tuple[Effect, str]:
    """When a change of the spec field `path` (`engine.ceilings.maxNumSeqs`) takes effect, and why."""
    found = EFFECTS.get(_longest_known(path))
    if found is None:
        raise KeyError(f"no effect is known for spec.{path}")
    return found


def _longest_known(path: str) -> str:
    """The longest part of `path` from its start that EFFECTS has; empty for none."""
    parts = path.split(".")
    ways = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((way for way in ways if way in EFFECTS), "")


def changes(old: InferenceService, new: InferenceService) -> tuple[Change, ...]:
    """Every field of spec that differs, in order of path."""
    before, after = old.raw.get("spec", {}), new.raw.get("spec", {})
    found = []
    for path in sorted(set(_leaves(before)) | set(_leaves(after))):
        was, now = _at(before, path), _at(after, path)
        if was != now:
            effect, why = effect_of(path)
            found.append(Change(f"spec.{path}", was, now, effect, why))
    return tuple(found)


def restarts(old: InferenceService, new: InferenceService, resolved: Resolved = Resolved()) -> bool:  # noqa: B008
    """Whether going from `old` to `new` replaces the engines."""
    return template_hash(old.spec, resolved) != template_hash(new.spec, resolved)


def restart_only(service: InferenceService) -> dict[str, Any]:
    """The fields of spec, as written, that only a restart can change. Fields that this version does not know are left out."""
    spec = service.raw.get("spec", {})
    known = {path: EFFECTS.get(_longest_known(path)) for path in _leaves(spec)}
    return {
        path: _at(spec, path)
        for path, effect in known.items()
        if effect is not None and effect[0] == "restart"
    }


def engine_environment(spec: ServiceSpec) -> dict[str, str]:
    """Plain environment variables of podTemplate's container `engine`; those with `valueFrom` exist in pods only."""
    env = spec.engine_container.get("env", [])
    return {str(item["name"]): str(item["value"]) for item in env if "name" in item and "value" in item}


def _leaves(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of everything that is no mapping; podTemplate and lists count as one."""
    if isinstance(value, Mapping) and value and path != "podTemplate":
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif path:
        yield path


def _at(value: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value
