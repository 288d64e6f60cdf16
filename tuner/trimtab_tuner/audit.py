"""The audit trail: one JSON line for everything a run decided, with the numbers it decided by.

Written by `run`, append-only and flushed line by line, so that a killed run leaves its reasons behind.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path


class Audit:
    """Appends to `path`; None keeps the lines in memory only."""

    def __init__(self, path: Path | None = None, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._now = now
        self.lines: list[dict[str, object]] = []

    def write(self, event: str, **fields: object) -> None:
        """One line; times are Unix seconds."""
        line = {"at": round(self._now(), 3), "event": event, **fields}
        self.lines.append(line)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(plain(line), allow_nan=False) + "\n")


def plain(value: object) -> object:
    """JSON that every reader takes: no NaN or infinity (null instead), no tuples or odd keys."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else "/".join(map(str, k)): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value
