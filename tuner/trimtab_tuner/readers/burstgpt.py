"""BurstGPT traces (CSV: Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type).

Columns are read by name, because the third file inserts `Session ID` and `Elapsed time`. `Timestamp` is seconds from
midnight of the first day. Requests that failed at the source have no response tokens and are left out, counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from trimtab_tuner.trace import TraceRequest

from .lines import Row, csv_rows, seconds, tokens

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def recognises(first_line: str) -> bool:
    """Whether this is the header of a BurstGPT trace."""
    names = {name.strip() for name in first_line.split(",")}
    return names.issuperset(COLUMNS)


def rows(path: str, file: IO[str]) -> Iterator[Row]:
    """Rows in file order."""
    for line, fields in csv_rows(path, file, COLUMNS):
        at = seconds(path, line, "Timestamp", fields["Timestamp"])
        prompt = tokens(path, line, "Request tokens", fields["Request tokens"])
        output = tokens(path, line, "Response tokens", fields["Response tokens"])
        yield Row(line, TraceRequest(at, prompt, output) if prompt and output else None)
