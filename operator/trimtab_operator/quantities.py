"""Durations (`800ms`, `1h30m`) and quantities (`4Gi`, `1500m`) as Kubernetes and Go write them. Pure.

Used by `api` to parse once, and by `kube`-side comparison to see that `1000m` equals `1`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_UNIT_S = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}
_QUANTITY = re.compile(r"([+-]?[0-9]+(?:\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+|[a-zA-Z]{0,2})")
# apimachinery's resource.Quantity: decimal and binary suffixes.
_SUFFIX = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50,
    "Ei": Decimal(2) ** 60,
}


def parse_duration(text: str) -> float:
    """Seconds. Accepts a plain `0`; raises ValueError on anything but number-and-unit pairs (ms, s, m, h)."""
    if text == "0":
        return 0.0
    total, position = Fraction(0), 0
    for match in _DURATION.finditer(text):
        if match.start() != position:
            break
        total += Fraction(match[1]) * _UNIT_S[match[2]]
        position = match.end()
    if not text or position != len(text):
        raise ValueError(f"{text!r} is not a duration such as 800ms, 60s or 1h30m")
    return float(total)


def format_duration(seconds: float) -> str:
    """The shortest single-unit form: 0.8 → `800ms`, 90 → `90s`, 3600 → `1h`. Exact to the millisecond."""
    milliseconds = round(seconds * 1000)
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds and milliseconds % size == 0:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms" if milliseconds else "0s"


def parse_quantity(text: str | int | float) -> Decimal:
    """The value of a Kubernetes quantity, exactly; raises ValueError when it is none."""
    match = _QUANTITY.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a quantity such as 4Gi, 500m or 2")
    number, suffix = Decimal(match[1]), match[2]
    if suffix[:1] in ("e", "E") and len(suffix) > 1 and suffix != "Ei":
        if len(suffix) > 4:  # Kubernetes holds nothing above an exa
            raise ValueError(f"{text!r} has an exponent beyond 99")
        return number * Decimal(10) ** int(suffix[1:])
    if suffix not in _SUFFIX:
        raise ValueError(
            f"{text!r} has the unknown suffix {suffix!r}; known are {', '.join(s for s in _SUFFIX if s)}"
        )
    return number * _SUFFIX[suffix]


def parse_bytes(text: str | int) -> int:
    """A quantity as whole bytes, rounded up as Kubernetes does."""
    value = parse_quantity(text)
    return int(value.to_integral_value(rounding="ROUND_CEILING"))
