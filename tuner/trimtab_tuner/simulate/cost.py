"""How long a step takes: the one question that the simulator asks, and reading the answer from a file.

`core.step_time.StepTimeModel` answers it, whether an engine fitted it or `presets.py` derived it from data sheets. Anything
else that has `predict` does as well: recorded durations, a model with noise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from trimtab_engine.core.step_fit import kind_of
from trimtab_engine.core.step_time import StepFeatures, StepTimeModel
from trimtab_engine.errors import ConfigError
from trimtab_tuner.errors import InputError


class StepCost(Protocol):
    """Seconds from `schedule` to `commit` of a step with these features."""

    def predict(self, features: StepFeatures) -> float:
        """Seconds, at least 0."""


class Scatter:
    """How an engine's steps scatter around a model: measured / predicted of each, kept apart by kind of step.

    Decodes scatter more than long prompts, and what the formula misses of one kind is that kind's alone. A kind with fewer
    than ENOUGH steps draws from all.
    """

    ENOUGH = 30

    def __init__(self, cost: StepCost, steps: Iterable[tuple[StepFeatures, float]]) -> None:
        """`steps`: features and seconds of measured steps."""
        self.ratios: list[float] = []
        self._by_kind: dict[tuple[int, bool], list[float]] = {}
        for features, seconds in steps:
            if (predicted := cost.predict(features)) > 0:
                self.ratios.append(seconds / predicted)
                self._by_kind.setdefault(kind_of(features), []).append(seconds / predicted)
        if not self.ratios or min(self.ratios) < 0:
            raise InputError(
                "steps", self.ratios[:3], "at least one measured step, none shorter than nothing"
            )

    def of(self, features: StepFeatures) -> list[float]:
        """The ratios that such a step may have."""
        own = self._by_kind.get(kind_of(features), [])
        return own if len(own) >= self.ENOUGH else self.ratios


class ScatteredCost:
    """A cost whose steps scatter as an engine's did: each duration is multiplied by one of the ratios of its kind, drawn by seed.

    Without it a simulation is smoother than any engine, and its tail too short. Draws are made in the order of the steps, so
    a simulation stays repeatable.
    """

    def __init__(self, cost: StepCost, scatter: Scatter, seed: int) -> None:
        self._cost = cost
        self._scatter = scatter
        self._random = Random(seed)

    def predict(self, features: StepFeatures) -> float:
        """Seconds of one particular step: asking again draws again."""
        return self._cost.predict(features) * self._random.choice(self._scatter.of(features))


@dataclass(frozen=True, slots=True)
class StepModel:
    """A step-time model with what is known of its error. None: not known, as of a data sheet's."""

    model: StepTimeModel
    origin: str  # who says so, for results
    fitted: bool = True
    num_steps: int | None = None  # that it was fitted to
    error_median: float | None = None  # |measured / predicted - 1| of steps that it had not seen
    error_p95: float | None = None

    @property
    def upper(self) -> StepCost | None:
        """Steps as long as only one in twenty exceeded, which is what `sla-aware` plans with; None where no error is known."""
        certain = self.model.error_high <= 0 and math.isinf(self.model.largest_tokens)
        return None if certain else _UpperEnd(self.model)

    def describe(self) -> str:
        """One clause: `step times of engine chat-0 (median error 2.1 %, p95 8.0 %, over 4,000 steps)`."""
        if not self.fitted:
            return f"step times of {self.origin}, by which no device was measured"
        known = [
            f"{name} {value:.1%}"
            for name, value in (("median error", self.error_median), ("p95", self.error_p95))
            if value is not None
        ]
        if not known and (self.model.error_low or self.model.error_high):
            known = [f"nine in ten steps within {self.model.error_low:+.1%} and {self.model.error_high:+.1%}"]
        if self.num_steps == 0:
            known.append("provisional: every step so far waited for a CPU")
        elif self.num_steps is not None:
            known.append(f"over {self.num_steps:,} steps")
        return f"step times of {self.origin} ({', '.join(known) or 'of unknown error'})"

    def to_json(self) -> dict[str, object]:
        """As results hold it."""
        return {
            "origin": self.origin,
            "fitted": self.fitted,
            "num_steps": self.num_steps,
            "error_median": self.error_median,
            "error_p95": self.error_p95,
            "model": self.model.to_json(),
        }


class _UpperEnd:
    """Every step takes what the upper end of the model's interval says; wider where no step has been."""

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model

    def predict(self, features: StepFeatures) -> float:
        """Seconds."""
        return max(self._model.interval(features))


_LARGEST = 2.0**53  # of a score's numbers; whatever is larger, or no number, is not known


def parse_step_model(document: object, path: str, origin: str) -> StepModel:
    """A model's JSON form, alone or as `/admin/step-model` answers, with its score. `path` names it in errors.

    Raises InputError naming field and what was expected.
    """
    if isinstance(document, Mapping) and document.get("model", document) is None:
        raise InputError(path, origin, "a step-time model; that engine has run too few steps to have one yet")
    try:
        model = StepTimeModel.from_json(document, path)
    except (ConfigError, OverflowError) as error:  # the latter: a whole number of 400 digits
        raise InputError(path, origin, f"a step-time model; {error}") from None
    score = document.get("score") if isinstance(document, Mapping) else None
    score = score if isinstance(score, Mapping) else {}

    def number(name: str) -> float | None:
        value = score.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if 0 <= value < _LARGEST else None

    steps = number("num_steps")
    return StepModel(
        model,
        origin,
        num_steps=None if steps is None else int(steps),
        error_median=number("error_median"),
        error_p95=number("error_p95"),
    )


def load_step_model(path: str) -> StepModel:
    """Read what an engine fitted from a file. Raises InputError naming file, field and what was expected."""
    try:
        document = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("--cost", path, f"a readable JSON file ({error})") from None
    return parse_step_model(document, "--cost", path)
