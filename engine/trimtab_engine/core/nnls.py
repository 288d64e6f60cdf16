"""Least squares with coefficients that are not negative, from normal equations. Plain Python for a dozen unknowns.

Called by `core.step_fit`. The active-set method of Lawson and Hanson (Solving Least Squares Problems, chapter 23), started
from the set that was positive the last time, so that a refit costs one or two small Cholesky solves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Matrix = Sequence[Sequence[float]]

_RIDGE = 1e-10  # of a unit diagonal: keeps collinear columns solvable
_TOLERANCE = 1e-9
_MAX_PASSES = 60


def nonnegative_least_squares(a: Matrix, b: Sequence[float], start: Iterable[int] = ()) -> list[float]:
    """The x ≥ 0 that minimises xᵀAx/2 − bᵀx, for a symmetric positive semidefinite A; `start`: likely positive entries.

    Columns without information (zero diagonal) stay 0.
    """
    size = len(b)
    scale = [1 / math.sqrt(a[i][i]) if a[i][i] > 0 else 0.0 for i in range(size)]
    m = [[a[i][j] * scale[i] * scale[j] for j in range(size)] for i in range(size)]
    v = [b[i] * scale[i] for i in range(size)]
    positive = {i for i in start if scale[i] > 0}
    x = [0.0] * size
    # A start that is not feasible loses its negative entries, so that the method begins at a feasible point.
    while positive:
        trial = _solve(m, v, positive)
        negative = {i for i in positive if trial[i] <= 0}
        if not negative:
            x = trial
            break
        positive -= negative
    largest = max((abs(value) for value in v), default=0.0)
    for _ in range(_MAX_PASSES):
        gradient = [v[i] - sum(m[i][j] * x[j] for j in positive) for i in range(size)]
        candidates = [i for i in range(size) if i not in positive and scale[i] > 0]
        entering = max(candidates, key=lambda i: gradient[i], default=None)
        if entering is None or gradient[entering] <= _TOLERANCE * largest:
            break
        positive.add(entering)
        while True:
            trial = _solve(m, v, positive)
            blocking = [i for i in positive if trial[i] <= 0]
            if not blocking:
                x = trial
                break
            step = min(x[i] / (x[i] - trial[i]) if x[i] > trial[i] else 0.0 for i in blocking)
            x = [old + step * (new - old) for old, new in zip(x, trial, strict=True)]
            positive -= {i for i in blocking if x[i] <= _TOLERANCE * max(x)}
            x = [value if i in positive else 0.0 for i, value in enumerate(x)]
            if not positive:
                break
    return [x[i] * scale[i] for i in range(size)]


def _solve(m: Matrix, v: Sequence[float], columns: set[int]) -> list[float]:
    """Solve the equations of these columns by Cholesky; the other entries are 0."""
    order = sorted(columns)
    lower: list[list[float]] = []
    partial: list[float] = []
    for row, i in enumerate(order):
        line: list[float] = []
        for column in range(row):
            above = lower[column]
            line.append((m[i][order[column]] - _dot(line, above, column)) / above[column])
        pivot = m[i][i] + _RIDGE - _dot(line, line, row)
        line.append(math.sqrt(max(pivot, _RIDGE)))
        partial.append((v[i] - _dot(line, partial, row)) / line[row])
        lower.append(line)
    x = [0.0] * len(v)
    for row in range(len(order) - 1, -1, -1):
        known = sum(lower[later][row] * x[order[later]] for later in range(row + 1, len(order)))
        x[order[row]] = (partial[row] - known) / lower[row][row]
    return x


def _dot(first: Sequence[float], second: Sequence[float], count: int) -> float:
    return sum(first[k] * second[k] for k in range(count))
