"""Judges a resource as the API server would: structure, defaults, unknown fields, CEL rules; then what only types can say.

Used by local mode and the command line before anything is planned; in a cluster the API server has already applied the same CRD
files. Knows nothing of planning. All findings are collected, each with path, value and what is allowed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema.exceptions import ValidationError

from trimtab_operator import cel, crds, documents
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.errors import Finding, InvalidResource
from trimtab_operator.names import API_VERSION, RUN_KIND, SERVICE_KIND

_PRESERVE = "x-kubernetes-preserve-unknown-fields"
_RULES = "x-kubernetes-validations"
_LIST_TYPE = "x-kubernetes-list-type"
_LIST_KEYS = "x-kubernetes-list-map-keys"
# Patterns that a person would not want to read, by a piece that only they hold.
_PATTERN_WORDS = (
    ("(ms|s|m|h)", "a duration such as 800ms, 60s or 1h30m"),
    ("Ki|Mi|Gi", "a quantity of bytes such as 512Mi or 4Gi"),
    ("hf://", "hf://organisation/name, pvc://claim/path, file:///path or package://module/file"),
    ("@(hourly", "a cron line of five fields or a macro such as @daily"),
)
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


def load_service(source: Path | str, old: InferenceService | None = None) -> InferenceService:
    """One InferenceService from a file (Path) or a text, defaulted and validated.

    With `old`, transition rules (`oldSelf`) are judged too. Raises InvalidResource (`.errors`), of which MalformedYaml, with
    line and column, is a kind. What is valid but cannot be served here: `support.check`.
    """
    resource, what = documents.read(source)
    return parse_service(resource, old, what)


def parse_service(
    resource: Mapping[str, Any], old: InferenceService | None = None, what: str | None = None
) -> InferenceService:
    """As `load_service`, from a resource that is already plain JSON."""
    full = validate(resource, None if old is None else old.raw, SERVICE_KIND, what)
    return InferenceService.parse(full)


def parse_run(
    resource: Mapping[str, Any], old: Mapping[str, Any] | None = None, what: str | None = None
) -> TuningRun:
    """A TuningRun, defaulted and validated, as `parse_service`; `old` is the defaulted resource before."""
    return TuningRun.parse(validate(resource, old, RUN_KIND, what))


def validate(
    resource: Mapping[str, Any],
    old: Mapping[str, Any] | None = None,
    kind: str | None = None,
    what: str | None = None,
) -> dict[str, Any]:
    """A defaulted copy of `resource`, judged by its CRD; raises InvalidResource with every finding.

    `old` is the defaulted resource before this change. `kind` refuses any other kind; None takes both of ours.
    """
    found_kind = resource.get("kind")
    wanted = [kind] if kind is not None else [SERVICE_KIND, RUN_KIND]
    name = _name_of(resource)
    label = what or f'{found_kind} "{name}"'
    if resource.get("apiVersion") != API_VERSION:
        raise InvalidResource([Finding("apiVersion", resource.get("apiVersion"), API_VERSION)], label)
    if not isinstance(found_kind, str) or found_kind not in wanted:
        raise InvalidResource([Finding("kind", found_kind, f"one of {', '.join(wanted)}")], label)
    schema = crds.openapi(found_kind)
    full: dict[str, Any] = copy.deepcopy(dict(resource))
    errors = list(_metadata_findings(full.get("metadata")))
    errors += _complete(schema, full, "", is_root=True)
    errors += _structural(schema, full)
    if not errors:  # rules may rely on the structure, as at the API server
        errors += _rule_findings(schema, full, None if old is None else dict(old), "")
    if errors:
        unique: list[Finding] = []  # a wrong value can break type and enum at once
        for finding in errors:
            if finding not in unique:
                unique.append(finding)
        raise InvalidResource(unique, label)
    return full


def _name_of(resource: Mapping[str, Any]) -> object:
    metadata = resource.get("metadata")
    return metadata.get("name") if isinstance(metadata, Mapping) else None


def _metadata_findings(metadata: object) -> Iterator[Finding]:
    """The part of ObjectMeta that we rely on; a CRD cannot describe it."""
    if not isinstance(metadata, Mapping):
        yield Finding("metadata", metadata, "an object with a name")
        return
    name = metadata.get("name")
    if not isinstance(name, str) or len(name) > 253 or _DNS_NAME.fullmatch(name) is None:
        yield Finding("metadata.name", name, "lower-case letters, digits, - and . (1 to 253 characters)")
    namespace = metadata.get("namespace", "default")
    if not isinstance(namespace, str) or _DNS_NAME.fullmatch(namespace) is None:
        yield Finding("metadata.namespace", namespace, "lower-case letters, digits and -")
    for field_name in ("labels", "annotations"):
        texts = metadata.get(field_name)
        if texts is None:
            continue
        if not isinstance(texts, Mapping):
            yield Finding(f"metadata.{field_name}", texts, "an object of texts")
            continue
        for key, value in texts.items():
            if not isinstance(value, str):
                yield Finding(f"metadata.{field_name}.{key}", value, "a text (quote it)")
    generation = metadata.get("generation", 1)
    if isinstance(generation, bool) or not isinstance(generation, int):
        yield Finding("metadata.generation", generation, "an integer")


def _complete(schema: Mapping[str, Any], value: Any, path: str, *, is_root: bool = False) -> list[Finding]:
    """Fill in defaults in place; report unknown fields and equal keys in lists."""
    errors: list[Finding] = []
    if isinstance(value, dict) and schema.get("type") == "object":
        properties: Mapping[str, Any] = schema.get("properties", {})
        for name, child in properties.items():
            # An explicit null means absent, as at the API server.
            if name in value and value[name] is None:
                del value[name]
            if name not in value and "default" in child:
                value[name] = copy.deepcopy(child["default"])
            if name in value and not (is_root and name == "metadata"):
                errors += _complete(child, value[name], _join(path, name))
        extra = schema.get("additionalProperties")
        for name in list(value):
            if name in properties:
                continue
            if isinstance(extra, Mapping) and value[name] is None:
                del value[name]
            elif isinstance(extra, Mapping):
                errors += _complete(extra, value[name], _join(path, name))
            elif not schema.get(_PRESERVE):
                known = ", ".join(sorted(properties))
                errors.append(Finding(_join(path, name), value[name], f"unknown field; known are {known}"))
    elif isinstance(value, list) and schema.get("type") == "array":
        for index, item in enumerate(value):
            errors += _complete(schema["items"], item, f"{path}[{index}]")
        errors += _duplicates(schema, value, path)
    return errors


def _duplicates(schema: Mapping[str, Any], items: list[Any], path: str) -> Iterator[Finding]:
    kind = schema.get(_LIST_TYPE)
    seen: list[object] = []
    for index, item in enumerate(items):
        if kind == "map" and isinstance(item, Mapping):
            keys = schema[_LIST_KEYS]
            identity: object = [item.get(key) for key in keys]
            where = f"{path}[{index}].{keys[0]}"
            shown: object = item.get(keys[0])
        elif kind == "set":
            identity, where, shown = item, f"{path}[{index}]", item
        else:
            continue
        if identity in seen:
            yield Finding(where, shown, "a value that no other entry has")
        seen.append(identity)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _dotted(parts: Any) -> str:
    text = ""
    for part in parts:
        text = f"{text}[{part}]" if isinstance(part, int) else _join(text, str(part))
    return text


def _match_pattern(
    validator: Any, pattern: str, instance: object, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    # Go's $ is the end of the text; Python's also stands before a final newline.
    if isinstance(instance, str) and re.search(re.sub(r"\$$", r"\\Z", pattern), instance, re.ASCII) is None:
        yield ValidationError("pattern")


_Validator: Callable[[Mapping[str, Any]], Any] = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
    jsonschema.Draft202012Validator, {"pattern": _match_pattern}
)


def _structural(schema: Mapping[str, Any], value: Any) -> Iterator[Finding]:
    for error in sorted(_Validator(schema).iter_errors(value), key=lambda e: list(map(str, e.absolute_path))):
        path = _dotted(error.absolute_path)
        if path == "metadata":
            continue  # judged by _metadata_findings
        if error.validator == "required":
            for name in error.validator_value:
                if name not in error.instance:
                    child = error.schema.get("properties", {}).get(name, {})
                    yield Finding(_join(path, name), None, f"required: {_allowed(child, None)}")
            continue
        yield Finding(path, error.instance, _allowed(error.schema, error.instance))


def _allowed(schema: Mapping[str, Any], value: object) -> str:
    """What would be right, in words, from the schema of the field."""
    kind = schema.get("type")
    if "enum" in schema:
        text = f"one of {', '.join(map(str, schema['enum']))}"
        if isinstance(value, bool) and {"On", "Off"} & set(map(str, schema["enum"])):
            text += ' (YAML reads a bare Off as false: write "Off")'
        return text
    low, high = schema.get("minimum"), schema.get("maximum")
    if kind in ("integer", "number"):
        noun = "an integer" if kind == "integer" else "a number"
        if low is not None and high is not None:
            return f"{noun} from {low} to {high}"
        return f"{noun} of at least {low}" if low is not None else noun
    if kind == "string":
        pattern = schema.get("pattern")
        words = "a text"
        if pattern:
            words = next(
                (w for piece, w in _PATTERN_WORDS if piece in pattern), f"a text that matches {pattern}"
            )
        if "maxLength" in schema:
            words += f" ({schema.get('minLength', 0)} to {schema['maxLength']} characters)"
        return words
    if kind == "array":
        return f"a list of {schema.get('minItems', 0)} to {schema.get('maxItems', 'any number of')} entries"
    if kind == "object":
        most = schema.get("maxProperties")
        return "an object" if most is None else f"an object of at most {most} entries"
    return "true or false" if kind == "boolean" else str(kind)


def _rule_findings(schema: Mapping[str, Any], value: Any, old: Any, path: str) -> Iterator[Finding]:
    """CEL rules of this value and of all below it; `old` is the value at the same place before, or None."""
    for entry in schema.get(_RULES, ()):
        rule = entry["rule"]
        if cel.is_transition(rule) and old is None:
            continue
        if not cel.holds(rule, value, old):
            yield Finding(path or "metadata.name", cel.named_values(rule, value) or value, entry["message"])
    if isinstance(value, dict):
        for name, child in schema.get("properties", {}).items():
            if name in value:
                before = old.get(name) if isinstance(old, dict) else None
                yield from _rule_findings(child, value[name], before, _join(path, name))
    elif isinstance(value, list) and schema.get("type") == "array":
        keys = schema.get(_LIST_KEYS)
        for index, item in enumerate(value):
            before = None
            if keys and isinstance(old, list):
                before = next((o for o in old if all(o.get(k) == item.get(k) for k in keys)), None)
            yield from _rule_findings(schema["items"], item, before, f"{path}[{index}]")
