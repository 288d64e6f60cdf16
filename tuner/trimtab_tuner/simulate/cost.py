"""How long a step takes: the one question that the simulator asks, and reading the answer from a file.

`core.step_time.StepTimeModel` answers it, whether an engine fitted it or `presets.py` derived it from data sheets. Anything
else that has `predict` does as well: recorded durations, a model with noise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
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


def load_step_time(path: str) -> StepTimeModel:
    """Read a model that an engine fitted: its JSON form, alone or under "model" as `/admin/step-model` answers.

    Raises InputError naming file, field and what was expected.
    """
    try:
        document = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("--cost", path, f"a readable JSON file ({error})") from None
    try:
        return StepTimeModel.from_json(document, path)
    except ConfigError as error:
        raise InputError("--cost", path, f"a step-time model; {error}") from None
