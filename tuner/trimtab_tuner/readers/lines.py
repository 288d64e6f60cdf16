"""What all readers share: the row type, lines with numbers, and checked fields. Knows no format."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from trimtab_tuner.errors import TraceError
from trimtab_tuner.trace import TraceRequest

MAX_TOKENS = (
    10_000_000  # of one prompt or answer: replays make the prompt, so a slip must not fill the memory
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a file. `request` is None for a request without prompt or output tokens (failed at the source)."""

    line: int
    request: TraceRequest | None
    block_tokens: int | None = None


def csv_rows(path: str, file: IO[str], required: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and fields by column name; extra columns are passed on. The header must hold `required`."""
    reader = csv.reader(file, strict=True)
    header: list[str] | None = None
    try:
        for fields in reader:
            if not fields:
                continue  # blank lines, as some editors leave at the end
            if header is None:
                header = [name.strip() for name in fields]
                missing = [name for name in required if name not in header]
                if missing:
                    raise TraceError(
                        path, 1, ",".join(fields)[:120], f"a header with the columns {', '.join(required)}"
                    )
                continue
            if len(fields) != len(header):
                raise TraceError(
                    path, reader.line_num, ",".join(fields)[:120], f"{len(header)} comma-separated fields"
                )
            yield reader.line_num, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise TraceError(path, reader.line_num, str(error), "well-formed CSV") from None
    if header is None:
        raise TraceError(path, 1, "", f"a header with the columns {', '.join(required)}")


def json_rows(path: str, file: IO[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each non-blank line."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            value = _decode(line)
        except ValueError as error:
            raise TraceError(path, number, line.strip()[:120], f"one JSON object a line ({error})") from None
        if not isinstance(value, dict):
            raise TraceError(path, number, line.strip()[:120], "one JSON object a line")
        yield number, value


def tokens(path: str, line: int, name: str, value: object) -> int:
    """A whole number ≥ 0 from CSV text or a JSON number."""
    number: object = value
    if isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            try:
                number = float(value)  # pandas writes whole numbers as 12.0
            except ValueError:
                number = None
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_TOKENS:
        raise TraceError(path, line, value, f"{name} as a whole number ≥ 0 and at most {MAX_TOKENS}")
    return number


def seconds(path: str, line: int, name: str, value: object) -> float:
    """A finite number ≥ 0 from CSV text or a JSON number."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]  # checked by float itself
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise TraceError(path, line, value, f"{name} as a number ≥ 0")
    return number


def json_object(line: str) -> dict[str, Any]:
    """The first line of a file as a JSON object, or an empty one: for recognising a format."""
    try:
        value = _decode(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _decode(line: str) -> object:
    """The JSON value of a line; ValueError also for what Python's own reader lets through (NaN, half surrogate pairs)."""
    try:
        return msgspec.json.decode(line)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
