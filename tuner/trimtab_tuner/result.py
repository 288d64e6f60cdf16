"""What a replay measured: raw samples of every request, with provenance, as one JSON file (optionally gzipped).

Written by `replay.py`, read by statistics, report and study. Holds no percentile: those are computed from the samples
(`stats.py`), and the `summary` stored beside them is for readers of the file only.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from .errors import InputError, UnreadableFile
from .slo import Slo

SCHEMA = "trimtab.replay/1"

# ok: all tokens came. rejected: 503 or 429. failed: other status, broken connection or stream. truncated: fewer tokens than
# asked. timeout: a limit given by the caller passed. cancelled: the measurement was stopped first (not the server's failure).
Status = Literal["ok", "rejected", "failed", "truncated", "timeout", "cancelled"]
FAILURES: frozenset[Status] = frozenset({"rejected", "failed", "truncated", "timeout"})


@dataclass(slots=True)
class RequestResult:
    """One request. Times are seconds since the start of the replay; None = did not happen.

    `token_times_s` holds one entry a delivery: a chunk that carried at least one new token. `output_tokens`, `prompt_tokens`
    and `cached_tokens` are what the server reported (usage); `asked_*` is what the trace wanted.
    """

    index: int
    intended_s: float
    asked_prompt_tokens: int
    asked_output_tokens: int
    slo_class: str = "default"
    sent_s: float | None = None
    first_token_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    finish_s: float | None = None
    status: Status = "cancelled"
    error: str | None = None
    http_status: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    generation: int | None = None

    @property
    def failed(self) -> bool:
        """The server did not deliver what was asked."""
        return self.status in FAILURES


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """All requests that were due, in trace order. `meta` is provenance: url, trace and its hash, mode, seed, versions…"""

    meta: Mapping[str, Any]
    slo: Slo
    requests: tuple[RequestResult, ...]

    def save(self, path: str | Path, summary: Mapping[str, Any] | None = None) -> None:
        """Write JSON (gzip when the name ends in .gz), whole or not at all."""
        document = {
            "schema": SCHEMA,
            "meta": dict(self.meta),
            "slo": self.slo.to_json(),
            "summary": summary,
            "requests": [_request_json(request) for request in self.requests],
        }
        text = json.dumps(document, allow_nan=False, separators=(",", ":"))
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())
        partial.replace(path)

    @staticmethod
    def load(path: str | Path) -> ReplayResult:
        """Read what `save` wrote. Raises InputError naming file, field and what was expected."""
        path = Path(path)
        try:
            raw = path.read_bytes()
            document = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        except (OSError, EOFError, ValueError, RecursionError) as error:
            raise UnreadableFile(path, error, "a replay result (JSON, or .gz of it)") from None
        return ReplayResult.from_json(document, str(path))

    @staticmethod
    def from_json(document: object, path: str) -> ReplayResult:
        """Check and convert a parsed document; `path` names it in errors."""
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            found = document.get("schema") if isinstance(document, dict) else type(document).__name__
            raise InputError(f"{path}: schema", found, f"a replay result with schema {SCHEMA!r}")
        meta, slo, rows = document.get("meta"), document.get("slo"), document.get("requests")
        if not isinstance(meta, dict) or not isinstance(slo, dict) or not isinstance(rows, list):
            raise InputError(path, sorted(document), "the keys meta, slo (objects) and requests (a list)")
        requests = tuple(_request(row, f"{path}: requests[{number}]") for number, row in enumerate(rows))
        return ReplayResult(meta, Slo.from_json(slo, f"{path}: slo"), requests)


_TIMES = ("intended_s", "sent_s", "first_token_s", "finish_s")
_COUNTS = (
    "index",
    "asked_prompt_tokens",
    "asked_output_tokens",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
)
_OPTIONAL = {"sent_s", "first_token_s", "finish_s", "prompt_tokens", "output_tokens", "cached_tokens"}


def _request_json(request: RequestResult) -> dict[str, Any]:
    row = {name: getattr(request, name) for name in RequestResult.__slots__}
    for name in _TIMES:
        row[name] = None if row[name] is None else round(row[name], 6)
    row["token_times_s"] = [round(at, 6) for at in request.token_times_s]
    return row


def _request(row: object, path: str) -> RequestResult:
    if not isinstance(row, dict):
        raise InputError(path, row, "an object")
    known = {name: row[name] for name in RequestResult.__slots__ if name in row}
    for name in (*_TIMES, *_COUNTS):
        value = known.get(name)
        if value is None and name in _OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"{path}.{name}", value, "a finite number")
    times = known.get("token_times_s", [])
    if not isinstance(times, list) or any(
        isinstance(t, bool) or not isinstance(t, int | float) for t in times
    ):
        raise InputError(f"{path}.token_times_s", times, "a list of seconds")
    if known.get("status") not in get_args(Status):
        raise InputError(f"{path}.status", known.get("status"), f"one of: {', '.join(get_args(Status))}")
    return RequestResult(**known)
