"""Live configuration: the knobs that change on a running engine, their bounds, and their strict JSON form.

Read by the scheduler (`core.scheduler`), parsed at the admin door and from `live.json`. Pure: no files, no clock.
The same bounds stand in `crds/`; `tests/contract` holds them equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from trimtab_engine.errors import ConfigError

POLICIES = ("fcfs", "priority", "sla-aware")
MAX_CLASSES = 8  # bounds the number of metric series a pod can export


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Start-up capacity: buffers are sized by these, live values stay under them."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256


@dataclass(frozen=True, slots=True)
class SloClass:
    """Latency targets of one class of requests, in seconds; `objective` is the percentage that shall meet them."""

    name: str
    ttft_s: float
    itl_s: float
    objective: float = 99.0


@dataclass(frozen=True, slots=True)
class Slo:
    """All classes of a service. A request without a class belongs to `default_class`."""

    default_class: str = "default"
    classes: tuple[SloClass, ...] = (SloClass("default", ttft_s=1.0, itl_s=0.1),)

    def by_name(self, name: str) -> SloClass | None:
        """The class of that name, or None."""
        return next((c for c in self.classes if c.name == name), None)


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """Every live knob. Immutable; a change replaces the whole, between two steps."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0  # tokens a step for one prompt; 0: off
    priority_aging_s: float = 30.0  # seconds of waiting worth one priority level; 0: no aging
    slo: Slo = field(default_factory=Slo)

    def to_json(self) -> dict[str, object]:
        """Plain JSON form; `from_json` reads it back to an equal value."""
        return {
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "scheduling_policy": self.scheduling_policy,
            "long_prefill_token_threshold": self.long_prefill_token_threshold,
            "priority_aging_s": self.priority_aging_s,
            "slo": {
                "default_class": self.slo.default_class,
                "classes": [
                    {"name": c.name, "ttft_s": c.ttft_s, "itl_s": c.itl_s, "objective": c.objective}
                    for c in self.slo.classes
                ],
            },
        }

    @classmethod
    def from_json(cls, raw: object, ceilings: Ceilings, path: str = "config") -> LiveConfig:
        """Parse and validate a whole document; raises ConfigError naming path, value and allowed range."""
        data = _mapping(raw, path)
        known = {f.name for f in fields(cls)}
        for key in data:
            if key not in known:
                raise ConfigError(f"{path}.{key}", data[key], f"known fields are {', '.join(sorted(known))}")
        for key in sorted(known - set(data)):
            raise ConfigError(f"{path}.{key}", None, "the whole document is required")
        policy = data["scheduling_policy"]
        if policy not in POLICIES:
            raise ConfigError(f"{path}.scheduling_policy", policy, f"one of {', '.join(POLICIES)}")
        config = cls(
            max_num_batched_tokens=_int(
                data, path, "max_num_batched_tokens", 1, ceilings.max_num_batched_tokens
            ),
            max_num_seqs=_int(data, path, "max_num_seqs", 1, ceilings.max_num_seqs),
            scheduling_policy=str(policy),
            long_prefill_token_threshold=_int(
                data, path, "long_prefill_token_threshold", 0, ceilings.max_num_batched_tokens
            ),
            priority_aging_s=_number(data, path, "priority_aging_s", 0.0, 86_400.0),
            slo=_slo(data["slo"], f"{path}.slo"),
        )
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise ConfigError(
                f"{path}.max_num_batched_tokens",
                config.max_num_batched_tokens,
                f"at least max_num_seqs ({config.max_num_seqs}), so that every decode fits into a step",
            )
        return config


def _mapping(raw: object, path: str) -> Mapping[str, object]:
    if not isinstance(raw, Mapping):
        raise ConfigError(path, raw, "a JSON object")
    return raw


def _int(data: Mapping[str, object], path: str, key: str, low: int, high: int) -> int:
    value = data[key]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{path}.{key}", value, f"an integer from {low} to {high}")
    return value


def _number(data: Mapping[str, object], path: str, key: str, low: float, high: float) -> float:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{path}.{key}", value, f"a number from {low:g} to {high:g}")
    return float(value)


def _slo(raw: object, path: str) -> Slo:
    data = _mapping(raw, path)
    listed = data.get("classes")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_CLASSES:
        raise ConfigError(f"{path}.classes", listed, f"a list of 1 to {MAX_CLASSES} classes")
    classes: list[SloClass] = []
    for index, item in enumerate(listed):
        where = f"{path}.classes[{index}]"
        entry = _mapping(item, where)
        name = entry.get("name")
        if not isinstance(name, str) or not name or len(name) > 63:
            raise ConfigError(f"{where}.name", name, "a name of 1 to 63 characters")
        if any(c.name == name for c in classes):
            raise ConfigError(f"{where}.name", name, "a name that no other class has")
        classes.append(
            SloClass(
                name=name,
                ttft_s=_number(entry, where, "ttft_s", 0.001, 3600.0),
                itl_s=_number(entry, where, "itl_s", 0.001, 3600.0),
                objective=_number(entry, where, "objective", 50.0, 99.999),
            )
        )
    default = data.get("default_class")
    if not any(c.name == default for c in classes):
        raise ConfigError(f"{path}.default_class", default, f"one of {', '.join(c.name for c in classes)}")
    return Slo(default_class=str(default), classes=tuple(classes))
