"""The Prometheus operator's kinds for a test cluster: its group, version and names, and of its schemas the fields that we write.

Written for these tests after the public CRDs (v0.91, monitoring.coreos.com/v1), with their types, patterns and list types. Unknown
fields are kept out by the schema, so a field that the real kinds lack, as far as these do, is refused by strict validation.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
_TEXT: Json = {"type": "string"}
_TEXTS: Json = {"type": "object", "additionalProperties": _TEXT}
_DURATION: Json = {
    "type": "string",
    "pattern": r"^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$",
}


def _object(required: tuple[str, ...] = (), **properties: Json) -> Json:
    built: Json = {"type": "object", "properties": properties}
    return built | ({"required": list(required)} if required else {})


def _list(items: Json, **more: Any) -> Json:
    return {"type": "array", "items": items, **more}


_ENDPOINT = _object(
    port=_TEXT,
    path=_TEXT,
    interval=_DURATION,
    scrapeTimeout=_DURATION,
    scheme={"type": "string", "enum": ["http", "https", "HTTP", "HTTPS"]},
)
_POD_MONITOR = _object(
    ("podMetricsEndpoints", "selector"),
    jobLabel=_TEXT,
    podTargetLabels=_list(_TEXT),
    podMetricsEndpoints=_list(_ENDPOINT),
    selector={**_object(matchLabels=_TEXTS), "x-kubernetes-map-type": "atomic"},
)
_RULE = _object(
    ("expr",),
    alert=_TEXT,
    record=_TEXT,
    expr={"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True},
    **{"for": _DURATION},
    labels=_TEXTS,
    annotations=_TEXTS,
)
_GROUP = _object(("name",), name={"type": "string", "minLength": 1}, interval=_DURATION, rules=_list(_RULE))
_GROUPS = _list(_GROUP, **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]})


def _crd(kind: str, plural: str, spec: Json) -> Json:
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    schema = _object(("spec",), apiVersion=_TEXT, kind=_TEXT, metadata={"type": "object"}, spec=spec)
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.monitoring.coreos.com"},
        "spec": {"group": "monitoring.coreos.com", "scope": "Namespaced", "names": names, "versions": [version]},
    }  # fmt: skip


def crds() -> tuple[Json, Json]:
    """PodMonitor and PrometheusRule."""
    return (
        _crd("PodMonitor", "podmonitors", _POD_MONITOR),
        _crd("PrometheusRule", "prometheusrules", _object(groups=_GROUPS)),
    )
