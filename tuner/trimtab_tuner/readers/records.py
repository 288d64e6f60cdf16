"""Own workload records (JSONL: arrival_s, prompt_tokens, output_tokens, and optionally class, tenant, prefix blocks).

The same lines that an engine's `/admin/workload` gives and `trace.save` writes. Keys that are not known here are ignored, so
that engines may say more. A record without output (rejected or aborted before its first token) was offered load all
the same: it is replayed with the `max_tokens` it had asked for, or left out, counted, when that is not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from trimtab_tuner.errors import TraceError
from trimtab_tuner.trace import TraceRequest

from .lines import Row, json_object, json_rows, seconds, tokens
from .mooncake import block_ids

KEYS = ("arrival_s", "prompt_tokens", "output_tokens")


def recognises(first_line: str) -> bool:
    """Whether this is a workload record."""
    return all(key in json_object(first_line) for key in KEYS)


def rows(path: str, file: IO[str]) -> Iterator[Row]:
    """Rows in file order."""
    for line, value in json_rows(path, file):
        missing = [key for key in KEYS if key not in value]
        if missing:
            raise TraceError(
                path, line, sorted(value), f"the keys {', '.join(KEYS)}; missing: {', '.join(missing)}"
            )
        prompt = tokens(path, line, "prompt_tokens", value["prompt_tokens"])
        output = tokens(path, line, "output_tokens", value["output_tokens"])
        if output == 0 and value.get("max_tokens") is not None:
            output = tokens(path, line, "max_tokens", value["max_tokens"])
        ids = block_ids(path, line, "prefix_block_ids", value.get("prefix_block_ids"))
        block_tokens = None
        if ids is not None:
            block_tokens = tokens(path, line, "prefix_block_tokens", value.get("prefix_block_tokens"))
            if block_tokens == 0:
                raise TraceError(path, line, 0, "prefix_block_tokens as a whole number ≥ 1")
        at = seconds(path, line, "arrival_s", value["arrival_s"])
        slo_class = _text(path, line, "slo_class", value.get("slo_class"))
        tenant = _text(path, line, "tenant", value.get("tenant"))
        if not (prompt and output):
            yield Row(line, None)
            continue
        yield Row(line, TraceRequest(at, prompt, output, slo_class or "default", ids, tenant), block_tokens)


def _text(path: str, line: int, name: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TraceError(path, line, value, f"{name} as text")
