"""Parses the Prometheus text exposition format (0.0.4; OpenMetrics' extras are skipped).

Called by `scrape`. Knows nothing of HTTP, of time or of which metrics matter. prometheus_client ships a parser too; it
builds one object per sample and guesses families, this one fills the two-level mapping that `snapshot` reads, several
times faster, and names the line that is broken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trimtab_tuner.errors import TunerError

Labels = tuple[tuple[str, str], ...]
"""Label pairs sorted by name."""
Series = Mapping[str, Mapping[Labels, float]]
"""metric name → labels → value."""

_SAMPLE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*"
    r'(\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?\s*'
    r"(?<=[\s}])(\S+)"
    r"(?:\s+-?\d+(?:\.\d+)?)?(?:\s+#.*)?\s*$"  # a timestamp and OpenMetrics' exemplar, not used
)
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|$)')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}


class ExpositionError(TunerError):
    """A line is not in the text format; the message carries its number and text."""


def parse(text: str) -> Series:
    """All samples of one exposition. Raises ExpositionError on the first broken line."""
    found: dict[str, dict[Labels, float]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line or line[0] == "#" or line.isspace():
            continue
        match = _SAMPLE.match(line)
        if match is None:
            raise ExpositionError(f"line {number}: {line[:120]!r} is not a sample")
        name, raw_labels, raw_value = match.groups()
        try:
            value = float(raw_value)
        except ValueError:
            raise ExpositionError(f"line {number}: {raw_value!r} is not a number") from None
        labels = _labels(raw_labels[1:-1], number) if raw_labels else ()
        found.setdefault(name, {})[labels] = value
    return found


def _labels(raw: str, number: int) -> Labels:
    pairs: list[tuple[str, str]] = []
    position = 0
    while position < len(raw) and not raw[position:].isspace():
        match = _LABEL.match(raw, position)
        if match is None:
            raise ExpositionError(
                f"line {number}: label list {raw[:120]!r} is broken at {raw[position:][:40]!r}"
            )
        value = match.group(2)
        if "\\" in value:
            value = _ESCAPE.sub(lambda m: _ESCAPED.get(m.group(1), m.group(0)), value)
        pairs.append((match.group(1), value))
        position = match.end()
    return tuple(sorted(pairs))
