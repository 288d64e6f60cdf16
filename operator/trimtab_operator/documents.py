"""Reads one resource from YAML as strictly as kubectl does: one document, no duplicate keys, plain JSON values.

Used by `schema.load_service` and the command line. Knows nothing of the resource's shape. Every fault is a MalformedYaml with
line and column where YAML gives them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from trimtab_operator.errors import MalformedYaml

MAX_BYTES = 1_500_000  # etcd takes no larger object
_MAX_NODES = 100_000  # aliases can multiply a small text into a huge value
_MAX_DEPTH = 60


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and keeps dates as texts, as a JSON API does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            text = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a text", key_node.start_mark
                )
            if text in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {text!r} stands here twice", key_node.start_mark
                )
            seen.add(text)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read(source: Path | str) -> tuple[dict[str, Any], str]:
    """The resource in `source`, a Path or the text itself, and how to name it in errors."""
    if isinstance(source, str):
        return parse(source, "the document"), "the document"
    what = str(source)
    try:
        data = source.read_bytes()
    except OSError as error:
        raise MalformedYaml(f"cannot be read: {error.strerror or error}", what) from error
    try:
        return parse(data.decode("utf-8"), what), what
    except UnicodeDecodeError as error:
        raise MalformedYaml(f"is not UTF-8 at byte {error.start}", what) from error


def parse(text: str, what: str) -> dict[str, Any]:
    """One YAML document as a JSON object; raises MalformedYaml."""
    if len(text) > MAX_BYTES:
        raise MalformedYaml(f"is longer than {MAX_BYTES} bytes", what)
    try:
        documents = [d for d in yaml.load_all(text, Loader=_Loader) if d is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
        raise MalformedYaml(error.problem or str(error), what, line, column) from error
    except yaml.YAMLError as error:
        raise MalformedYaml(str(error), what) from error
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        # PyYAML's constructors let int("0b"), unhashable keys and deep nesting through as these.
        raise MalformedYaml(f"cannot be read: {error}", what) from error
    if len(documents) != 1:
        raise MalformedYaml(f"holds {len(documents)} resources; exactly one is wanted", what)
    if not isinstance(documents[0], dict):
        raise MalformedYaml("is not a resource (a mapping with apiVersion, kind, metadata and spec)", what)
    plain: dict[str, Any] = _plain(documents[0], what, [0], 0)
    return plain


def _plain(value: Any, what: str, count: list[int], depth: int) -> Any:
    """`value` as fresh plain JSON, aliases unfolded; 2048.0 becomes 2048, as JSON schema sees it."""
    count[0] += 1
    if count[0] > _MAX_NODES or depth > _MAX_DEPTH:
        raise MalformedYaml(
            f"holds more than {_MAX_NODES} values or is nested deeper than {_MAX_DEPTH}", what
        )
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise MalformedYaml(f"the key {key!r} must be a text; quote it", what)
        return {key: _plain(item, what, count, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, what, count, depth + 1) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise MalformedYaml(f"{value} is not a number that JSON knows", what)
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise MalformedYaml("holds an integer of more than 64 bits, which the API server does not", what)
    if value is None or isinstance(value, str | bool | int):
        return value
    raise MalformedYaml(f"a value of type {type(value).__name__} is not allowed", what)
