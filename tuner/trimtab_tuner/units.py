"""Durations and numbers as people type them. Used by the commands and readers; knows nothing about traces or servers."""

from __future__ import annotations

import math
import re

from .errors import InputError

_DURATION = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(us|ms|s|m|min|h)?\s*")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_duration_s(text: str, path: str) -> float:
    """`800ms`, `1.5s`, `2m` or a bare number of seconds → seconds (> 0). `path` names the flag in the error."""
    match = _DURATION.fullmatch(text)
    value = float(match[1]) * _SECONDS[match[2] or "s"] if match else math.nan
    if not (math.isfinite(value) and value > 0):
        raise InputError(
            path, text, "a duration above 0 such as 800ms, 1.5s or 2m (a bare number is seconds)"
        )
    return value


def format_duration(seconds: float | None) -> str:
    """Seconds → a short text with a unit that keeps three digits; None → `–`, infinity → `failed`."""
    if seconds is None:
        return "–"
    if math.isinf(seconds):
        return "failed"
    if abs(seconds) < 1.0:
        return f"{seconds * 1e3:.3g} ms" if abs(seconds) < 0.0995 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 99.95 else f"{seconds:,.0f} s"
