"""Walks a CRD's schema: every leaf field of spec with its dotted path, every rule with the place it stands at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trimtab_operator import crds


def spec_schema(kind: str) -> dict[str, Any]:
    """The schema of `spec`."""
    found: dict[str, Any] = crds.openapi(kind)["properties"]["spec"]
    return found


def every_field(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All named fields below `schema`, leaves and objects; list entries are written `classes[]`."""
    for name, child in schema.get("properties", {}).items():
        where = f"{path}.{name}" if path else name
        yield where, child
        yield from every_field(child, where)
        if "items" in child:
            yield from every_field(child["items"], f"{where}[]")


def leaves(kind: str) -> dict[str, dict[str, Any]]:
    """Fields of spec that a person sets: scalars, lists of scalars, free-form objects and maps."""
    return {
        path: field
        for path, field in every_field(spec_schema(kind))
        if not field.get("properties") and not field.get("items", {}).get("properties")
    }


def every_rule(kind: str) -> Iterator[tuple[str, str, str]]:
    """(place, rule, message) of each CEL rule."""
    root = crds.openapi(kind)
    for entry in root.get("x-kubernetes-validations", ()):
        yield "", entry["rule"], entry["message"]
    for path, field in every_field(root):
        for holder, where in ((field, path), (field.get("items", {}), f"{path}[]")):
            for entry in holder.get("x-kubernetes-validations", ()):
                yield where, entry["rule"], entry["message"]
