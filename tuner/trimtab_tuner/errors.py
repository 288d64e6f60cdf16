"""Exception tree of the tuner. Imported everywhere; imports nothing.

TunerError
├── InputError          a flag, a file or a value from a person is wrong: path, value, what is allowed
│   └── TraceError      a line of a trace file is broken: file, line number, value, what was expected
└── ServerError         the server under test cannot be used as asked (unreachable, refuses, reports odd usage)
"""

from __future__ import annotations


class TunerError(Exception):
    """Root of all errors that the tuner raises on purpose; the command line prints them without a traceback."""


class InputError(TunerError):
    """Something that a person gave is wrong, and nothing was changed or sent.

    `path` names the flag, field or file (`--speed`, `trace.jsonl`), `allowed` says what would have been right.
    """

    def __init__(self, path: str, value: object, allowed: str) -> None:
        super().__init__(f"{path}: {value!r} is not allowed; {allowed}")
        self.path = path
        self.value = value
        self.allowed = allowed


class TraceError(InputError):
    """One line of a trace file is broken. `line` counts from 1 as editors do, header included."""

    def __init__(self, path: str, line: int, value: object, expected: str) -> None:
        super().__init__(f"{path}:{line}", value, f"expected {expected}")
        self.line = line


class ServerError(TunerError):
    """The server under test cannot be measured; the message names the URL and what it answered."""
