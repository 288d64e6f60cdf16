"""Durations and numbers as people type them. Used by the commands and readers; knows nothing about traces or servers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

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


def span_text(seconds: float) -> str:
    """A long time as people write it: 7052 → `1h57m32s`, 120 → `2m`, 0.5 → `0.5s`."""
    if seconds < 60:
        return f"{seconds:g}s" if seconds == int(seconds) else f"{seconds:.1f}s"
    hours, rest = divmod(round(seconds), 3600)
    parts = (f"{hours}h", f"{rest // 60}m", f"{rest % 60}s")
    return "".join(part for part in parts if part[0] != "0")


def parse_share(text: str, path: str) -> float:
    """`3%` or `0.03` → 0.03, from 0 to below 1. `path` names the flag or field in the error."""
    percent = text.strip().endswith("%")
    try:
        value = float(text.strip().removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise InputError(path, text, "a share from 0 to below 1, such as 3% or 0.03")
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


def format_durations(seconds: Sequence[float | None], unit: str = "auto") -> str:
    """Several durations with one unit at the end, `0.33 / 4.80 / – s`; unit: s, ms, or auto (s from one second on)."""
    finite = [each for each in seconds if each is not None and math.isfinite(each)]
    if not finite:
        return " / ".join(format_duration(each) for each in seconds)
    if unit == "auto":
        unit = "s" if max(finite) >= 1.0 else "ms"
    scale, digits = (1.0, 2) if unit == "s" else (1e3, 0 if min(finite) >= 0.01 else 1)
    texts = (
        f"{each * scale:,.{digits}f}" if each is not None and math.isfinite(each) else format_duration(each)
        for each in seconds
    )
    return f"{' / '.join(texts)} {unit}"
