"""What a newer CRD takes away from those who wrote resources for an older one. Pure: two definitions in, words out.

Additions are fine. Descriptions and printer columns' order may change. Everything else that the old one promised must stand:
fields, types, bounds, choices, defaults, names, rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Json = Mapping[str, Any]
_LOWER_BOUNDS = ("minimum", "minLength", "minItems", "minProperties")
_UPPER_BOUNDS = ("maximum", "maxLength", "maxItems", "maxProperties")
_FIXED = (
    "type", "format", "default", "nullable", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type", "x-kubernetes-int-or-string",
)  # fmt: skip
_RULES = "x-kubernetes-validations"
_PRESERVE = "x-kubernetes-preserve-unknown-fields"


def breaks(old: Json, new: Json) -> list[str]:
    """One line, `path: what`, for each thing that the new definition no longer allows or promises."""
    before, after = old["spec"], new["spec"]
    found = [
        f"spec.{name}: {before[name]!r} became {after[name]!r}"
        for name in ("group", "scope")
        if before[name] != after[name]
    ]
    found += _names(before["names"], after["names"])
    served = {version["name"]: version for version in after["versions"]}
    for version in before["versions"]:
        name = version["name"]
        if not served.get(name, {}).get("served"):
            found.append(f"{name}: is no longer served")
            continue
        found += [f"{name}: {line}" for line in _version(version, served[name])]
    return found


def _names(before: Json, after: Json) -> Iterator[str]:
    for name, value in before.items():
        kept = after.get(name)
        if isinstance(value, list) and not set(value) <= set(kept or ()):
            yield f"spec.names.{name}: {value!r} became {kept!r}"
        if not isinstance(value, list) and value != kept:
            yield f"spec.names.{name}: {value!r} became {kept!r}"


def _version(before: Json, after: Json) -> Iterator[str]:
    for name, value in before.get("subresources", {}).items():
        if after.get("subresources", {}).get(name) != value:
            yield f"subresources.{name}: {value!r} became {after.get('subresources', {}).get(name)!r}"
    columns = {c["name"]: c["jsonPath"] for c in after.get("additionalPrinterColumns", ())}
    for column in before.get("additionalPrinterColumns", ()):
        if columns.get(column["name"]) != column["jsonPath"]:
            yield f"printer column {column['name']}: {column['jsonPath']} became {columns.get(column['name'])}"
    yield from _schema(before["schema"]["openAPIV3Schema"], after["schema"]["openAPIV3Schema"], "")


def _schema(before: Json, after: Json, path: str) -> Iterator[str]:
    where = path or "(root)"
    for keyword in _FIXED:
        if before.get(keyword) != after.get(keyword):
            yield f"{where}: {keyword} {before.get(keyword)!r} became {after.get(keyword)!r}"
    for keyword in (*_LOWER_BOUNDS, *_UPPER_BOUNDS):
        if keyword not in after:
            continue
        was, now = before.get(keyword), after[keyword]
        if was is None or (now > was if keyword in _LOWER_BOUNDS else now < was):
            yield f"{where}: {keyword} {was!r} became {now!r}"
    if "pattern" in after and before.get("pattern") != after["pattern"]:
        yield f"{where}: pattern {before.get('pattern')!r} became {after['pattern']!r}"
    if "enum" in after:
        gone = [choice for choice in before.get("enum", ()) if choice not in after["enum"]]
        if gone or "enum" not in before:
            yield f"{where}: enum lost {gone or 'everything else'!r}"
    added = sorted(set(after.get("required", ())) - set(before.get("required", ())))
    if added:
        yield f"{where}: {', '.join(added)} became required"
    if before.get(_PRESERVE) and not after.get(_PRESERVE):
        yield f"{where}: unknown fields are no longer kept"
    known = {entry["rule"] for entry in before.get(_RULES, ())}
    for entry in after.get(_RULES, ()):
        if entry["rule"] not in known:
            yield f"{where}: new rule: {entry['message']}"
    for name, child in before.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        if name not in after.get("properties", {}):
            yield f"{below}: is gone"
        else:
            yield from _schema(child, after["properties"][name], below)
    for keyword, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(before.get(keyword), Mapping):
            if isinstance(after.get(keyword), Mapping):
                yield from _schema(before[keyword], after[keyword], f"{path}{mark}")
            else:
                yield f"{where}: {keyword} is gone"
