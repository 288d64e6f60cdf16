"""Latency targets of a service as the tuner sees them. Pure data; used by replay, statistics, report and study."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import InputError


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in seconds: first token after the intended send, and the longest gap between two tokens.

    `classes` holds targets of SLO classes that differ from these; the targets given here are for all others.
    """

    ttft_s: float
    itl_s: float
    classes: Mapping[str, Slo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("slo.ttft_s", self.ttft_s), ("slo.itl_s", self.itl_s)):
            if not (math.isfinite(value) and value > 0):
                raise InputError(name, value, "seconds above 0")

    def of(self, slo_class: str) -> Slo:
        """The targets that hold for one class."""
        return self.classes.get(slo_class, self)

    def to_json(self) -> dict[str, object]:
        """As stored in results; `from_json` reads it back."""
        data: dict[str, object] = {"ttft_s": self.ttft_s, "itl_s": self.itl_s}
        if self.classes:
            data["classes"] = {name: slo.to_json() for name, slo in self.classes.items()}
        return data

    @staticmethod
    def from_json(data: Mapping[str, object], path: str = "slo") -> Slo:
        """Read what `to_json` wrote. Raises InputError naming the field."""
        values = []
        for name in ("ttft_s", "itl_s"):
            value = data.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"{path}.{name}", value, "seconds above 0")
            values.append(float(value))
        classes = data.get("classes", {})
        if not isinstance(classes, Mapping):
            raise InputError(f"{path}.classes", classes, "an object from class name to targets")
        nested = {str(name): Slo.from_json(each, f"{path}.classes.{name}") for name, each in classes.items()}
        return Slo(values[0], values[1], nested)
