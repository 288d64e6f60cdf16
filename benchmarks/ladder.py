"""One geometric ladder of request rates, and the highest rung that holds for every seed.

Used by `capacity.py` and `classes.py`: whatever stands on one ladder compares exactly (a tie is 1.00), and with common random
numbers it compares by the same requests. Knows nothing of what is asked at a rung. Assumes that less load is no harder.
"""

from __future__ import annotations

from collections.abc import Callable

STEP = 1.025
FIRST_RPS = 0.05
# Rung 180 is 4.3 requests a second.
MIDDLE = 180


def rate_of(rung: int) -> float:
    """Requests a second at a rung; 0 below the ladder."""
    return FIRST_RPS * STEP**rung if rung >= 0 else 0.0


def ratio(rung: int, over: int) -> float | None:
    """Of two rungs' rates; None where one of them is below the ladder."""
    return round(STEP ** (rung - over), 3) if rung >= 0 and over >= 0 else None


def highest(holds: Callable[[int, int], bool], seeds: int, guess: int) -> int:
    """The highest rung that `holds(rung, seed)` for every seed, next to one that some seed does not hold; -1 for none.

    Seed after seed: the first is searched, each further one only has to confirm what those before left, or to go down.
    """
    rung = search(lambda at: holds(at, 0), guess, stride=2)
    for seed in range(1, seeds):
        if rung >= 0 and not holds(rung, seed):
            rung = search(lambda at, seed=seed: holds(at, seed), rung, stride=2)  # type: ignore[misc]
    return rung


def search(holds: Callable[[int], bool], guess: int, stride: int) -> int:
    """The highest rung that holds, or -1: galloping from `guess` with growing strides, then bisected."""
    low, high = guess, guess
    if holds(guess):
        while holds(high := low + stride):
            low, stride = high, stride * 2
    else:
        while low > 0 and not holds(low := max(0, high - stride)):
            high, stride = low, stride * 2
        if low == 0 and high == 0:
            return -1
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
