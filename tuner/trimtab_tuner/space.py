"""The knobs that a study may turn: unit, bounds, grid, and why each is (or is not) tuned. Pure but for Optuna's trial.

Called by `study` (suggest) and `commands.run` (which knobs). The live config of the engine is the truth about bounds: a
grid never leaves the ceilings the engine started with, nor the bounds a person set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab_engine.core.live import POLICIES, Ceilings, LiveConfig
from trimtab_tuner.errors import InputError

Value = int | str


@dataclass(frozen=True, slots=True)
class Knob:
    """One knob: `choices` ascending when `ordered` (then the study searches positions on that grid)."""

    name: str  # field of LiveConfig
    unit: str
    choices: tuple[Value, ...]
    ordered: bool
    why: str


WHY = {
    "max_num_batched_tokens": (
        "the token budget of a step: too large and one prompt stalls every decode in flight, "
        "too small and prompts take many steps to their first token"
    ),
    "scheduling_policy": "who waits, who is preempted and, under sla-aware, how much prompt a step holds",
    "max_num_seqs": "decodes in one step: latency of the batch itself against waiting; tune when decode- or memory-bound",
    "long_prefill_token_threshold": "tokens a step for one prompt, so that short prompts pass a long one",
}
# Not tuned, on purpose: SLO targets are the user's, and aging is a promise about waiting, not a speed.
UNITS = {
    "max_num_batched_tokens": "tokens per step",
    "scheduling_policy": "policy",
    "max_num_seqs": "sequences",
    "long_prefill_token_threshold": "prompt tokens per step and request",
}
DEFAULT_KNOBS = ("max_num_batched_tokens", "scheduling_policy")


def log_grid(low: int, high: int, *, multiple: int, per_octave: int = 2) -> tuple[int, ...]:
    """`per_octave` points a doubling from `low` to `high`, rounded to multiples of `multiple`, without repeats.

    Multiples of the matrix tile: 257 tokens cost up to a third more than 256.
    """
    if not 1 <= low <= high:
        raise InputError("bounds", f"{low}:{high}", "a lower bound of at least 1, not above the upper one")
    found: set[int] = set()
    step = 0
    while True:
        value = low * 2 ** (step / per_octave)
        if value > high * (1 + 1e-9):
            break
        rounded = round(value / multiple) * multiple
        if low <= rounded <= high:
            found.add(rounded)
        step += 1
    return tuple(sorted(found)) or (low,)


def build(
    start: LiveConfig,
    ceilings: Ceilings,
    *,
    knobs: Sequence[str] = DEFAULT_KNOBS,
    bounds: Mapping[str, tuple[int, int]] | None = None,
    tile: int = 16,
    policies: Sequence[str] = POLICIES,
) -> tuple[Knob, ...]:
    """The search space around `start`. The start value is always a choice, so that the study can tell it."""
    bounds = bounds or {}
    found: list[Knob] = []
    for name in knobs:
        if name not in WHY:
            raise InputError("--parameters", name, f"one of {', '.join(WHY)}")
        choices: tuple[Value, ...]
        if name == "scheduling_policy":
            choices = tuple(dict.fromkeys((start.scheduling_policy, *policies)))
        else:
            choices = _numbers(name, start, ceilings, bounds.get(name), tile)
        if len(choices) > 1:
            found.append(Knob(name, UNITS[name], choices, name != "scheduling_policy", WHY[name]))
    for name in bounds:
        if name not in knobs:
            raise InputError("--bounds", name, f"one of the tuned parameters ({', '.join(knobs)})")
    if not found:
        raise InputError("--parameters", ",".join(knobs), "at least one knob with more than one value")
    return tuple(found)


def _numbers(
    name: str, start: LiveConfig, ceilings: Ceilings, bound: tuple[int, int] | None, tile: int
) -> tuple[Value, ...]:
    ceiling = ceilings.max_num_seqs if name == "max_num_seqs" else ceilings.max_num_batched_tokens
    # Below one tile, or below what a full decode batch needs, a budget cannot hold.
    floor = max(tile, start.max_num_seqs) if name == "max_num_batched_tokens" else 1
    low, high = bound or (floor, ceiling)
    if not 0 <= low <= high <= ceiling:
        raise InputError("--bounds", f"{name}={low}:{high}", f"within 0:{ceiling}, the engine's ceiling")
    multiple = 1 if name == "max_num_seqs" else tile
    first = -(-max(low, floor, 1) // multiple) * multiple
    values = set(log_grid(first, high, multiple=multiple)) if first <= high else set()
    if name == "long_prefill_token_threshold":
        values = {v for v in values if v < start.max_num_batched_tokens} | {0}
    current = getattr(start, name)
    if low <= current <= high:
        values.add(current)
    if name == "long_prefill_token_threshold":
        # 0 means off, which is the loosest: it stands above every limit, so that neighbours are alike.
        return (*sorted(v for v in values if v), 0) if 0 in values else tuple(sorted(values))
    return tuple(sorted(values))


def apply(start: LiveConfig, values: Mapping[str, Value]) -> LiveConfig:
    """`start` with the knobs in `values` replaced; every other field stays as the user set it."""
    unknown = set(values) - set(WHY)
    if unknown:
        raise InputError("knob", sorted(unknown), f"one of {', '.join(WHY)}")
    return dataclasses.replace(start, **values)  # type: ignore[arg-type]


def values_of(config: LiveConfig, knobs: Sequence[Knob]) -> dict[str, Value]:
    """The knobs' values in `config`."""
    return {knob.name: getattr(config, knob.name) for knob in knobs}


def nearest(config: LiveConfig, knobs: Sequence[Knob]) -> dict[str, Value]:
    """The point of the space next to `config`, which may stand outside: bounds are about candidates, not about what runs."""

    def closest(knob: Knob) -> Value:
        value = getattr(config, knob.name)
        if value in knob.choices or not knob.ordered:
            return value if value in knob.choices else knob.choices[0]
        return min(knob.choices, key=lambda choice: abs(int(choice) - int(value)))

    return {knob.name: closest(knob) for knob in knobs}


def valid(config: LiveConfig, ceilings: Ceilings) -> bool:
    """Whether the engine would take this config: under its ceilings, and every decode fits into a step."""
    return (
        config.max_num_seqs <= config.max_num_batched_tokens <= ceilings.max_num_batched_tokens
        and 1 <= config.max_num_seqs <= ceilings.max_num_seqs
        and 0 <= config.long_prefill_token_threshold <= config.max_num_batched_tokens
    )


def describe(config: LiveConfig, base: LiveConfig | None = None) -> str:
    """How a person reads a config: `256 tokens · fcfs`, with the optional knobs that differ from `base`."""
    parts = [f"{config.max_num_batched_tokens:,} tokens", config.scheduling_policy]
    if base is not None and config.max_num_seqs != base.max_num_seqs:
        parts.append(f"{config.max_num_seqs} sequences")
    if base is not None and config.long_prefill_token_threshold != base.long_prefill_token_threshold:
        parts.append(f"long prompts {config.long_prefill_token_threshold or 'whole'}")
    return " · ".join(parts)
