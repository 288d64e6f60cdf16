"""Bytes as people read them. Pure; used where a message names a size."""

from __future__ import annotations


def size_text(count: int) -> str:
    """`2.7 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
