"""How long a step takes: the one question that the simulator asks, and reading the answer from a file.

`core.step_time.StepTimeModel` answers it, whether an engine fitted it or `presets.py` derived it from data sheets. Anything
else that has `predict` does as well: recorded durations, a model with noise.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Protocol

from trimtab_engine.core.step_time import StepFeatures, StepTimeModel
from trimtab_engine.errors import ConfigError
from trimtab_tuner.errors import InputError


class StepCost(Protocol):
    """Seconds from `schedule` to `commit` of a step with these features."""

    def predict(self, features: StepFeatures) -> float:
        """Seconds, at least 0."""


class ScatteredCost:
    """A cost whose steps scatter as an engine's did: each duration is multiplied by one of the given ratios, drawn by seed.

    `ratios` are measured / predicted of single steps. Without it a simulation is smoother than any engine, and its tail
    too short. Draws are made in the order of the steps, so a simulation stays repeatable.
    """

    def __init__(self, cost: StepCost, ratios: list[float], seed: int) -> None:
        if not ratios or min(ratios) < 0:
            raise InputError("ratios", ratios[:3], "at least one ratio, none below 0")
        self._cost = cost
        self._ratios = ratios
        self._random = Random(seed)

    def predict(self, features: StepFeatures) -> float:
        """Seconds of one particular step: asking again draws again."""
        return self._cost.predict(features) * self._random.choice(self._ratios)


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
