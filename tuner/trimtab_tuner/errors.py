"""Exception tree of the tuner. Imported everywhere; imports nothing.

TunerError
├── InputError          a flag, a file or a value from a person is wrong: path, value, what is allowed
│   ├── UnreadableFile  a file is missing, unreadable or damaged: path, what was wanted, reason
│   └── TraceError      a line of a trace file is broken: file, line number, value, what was expected
└── ServerError         the server under test cannot be used as asked (unreachable, refuses, reports odd usage)
"""

from __future__ import annotations

from pathlib import Path

_MAX_SHOWN = 160


class TunerError(Exception):
    """Root of all errors that the tuner raises on purpose; the command line prints them without a traceback."""


class InputError(TunerError):
    """Something that a person gave is wrong, and nothing was changed or sent.

    `path` names the flag, field or file (`--speed`, `trace.jsonl`), `allowed` says what would have been right. `value`
    is None where nothing was given.
    """

    def __init__(self, path: str, value: object, allowed: str) -> None:
        super().__init__(
            f"{path}: {allowed}" if value is None else f"{path}: {value!r} is not allowed; {allowed}"
        )
        self.path = path
        self.value = value
        self.allowed = allowed


class UnreadableFile(InputError):
    """A file that is not there, cannot be read or is damaged; `reason` says which."""

    def __init__(self, path: str | Path, reason: Exception, wanted: str) -> None:
        super().__init__(str(path), None, f"cannot be read as {wanted}: {_reason(reason)}")


class TraceError(InputError):
    """One line of a trace file is broken. `line` counts from 1 as editors do, header included."""

    def __init__(self, path: str, line: int, value: object, expected: str) -> None:
        super().__init__(f"{path}:{line}", _short(value), f"expected {expected}")
        self.line = line


class ServerError(TunerError):
    """The server under test cannot be measured; the message names the URL and what it answered."""


def _short(value: object) -> object:
    """`value`, or its beginning: a line may be of any length, and what is said of it ends up in a status."""
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
