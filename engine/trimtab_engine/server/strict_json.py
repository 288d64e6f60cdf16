"""JSON from outside, read strictly: what Python's own reader lets through and we cannot use is an error like any other.

Used for every document that a person or a program hands us (request bodies, live config). `json.loads` would take NaN and
Infinity (as limits they compare false with everything) and half surrogate pairs (which cannot be sent back), and nesting
beyond its stack surfaces as RecursionError.
"""

from __future__ import annotations

import msgspec


def decode(data: bytes) -> object:
    """The value in `data`; raises ValueError with the reason and, where known, the position."""
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
