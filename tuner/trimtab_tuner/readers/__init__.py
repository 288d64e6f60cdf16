"""Readers of trace files: one module a format, chosen here by name or by the file's first line.

Called by `trace.load` only. A reader yields rows and raises TraceError; this module sorts, rebases and counts what was
left out, so that all formats behave alike.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, cast

from trimtab_tuner.errors import InputError, TraceError, UnreadableFile
from trimtab_tuner.trace import Trace, TraceRequest, rebased

from . import azure, burstgpt, mooncake, records
from .lines import Row

FORMATS = {"azure": azure, "burstgpt": burstgpt, "mooncake": mooncake, "records": records}
_DAMAGE = (OSError, EOFError, zlib.error)


def read(path: Path, *, format: str, limit: int | None, jitter_seed: int | None) -> Trace:
    """See `trace.load`."""
    if format != "auto" and format not in FORMATS:
        raise InputError("--format", format, f"one of: auto, {', '.join(FORMATS)}")
    if limit is not None and limit < 1:
        raise InputError("--limit", limit, "a whole number ≥ 1")
    with _open(path) as file:
        chosen = _detect(path, file) if format == "auto" else format
        if jitter_seed is not None and chosen != "mooncake":
            raise InputError("--jitter-seed", jitter_seed, f"only with a Mooncake trace; {path} is {chosen}")
        requests: list[TraceRequest] = []
        changes: list[str] = []
        skipped = 0
        block_tokens: int | None = None
        for row in _rows(path, chosen, file):
            if row.request is None:
                skipped += 1
                continue
            if row.block_tokens is not None:
                if block_tokens not in (None, row.block_tokens):
                    raise TraceError(
                        str(path),
                        row.line,
                        row.block_tokens,
                        f"the same prefix block size as above: {block_tokens}",
                    )
                block_tokens = row.block_tokens
            requests.append(row.request)
            if limit is not None and len(requests) >= limit:
                changes.append(f"first {limit} requests")
                break
    if not requests:
        raise InputError(
            str(path), "no usable request", "a trace with at least one request that has prompt and output"
        )
    if skipped:
        changes.append(f"left out {skipped} requests without prompt or output (failed at the source)")
    if any(b.arrival_s < a.arrival_s for a, b in pairwise(requests)):
        requests.sort(key=lambda request: request.arrival_s)
        changes.append("sorted by arrival (the file was not)")
    requests = rebased(requests)
    if jitter_seed is not None:
        requests = rebased(mooncake.jitter(requests, jitter_seed))
        changes.append(f"jittered inside {mooncake.BIN_S:g} s bins, seed {jitter_seed}")
    return Trace(tuple(requests), str(path), chosen, block_tokens, tuple(changes))


def _rows(path: Path, format: str, file: IO[str]) -> Iterator[Row]:
    """Rows in file order; a compressed file may turn out to be damaged anywhere in it."""
    try:
        yield from FORMATS[format].rows(str(path), file)
    except _DAMAGE as error:
        raise UnreadableFile(path, error, "a trace") from None


def _open(path: Path) -> IO[str]:
    """Text without newline translation; undecodable bytes become surrogates that the field's check then refuses."""
    try:
        raw = cast("IO[bytes]", (gzip.open if path.suffix == ".gz" else open)(path, "rb"))
    except OSError as error:
        raise UnreadableFile(path, error, "a trace") from None
    return io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")


def _detect(path: Path, file: IO[str]) -> str:
    try:
        first = file.readline()
        file.seek(0)
    except _DAMAGE as error:
        raise UnreadableFile(path, error, "a trace") from None
    for name, module in FORMATS.items():
        if module.recognises(first):
            return name
    raise TraceError(
        str(path),
        1,
        first.strip()[:120],
        "the header of an Azure or BurstGPT CSV, or a JSON line with `timestamp` (Mooncake) or `arrival_s` (own records);"
        " or name the format with --format",
    )


def each_format() -> Iterator[tuple[str, str]]:
    """Name and one-line description of every format, for help texts."""
    for name, module in FORMATS.items():
        yield name, (module.__doc__ or "").split("\n", 1)[0].rstrip(".")


__all__ = ["FORMATS", "Row", "each_format", "read"]
