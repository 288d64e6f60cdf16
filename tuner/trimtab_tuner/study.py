"""The search: an Optuna study over the knobs by ask and tell, with constraints, resume, and no config measured twice.

Called by `run`. Knows nothing of engines or metrics. Ordered knobs are searched by their position on the grid, so that a step
means the same ratio everywhere. What must not be measured (step time over the limit) is told with its violation and asked
again: it teaches the sampler and costs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from trimtab_tuner.errors import InputError
from trimtab_tuner.score import BROKEN, Score
from trimtab_tuner.space import Knob, Value

STARTUP_TRIALS = 4  # random before the tree estimator knows enough
MAX_ASKS = 64  # proposals that may be answered without measuring, before the grid is looked through
Values = Mapping[str, Value]
Judge = Callable[[Values], Mapping[str, float]]
"""Constraint violations of values that must not be measured; empty: they may be."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Values to measure, and the Optuna trial that waits for them."""

    number: int
    values: Values


class Study:
    """One study. Deterministic for a seed, a space and what it was told."""

    def __init__(
        self, knobs: Sequence[Knob], *, seed: int, storage: str | None = None, name: str = "trimtab"
    ) -> None:
        """`storage`: None (memory), a file for a journal, or an SQLAlchemy URL; an existing study of that name goes on."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._knobs = tuple(knobs)
        opened = _open(storage)
        self._study = optuna.create_study(
            storage=opened,
            study_name=name,
            load_if_exists=storage is not None,
            direction="minimize",
        )
        self._known: dict[tuple[Value, ...], Score] = {}
        self._waiting: dict[int, optuna.trial.Trial] = {}
        self.resumed = self._resume()
        # A resumed study must not draw what it drew before.
        self._study.sampler = optuna.samplers.TPESampler(
            seed=seed + len(self._study.trials), n_startup_trials=STARTUP_TRIALS
        )

    def _resume(self) -> int:
        """Takes over what is stored; a trial whose worker died is told as failed. Returns how many were measured."""
        found = 0
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state == TrialState.RUNNING:
                self._study.tell(trial.number, state=TrialState.FAIL)
            elif trial.state == TrialState.COMPLETE and trial.user_attrs.get("measured"):
                values = self._decode(trial.params)
                if values is not None and trial.value is not None:
                    self._known[self._key(values)] = Score(trial.value, dict(trial.constraints))
                    found += 1
        return found

    @property
    def measured(self) -> int:
        """Different configs measured so far."""
        return len(self._known)

    def tell_start(self, values: Values, score: Score) -> None:
        """What the incumbent scored: the first trial. One that stands outside the space teaches nothing about it."""
        if self._key(values) in self._known or any(values[k.name] not in k.choices for k in self._knobs):
            return
        trial = optuna.trial.create_trial(
            params=self._encode(values),
            distributions=self._distributions(),
            value=score.objective,
            constraints=dict(score.constraints),
            user_attrs={"measured": True, "config": dict(values), "origin": "start"},
        )
        self._study.add_trial(trial)
        self._known[self._key(values)] = score

    def enqueue(self, points: Iterable[Values], origin: str) -> None:
        """Points to try before the sampler's own."""
        for values in points:
            if self._key(values) not in self._known:
                self._study.enqueue_trial(
                    self._encode(values), user_attrs={"origin": origin}, skip_if_exists=True
                )

    def ask(self, forbidden: Judge) -> Proposal | None:
        """The next config to measure: new, and not forbidden. None when the space is used up."""
        for _ in range(MAX_ASKS):
            proposal = self._ask_once(forbidden)
            if proposal is not None:
                return proposal
        rest = self._untried(forbidden)
        if rest is None:
            return None
        self._study.enqueue_trial(self._encode(rest), user_attrs={"origin": "grid"})
        for _ in range(MAX_ASKS):
            proposal = self._ask_once(forbidden)
            if proposal is not None:
                return proposal
        return None

    def _ask_once(self, forbidden: Judge) -> Proposal | None:
        trial = self._study.ask()
        values: dict[str, Value] = {}
        for knob in self._knobs:
            if knob.ordered:
                values[knob.name] = knob.choices[trial.suggest_int(knob.name, 0, len(knob.choices) - 1)]
            else:
                picked = trial.suggest_categorical(knob.name, knob.choices)
                assert isinstance(picked, int | str), "choices are integers and names"
                values[knob.name] = picked
        trial.set_user_attr("config", values)
        known = self._known.get(self._key(values))
        if known is not None:
            self._tell(trial, known)
            return None
        violations = forbidden(values)
        if violations:
            self._tell(trial, Score(BROKEN, violations))
            return None
        self._waiting[trial.number] = trial
        return Proposal(trial.number, values)

    def tell(self, proposal: Proposal, score: Score) -> None:
        """What a measured (or broken) config scored."""
        trial = self._waiting.pop(proposal.number)
        trial.set_user_attr("measured", True)
        self._tell(trial, score)
        self._known[self._key(proposal.values)] = score

    def fail(self, proposal: Proposal, reason: str) -> None:
        """Nothing is known of this config: it is told as failed, and may be asked for again."""
        trial = self._waiting.pop(proposal.number)
        trial.set_user_attr("reason", reason)
        self._study.tell(trial, state=TrialState.FAIL)

    def _tell(self, trial: optuna.trial.Trial, score: Score) -> None:
        for name, violation in score.constraints.items():
            trial.set_constraint(name, violation)
        self._study.tell(trial, score.objective)

    def _untried(self, forbidden: Judge) -> dict[str, Value] | None:
        best = min(self._known.items(), key=lambda item: item[1].objective, default=None)
        candidates: list[tuple[float, dict[str, Value]]] = []
        for combination in itertools.product(*(knob.choices for knob in self._knobs)):
            values = dict(zip((k.name for k in self._knobs), combination, strict=True))
            if combination not in self._known and not forbidden(values):
                candidates.append((self._distance(combination, best[0]) if best else 0.0, values))
        return min(candidates, key=lambda item: item[0])[1] if candidates else None

    def _distance(self, a: tuple[Value, ...], b: tuple[Value, ...]) -> float:
        return sum(
            abs(knob.choices.index(x) - knob.choices.index(y))
            if knob.ordered and y in knob.choices
            else float(x != y)
            for knob, x, y in zip(self._knobs, a, b, strict=True)
        )

    def _key(self, values: Values) -> tuple[Value, ...]:
        return tuple(values[knob.name] for knob in self._knobs)

    def _encode(self, values: Values) -> dict[str, object]:
        return {
            knob.name: knob.choices.index(values[knob.name]) if knob.ordered else values[knob.name]
            for knob in self._knobs
        }

    def _decode(self, params: Mapping[str, object]) -> dict[str, Value] | None:
        """Values of a stored trial, or None when it belongs to another space."""
        values: dict[str, Value] = {}
        for knob in self._knobs:
            stored = params.get(knob.name)
            if knob.ordered and isinstance(stored, int) and 0 <= stored < len(knob.choices):
                values[knob.name] = knob.choices[stored]
            elif not knob.ordered and stored in knob.choices and isinstance(stored, int | str):
                values[knob.name] = stored
            else:
                return None
        return values

    def _distributions(self) -> dict[str, BaseDistribution]:
        return {
            knob.name: IntDistribution(0, len(knob.choices) - 1)
            if knob.ordered
            else CategoricalDistribution(knob.choices)
            for knob in self._knobs
        }


def check_storage(storage: str | None) -> None:
    """Raises InputError for a storage that cannot be; called before anything is measured."""
    if storage is not None and "://" not in storage and not Path(storage).resolve().parent.is_dir():
        raise InputError("--storage", storage, "a file in a folder that exists, or a database URL")


def _open(storage: str | None) -> str | BaseStorage | None:
    check_storage(storage)
    if storage is None or "://" in storage:
        return storage
    return JournalStorage(JournalFileBackend(storage))
