"""How far a starting engine is with its download, in words that change at most at every tenth. Pure; used by both shells.

The text ends in a condition, and a status must not be written for every megabyte.
"""

from __future__ import annotations

from collections.abc import Mapping

LOOK_EVERY_S = 5.0  # nobody tells the operator that a download has moved


def describe(lifecycle: object) -> str | None:
    """What the engine's `/ready` or `/admin/drain` (any JSON) says of a download; None when it does not download."""
    if not isinstance(lifecycle, Mapping):
        return None
    fraction, total_bytes = lifecycle.get("fraction"), lifecycle.get("total_bytes")
    if lifecycle.get("stage") != "download" or not isinstance(fraction, int | float):
        return None
    waiting_for = lifecycle.get("waiting_for")
    text = "downloads the model"
    if isinstance(total_bytes, int) and 0 < total_bytes < 2**63:
        text += f": {int(max(0.0, min(fraction, 1.0)) * 10) * 10} % of {_size(total_bytes)}"
    return f"{text}; waiting: {waiting_for}" if isinstance(waiting_for, str) else text


def is_moving(text: str) -> bool:
    """Whether a description tells of bytes."""
    return " % of " in text


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
