"""Exception tree of the operator. Imported everywhere; imports nothing.

OperatorError
├── InvalidResource   a resource is wrong: a list of findings, each with path, value and what is allowed
│   └── MalformedYaml the text is not YAML, or not one resource: file, line and column
└── Unsupported       a resource is right, but this release or this mode cannot do what it asks for: findings
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `path` is dotted (`spec.tuning.parameters[0].max`); `allowed` says what would be right. `value` is
    None where nothing was given."""

    path: str
    value: object
    allowed: str

    def __str__(self) -> str:
        shown, path = repr(self.value), _cut(self.path, 300)
        if self.value is None:
            return f"{path}: {self.allowed}"
        if isinstance(self.value, bool):
            shown = shown.lower()  # as YAML has it
        if isinstance(self.value, dict | list):
            # A rule over several fields, or an unknown field: what is wrong comes before a long value.
            return f"{path}: {self.allowed}; given {_cut(shown, 200)}"
        return f"{path}: {_cut(shown, 120)} is not allowed; {self.allowed}"


class Waiting(Finding):
    """A field that may be set and that this release does not act on yet; `allowed` says what happens instead."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self.path}: {_cut(repr(self.value), 120)} has no effect yet; {self.allowed}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 2] + " …"


class OperatorError(Exception):
    """Root of all errors that the operator raises on purpose."""


class InvalidResource(OperatorError):
    """A resource is not allowed. Nothing was changed. `errors` is never empty."""

    def __init__(self, errors: Sequence[Finding], what: str = "the resource") -> None:
        self.errors = tuple(errors)
        self.what = what
        super().__init__(f"{what} is invalid:\n" + "\n".join(f"  {finding}" for finding in self.errors))


class MalformedYaml(InvalidResource):
    """The text cannot be read as one YAML resource. `line` and `column` count from 1 and are None when unknown."""

    def __init__(self, message: str, what: str, line: int | None = None, column: int | None = None) -> None:
        self.line = line
        self.column = column
        where = "" if line is None else f"line {line}, column {column}"
        super().__init__([Finding(where or "document", None, message)], what)
        place = f"{what}, {where}" if where else what
        self.args = (f"{place}: {message}",)


class Unsupported(OperatorError):
    """The resource is valid, but this release or this mode cannot carry it out."""

    def __init__(self, errors: Sequence[Finding], what: str = "the resource") -> None:
        self.errors = tuple(errors)
        super().__init__(f"{what} cannot be served:\n" + "\n".join(f"  {finding}" for finding in self.errors))
