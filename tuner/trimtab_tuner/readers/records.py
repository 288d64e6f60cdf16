"""Own workload records (JSONL: arrival_s, prompt_tokens, output_tokens, and optionally class, tenant, prefix blocks).

The same records that an engine's `/admin/workload` gives (its whole reply is taken as well) and `trace.save` writes. Keys that are not known here are ignored, so
that engines may say more. A record without output (rejected or aborted before its first token) was offered load all
the same: it is replayed with the `max_tokens` it had asked for, or left out, counted, when that is not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import IO, Any

from trimtab_tuner.errors import TraceError
from trimtab_tuner.trace import TraceRequest

from .lines import Row, json_object, json_rows, seconds, tokens
from .mooncake import block_ids

KEYS = ("arrival_s", "prompt_tokens", "output_tokens")


# Of engines that name no block size with their prefix ids.
DEFAULT_BLOCK_TOKENS = 16


def recognises(first_line: str) -> bool:
    """Whether this is a workload record, or an engine's reply with many."""
    first = json_object(first_line)
    return all(key in first for key in KEYS) or isinstance(first.get("records"), list)


def rows(path: str, file: IO[str]) -> Iterator[Row]:
    """Rows in file order. Records of one reply share its line number."""
    for line, value in json_rows(path, file):
        records = value.get("records")
        block_size = value.get("block_size", DEFAULT_BLOCK_TOKENS)
        for record in records if isinstance(records, list) else [value]:
            if not isinstance(record, dict):
                raise TraceError(path, line, record, "records that are JSON objects")
            yield row(path, line, record, block_size)


def row(path: str, line: int, value: Mapping[str, Any], block_size: object) -> Row:
    """One record; `path` and `line` name it in errors. `block_size`: of prefix ids that come without one."""
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
        given = value.get("prefix_block_tokens", block_size)
        block_tokens = tokens(path, line, "prefix_block_tokens", given)
        if block_tokens == 0:
            raise TraceError(path, line, given, "prefix_block_tokens as a whole number ≥ 1")
    at = seconds(path, line, "arrival_s", value["arrival_s"])
    slo_class = _text(path, line, "slo_class", value.get("slo_class"))
    tenant = _text(path, line, "tenant", value.get("tenant"))
    if not (prompt and output):
        return Row(line, None)
    return Row(line, TraceRequest(at, prompt, output, slo_class or "default", ids, tenant), block_tokens)


def _text(path: str, line: int, name: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TraceError(path, line, value, f"{name} as text")
