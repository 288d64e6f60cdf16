"""Whether a live object still says everything that we want it to say: desired ⊆ live. Pure.

Used by the cluster's plan before an apply, so that nothing is written at rest. The API server fills in defaults, rewrites
quantities and drops empty values; none of that is drift. Fields that only the live object has belong to others. What *we* once
said and no longer say is found by the digest that every applied object carries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_operator import names
from trimtab_operator.quantities import parse_quantity

#: Field name → keys of its entries where Kubernetes merges the list as a map (`x-kubernetes-list-map-keys`).
LIST_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "resourceClaims": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ownerReferences": ("uid",),
    "conditions": ("type",),
    "ports": ("name",),  # all of ours are named, in containers and in Services
}
#: Fields whose values (or whose entries' values) are quantities.
QUANTITIES = frozenset({"limits", "requests", "sizeLimit", "capacity", "overhead", "divisor"})
#: Fields that the API server takes as one value and adds nothing to: a further key in them (a selector's, say, that then picks no
#: pod) changes what we said, so it is no field of somebody else's.
WHOLE = frozenset(
    {
        "selector",
        "podSelector",
        "namespaceSelector",
        "labelSelector",
        "matchLabels",
        "nodeSelector",
        "ingress",
    }
)


def digest(manifest: Mapping[str, Any]) -> str:
    """Ten hex digits over a whole manifest."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), default=str)  # YAML has dates
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def stamped(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """`manifest` with its digest as annotation: what is applied."""
    metadata = dict(manifest["metadata"])
    metadata["annotations"] = {
        **metadata.get("annotations", {}),
        names.ANNOTATION_APPLIED: digest(manifest),
    }
    return {**manifest, "metadata": metadata}


def drift(desired: Any, live: Any) -> tuple[str, ...]:
    """Paths at which `live` does not say what `desired` says, in order; empty when there is nothing to apply."""
    return tuple(_drift(desired, live, "", quantity=False))


def _drift(
    desired: Any, live: Any, path: str, *, quantity: bool, field: str = "", whole: bool = False
) -> list[str]:
    if _empty(desired):
        # The server drops empty values; an explicit one in live must be as empty.
        return [] if _empty(live) else [path]
    if isinstance(desired, Mapping):
        if not isinstance(live, Mapping):
            return [path]
        found: list[str] = []
        for key, value in desired.items():
            found += _drift(
                value,
                live.get(key),
                _under(path, key),
                quantity=quantity or key in QUANTITIES,
                field=key,
                whole=whole or key in WHOLE,
            )
        if whole:
            found += [_under(path, key) for key in live if key not in desired and not _empty(live[key])]
        return found
    if isinstance(desired, list):
        return _list_drift(desired, live, path, quantity, field, whole)
    return [] if _same(desired, live, quantity) else [path]


def _under(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _list_drift(
    desired: list[Any], live: Any, path: str, quantity: bool, field: str, whole: bool
) -> list[str]:
    if not isinstance(live, list):
        return [path]
    keys = LIST_KEYS.get(field)
    if keys is not None and all(isinstance(item, Mapping) and keys[0] in item for item in desired):
        found: list[str] = []
        for item in desired:
            match = _entry(live, item, keys)
            where = f"{path}[{item[keys[0]]}]"
            found += [where] if match is None else _drift(item, match, where, quantity=quantity)
        return found
    # Any other list is one value: same length, same order.
    if len(desired) != len(live):
        return [path]
    found = []
    for index, (wanted, is_) in enumerate(zip(desired, live, strict=True)):
        found += _drift(wanted, is_, f"{path}[{index}]", quantity=quantity, whole=whole)
    return found


def _entry(live: Sequence[Any], item: Mapping[str, Any], keys: tuple[str, ...]) -> Mapping[str, Any] | None:
    for entry in live:
        if isinstance(entry, Mapping) and all(entry.get(key) == item.get(key) for key in keys if key in item):
            return entry
    return None


def _empty(value: Any) -> bool:
    """What the API server may leave out: null, false, zero, empty."""
    return value is None or value is False or (not isinstance(value, bool) and value in (0, "", [], {}))


def _same(desired: Any, live: Any, quantity: bool) -> bool:
    if isinstance(desired, bool) or isinstance(live, bool):
        return desired is live
    if desired == live:
        return True
    if quantity and isinstance(desired, str | int | float) and isinstance(live, str | int | float):
        try:
            return parse_quantity(desired) == parse_quantity(live)
        except ValueError:
            return False
    return False
