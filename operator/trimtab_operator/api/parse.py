"""Wire form ↔ frozen dataclasses: one decoder driven by the dataclasses themselves.

Used by the modules of `api` alone. A field's wire name is its own in camelCase; durations and quantities say so through
`duration` and `size`, which also carry default and range. Knows nothing of CRDs: `schema` has checked shapes before, but a
wrong shape still ends in a finding with its path, never in a crash.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from trimtab_operator.errors import Finding, InvalidResource
from trimtab_operator.quantities import format_duration, parse_bytes, parse_duration

T = TypeVar("T")


def duration(wire: str, default: str | None, low: str, high: str) -> Any:
    """A dataclass field in seconds, written as a duration text; `low` and `high` are inclusive."""
    seconds = None if default is None else parse_duration(default)
    return field(
        default=seconds,
        metadata={
            "wire": wire,
            "text": "duration",
            "low": parse_duration(low),
            "high": parse_duration(high),
            "range": f"{low} to {high}",
        },
    )


def required_duration(wire: str, low: str, high: str) -> Any:
    """As `duration`, without a default."""
    known = duration(wire, "0", low, high)
    return field(metadata=known.metadata)


def size(wire: str) -> Any:
    """An optional dataclass field in bytes, written as a quantity text."""
    return field(default=None, metadata={"wire": wire, "text": "size"})


def wire_name(name: str, metadata: Mapping[Any, Any]) -> str:
    """`max_num_seqs` → `maxNumSeqs`, unless the field says otherwise."""
    if "wire" in metadata:
        return str(metadata["wire"])
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def decode(cls: type[T], raw: object, path: str, errors: list[Finding]) -> T | None:
    """Build `cls` from its wire form; None when something is wrong, with the findings appended to `errors`."""
    if not isinstance(raw, Mapping):
        errors.append(Finding(path, raw, "an object"))
        return None
    before = len(errors)
    values: dict[str, Any] = {}
    for item in fields(cls):  # type: ignore[arg-type]  # callers pass dataclasses
        wire = wire_name(item.name, item.metadata)
        where = f"{path}.{wire}"
        if wire not in raw or raw[wire] is None:
            continue
        value = raw[wire]
        text = item.metadata.get("text")
        if text == "duration":
            values[item.name] = _duration(value, where, item.metadata, errors)
        elif text == "size":
            values[item.name] = _size(value, where, errors)
        else:
            values[item.name] = _value(_hints(cls)[item.name], value, where, errors)
    if len(errors) > before:
        return None
    try:
        return cls(**values)
    except TypeError as error:  # a field without default is missing
        errors.append(Finding(path, dict(raw), f"complete: {error}"))
        return None


def read(cls: type[T], raw: object, path: str, what: str) -> T:
    """As `decode`, but raises InvalidResource, which names `what`, with every finding."""
    errors: list[Finding] = []
    parsed = decode(cls, raw, path, errors)
    if parsed is None:
        raise InvalidResource(errors, what)
    return parsed


def _duration(value: object, where: str, metadata: Mapping[Any, Any], errors: list[Finding]) -> float | None:
    allowed = f"a duration from {metadata['range']}"
    try:
        seconds = parse_duration(value if isinstance(value, str) else repr(value))
    except ValueError:
        errors.append(Finding(where, value, allowed))
        return None
    if not metadata["low"] <= seconds <= metadata["high"]:
        errors.append(Finding(where, value, allowed))
    return seconds


def _size(value: object, where: str, errors: list[Finding]) -> int | None:
    try:
        size_bytes = parse_bytes(value if isinstance(value, str | int) else repr(value))
    except ValueError:
        errors.append(Finding(where, value, "a quantity of bytes such as 4Gi"))
        return None
    if size_bytes <= 0:
        errors.append(Finding(where, value, "a quantity above 0 such as 4Gi"))
    return size_bytes


def _value(hint: Any, value: object, where: str, errors: list[Finding]) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = [option for option in get_args(hint) if option is not type(None)]
        return _value(inner[0], value, where, errors)
    if origin is tuple:
        if not isinstance(value, list):
            errors.append(Finding(where, value, "a list"))
            return ()
        item_hint = get_args(hint)[0]
        return tuple(_value(item_hint, item, f"{where}[{i}]", errors) for i, item in enumerate(value))
    if isinstance(hint, type) and is_dataclass(hint):
        return decode(hint, value, where, errors)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            errors.append(Finding(where, value, "an object"))
            return {}
        return value
    return _scalar(hint, value, where, errors)


def _scalar(hint: Any, value: object, where: str, errors: list[Finding]) -> Any:
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    right = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    if not right:
        names = {str: "a text", int: "an integer", float: "a number", bool: "true or false"}
        errors.append(Finding(where, value, names.get(hint, str(hint))))
    return value


def encode(value: object) -> Any:
    """Inverse of `decode` for status objects: absent (None, empty) fields are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        out: dict[str, Any] = {}
        for item in fields(value):
            content = getattr(value, item.name)
            if content is None or content == () or content == {}:
                continue
            wire = wire_name(item.name, item.metadata)
            text = item.metadata.get("text")
            out[wire] = format_duration(content) if text == "duration" else encode(content)
        return out
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return value
