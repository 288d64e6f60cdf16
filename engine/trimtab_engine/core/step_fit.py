"""Learns the step-time model from the engine's own steps, one after the other.

Owned by the engine loop, which calls `observe` after each step; also used by `benchmarks/step_model.py` and the simulator's
calibration. Standard library only; no clock.

Recursive: what is kept of the past are sums (normal equations), not steps. They are kept per *stratum* — segment of the
token axis, with or without prompt rows — and each stratum forgets on its own, after some hundred of *its* steps. So an hour
of nothing but decodes does not wash out what long prompts cost, and a rare kind of step weighs as much as a common one.
Robust: errors count relative to the prediction, and beyond twice the usual error in proportion only (Huber's weight). Steps
that waited for a CPU for more than DISTURBED_SHARE of their time measure the neighbours: they are left out of fit and score, and
counted. (That the kernel took the CPU away at all would be too strict: in half a second it does so once on any machine, for a
fraction of a millisecond, so that long steps would never be learnt from.) On a machine
so busy that hardly a step is undisturbed, a provisional model of all steps stands in until CLEAN_STEPS have been learnt from:
a policy with deadlines is better off with it than with none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from trimtab_engine.core.nnls import nonnegative_least_squares
from trimtab_engine.core.step_time import KNOTS, NUM_SLOPES, TERMS, StepFeatures, StepTimeModel, basis

MEMORY_STEPS = 250  # of its own kind, after which a step has lost most of its weight
REFIT_STEPS = 16
MIN_STEPS = 4  # before there is a model
CLEAN_STEPS = 64
DISTURBED_SHARE = 0.02
ERROR_WINDOW = 512  # held-out errors that quantiles are taken over
_HUBER = 2.0
_MIN_ERROR_SCALE = 0.01
_TRUSTED_AFTER = 16  # steps of a stratum before one of them can be called an outlier
# Where no step has been, a slope is that of its neighbour: weak enough that 1 % of a stratum's steps outweigh it.
_SMOOTHNESS = 1e-8


@dataclass(frozen=True, slots=True)
class FitScore:
    """How good the model is: relative errors of steps that were predicted before they were learnt from."""

    num_steps: int  # learnt from
    num_excluded: int  # left out: they waited for a CPU
    error_median: float | None
    error_p95: float | None
    provisional: bool = False  # too few undisturbed steps yet: `model` is of all steps

    @property
    def excluded_share(self) -> float:
        """Of all steps seen, the share left out."""
        seen = self.num_steps + self.num_excluded
        return self.num_excluded / seen if seen else 0.0

    def to_json(self) -> dict[str, object]:
        """Plain JSON form."""
        return {
            "num_steps": self.num_steps,
            "num_excluded": self.num_excluded,
            "excluded_share": self.excluded_share,
            "error_median": self.error_median,
            "error_p95": self.error_p95,
            "provisional": self.provisional,
        }


def kind_of(features: StepFeatures) -> tuple[int, bool]:
    """Which kind of step it is: the segment of the token axis, and whether it holds prompts."""
    return bisect_left(KNOTS, features.tokens), features.prefill_attention > 0


def is_disturbed(seconds: float, lost_s: float) -> bool:
    """Whether a step of `seconds` that waited `lost_s` of them for a CPU is left out."""
    return lost_s > DISTURBED_SHARE * seconds


class _Stratum:
    """Normal equations of one kind of step, decaying."""

    __slots__ = ("matrix", "num_steps", "vector", "weight")

    def __init__(self) -> None:
        size = len(TERMS)
        self.matrix = [[0.0] * size for _ in range(size)]
        self.vector = [0.0] * size
        self.weight = 0.0
        self.num_steps = 0

    def add(self, row: list[float], seconds: float, weight: float) -> None:
        decay = 1 - 1 / MEMORY_STEPS
        matrix, vector = self.matrix, self.vector
        for i, x in enumerate(row):
            wx = weight * x
            vector[i] = vector[i] * decay + wx * seconds
            line = matrix[i]
            for j in range(i + 1):  # the lower half; the matrix is symmetric
                line[j] = line[j] * decay + wx * row[j]
        self.weight = self.weight * decay + weight
        self.num_steps += 1


class StepTimeFit:
    """`observe` steps, read `model`. A saved model that is given stands in until CLEAN_STEPS have been learnt from."""

    def __init__(self, start: StepTimeModel | None = None, provisional: bool = True) -> None:
        self._clean = start
        self._first_fit = MIN_STEPS if start is None else CLEAN_STEPS
        self._of_all = StepTimeFit(provisional=False) if provisional and start is None else None
        self._strata: dict[tuple[int, bool], _Stratum] = {}
        self._errors: deque[float] = deque(maxlen=ERROR_WINDOW)
        self._error_scale = 0.0
        self._num_steps = 0
        self.num_excluded = 0
        self._largest_tokens = 0

    def observe(self, features: StepFeatures, seconds: float, disturbed: bool) -> bool:
        """Learn from a step that took `seconds`; True when `model` is a new one now."""
        if features.tokens <= 0 or seconds <= 0:
            return False
        self._largest_tokens = max(self._largest_tokens, features.tokens)
        stand_in, news = self._of_all, False
        if stand_in is not None:
            news = stand_in.observe(features, seconds, disturbed=False)
        if disturbed:
            self.num_excluded += 1
            return news
        stratum = self._strata.setdefault(kind_of(features), _Stratum())
        stratum.add(basis(features), seconds, self._weight(features, seconds, stratum))
        self._num_steps += 1
        if self._num_steps >= self._first_fit and (
            self._num_steps % REFIT_STEPS == 0 or self._num_steps < REFIT_STEPS
        ):
            self._refit()
            news = True
        if self._num_steps >= CLEAN_STEPS and stand_in is not None:
            self._of_all = None
            news = True
        return news

    @property
    def model(self) -> StepTimeModel | None:
        """The model to schedule by; None before the first."""
        return self._clean if self._of_all is None else self._of_all.model

    @property
    def score(self) -> FitScore:
        """Counts, and quantiles of the errors of the latest steps."""
        errors = sorted(abs(error) for error in self._errors)
        return FitScore(
            num_steps=self._num_steps,
            num_excluded=self.num_excluded,
            error_median=_quantile(errors, 0.5) if errors else None,
            error_p95=_quantile(errors, 0.95) if errors else None,
            provisional=self._of_all is not None,
        )

    def _weight(self, features: StepFeatures, seconds: float, stratum: _Stratum) -> float:
        """1/t², so that errors count relatively, times Huber's weight. Books the error of the model before this step."""
        if self._clean is None:
            return 1 / seconds**2
        predicted = self._clean.predict(features)
        if predicted > 0:
            self._errors.append(seconds / predicted - 1)
        # A prediction that is far off (a first step of its kind) must not make the step weigh next to all or nothing.
        trusted = min(max(predicted, seconds / 1.5), seconds * 1.5)
        weight = 1 / trusted**2
        if stratum.num_steps >= _TRUSTED_AFTER:
            error, usual = (
                abs(seconds / trusted - 1),
                _HUBER * max(self._error_scale * 1.4826, _MIN_ERROR_SCALE),
            )
            if error > usual:
                weight *= usual / error
        return weight

    def _refit(self) -> None:
        size = len(TERMS)
        matrix = [[0.0] * size for _ in range(size)]
        vector = [0.0] * size
        total = 0.0
        for stratum in self._strata.values():
            total += stratum.weight
            for i in range(size):
                vector[i] += stratum.vector[i]
                line, added = matrix[i], stratum.matrix[i]
                for j in range(i + 1):
                    line[j] += added[j]
        for slope in range(2, NUM_SLOPES + 1):  # (slope - the slope before)², in the scale of its knot
            pull = _SMOOTHNESS * total * KNOTS[slope - 1] ** 2
            matrix[slope][slope] += pull
            matrix[slope - 1][slope - 1] += pull
            matrix[slope][slope - 1] -= pull
        for i in range(size):
            for j in range(i):
                matrix[j][i] = matrix[i][j]
        before = self._clean.coefficients if self._clean is not None else ()
        start = [index for index, value in enumerate(before) if value > 0]
        errors = sorted(self._errors)
        if errors:
            self._error_scale = _quantile(sorted(abs(error) for error in errors), 0.5)
        self._clean = StepTimeModel(
            coefficients=tuple(nonnegative_least_squares(matrix, vector, start)),
            error_low=_quantile(errors, 0.05) if errors else 0.0,
            error_high=_quantile(errors, 0.95) if errors else 0.0,
            largest_tokens=float(self._largest_tokens),
        )


def _quantile(ordered: list[float], share: float) -> float:
    """Linear between neighbours, as numpy's default."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
