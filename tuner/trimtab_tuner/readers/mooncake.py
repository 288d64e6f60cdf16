"""Mooncake traces (JSONL: timestamp in ms, input_length, output_length, hash_ids of 512-token prefix blocks).

Timestamps are quantised to about 3 s; `jitter` spreads them inside their bin for studies of short bursts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import IO

import numpy as np

from trimtab_tuner.errors import TraceError
from trimtab_tuner.trace import TraceRequest

from .lines import Row, json_object, json_rows, seconds, tokens

BLOCK_TOKENS = 512
BIN_S = 3.0
KEYS = ("timestamp", "input_length", "output_length")


def recognises(first_line: str) -> bool:
    """Whether this is a line of a Mooncake trace."""
    return all(key in json_object(first_line) for key in KEYS)


def rows(path: str, file: IO[str]) -> Iterator[Row]:
    """Rows in file order."""
    for line, value in json_rows(path, file):
        missing = [key for key in KEYS if key not in value]
        if missing:
            raise TraceError(
                path, line, sorted(value), f"the keys {', '.join(KEYS)}; missing: {', '.join(missing)}"
            )
        at = seconds(path, line, "timestamp (ms)", value["timestamp"]) / 1e3
        prompt = tokens(path, line, "input_length", value["input_length"])
        output = tokens(path, line, "output_length", value["output_length"])
        ids = block_ids(path, line, "hash_ids", value.get("hash_ids"))
        if not (prompt and output):
            yield Row(line, None)
            continue
        yield Row(
            line,
            TraceRequest(at, prompt, output, prefix_block_ids=ids),
            BLOCK_TOKENS if ids is not None else None,
        )


def block_ids(path: str, line: int, name: str, value: object) -> tuple[int | str, ...] | None:
    """A list of numbers or texts, or None."""
    if value is None:
        return None
    if not isinstance(value, list) or any(
        isinstance(each, bool) or not isinstance(each, int | str) for each in value
    ):
        raise TraceError(path, line, value, f"{name} as a list of block ids (numbers or texts)")
    return tuple(value)


def jitter(requests: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """Spread requests that share an instant uniformly over the following 3 s. Order is kept: offsets are sorted."""
    rng = np.random.default_rng(seed)
    spread: list[TraceRequest] = []
    for at, group in groupby(requests, key=lambda request: request.arrival_s):
        members = list(group)
        offsets = np.sort(rng.uniform(0.0, BIN_S, len(members)))
        spread.extend(
            replace(member, arrival_s=at + float(offset))
            for member, offset in zip(members, offsets, strict=True)
        )
    return sorted(spread, key=lambda request: request.arrival_s)  # bins are *about* 3 s: neighbours may touch
