"""Azure LLM inference traces, 2023 and 2024 (CSV: TIMESTAMP, ContextTokens, GeneratedTokens).

The 2023 files have CRLF line ends and seven fractional digits without zone, the 2024 ones up to six digits and a UTC offset;
`datetime` reads at most six digits, so the fraction is parsed apart. Wall-clock times become seconds since the first row's
whole second, which keeps all digits in a float; without a zone they are read as UTC (only differences matter).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import IO

from trimtab_tuner.errors import TraceError
from trimtab_tuner.trace import TraceRequest

from .lines import Row, csv_rows, tokens

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)?")


def recognises(first_line: str) -> bool:
    """Whether this is the header of an Azure trace."""
    names = {name.strip() for name in first_line.split(",")}
    return names.issuperset(COLUMNS)


def rows(path: str, file: IO[str]) -> Iterator[Row]:
    """Rows in file order."""
    origin: int | None = None
    for line, fields in csv_rows(path, file, COLUMNS):
        whole_s, fraction_s = _timestamp(path, line, fields["TIMESTAMP"])
        origin = whole_s if origin is None else origin
        at = whole_s - origin + fraction_s
        prompt = tokens(path, line, "ContextTokens", fields["ContextTokens"])
        output = tokens(path, line, "GeneratedTokens", fields["GeneratedTokens"])
        yield Row(line, TraceRequest(at, prompt, output) if prompt and output else None)


def _timestamp(path: str, line: int, text: str) -> tuple[int, float]:
    """Whole seconds since the epoch, and the fraction."""
    match = _TIME.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        whole = datetime.fromisoformat(match[1] + (match[3] or ""))
    except ValueError:
        raise TraceError(path, line, text, "TIMESTAMP like 2023-11-16 18:17:03.9799600") from None
    if whole.tzinfo is None:
        whole = whole.replace(tzinfo=UTC)
    return int(whole.timestamp()), float(match[2] or 0)
