"""Lays a user's pod template over ours, by the merge keys of Kubernetes' strategic merge. Pure; used by `manifests`.

Objects merge field by field; lists with a merge key (containers by name, mounts by mountPath, …) merge entry by entry; any other
list replaces ours. Values of the user win.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

#: Field name → merge key of its entries, from core/v1's `patchMergeKey` tags.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
}

#: Lists whose entries hold one of several values (a value or a valueFrom, one kind of volume): an entry replaces ours.
ONE_OF = frozenset({"env", "volumes"})


def overlay_pod_template(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """A new pod template; neither argument is changed."""
    merged: dict[str, Any] = _merge(ours, theirs, "")
    return merged


def _merge(ours: Any, theirs: Any, field: str) -> Any:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        merged = {key: copy.deepcopy(value) for key, value in ours.items()}
        for key, value in theirs.items():
            merged[key] = _merge(merged[key], value, key) if key in merged else copy.deepcopy(value)
        return merged
    if field in MERGE_KEYS and isinstance(ours, list) and isinstance(theirs, list):
        return _merge_entries(ours, theirs, field)
    return copy.deepcopy(theirs)


def _merge_entries(ours: Sequence[Any], theirs: Sequence[Any], field: str) -> list[Any]:
    key = MERGE_KEYS[field]
    merged = [copy.deepcopy(entry) for entry in ours]
    for entry in theirs:
        if not isinstance(entry, Mapping):
            merged.append(entry)  # the API server refuses it, in its own words
            continue
        at = next((i for i, own in enumerate(merged) if own.get(key) == entry.get(key)), None)
        if at is None:
            merged.append(copy.deepcopy(entry))
        elif field in ONE_OF:
            merged[at] = copy.deepcopy(entry)
        else:
            merged[at] = _merge(merged[at], entry, "")
    return merged
