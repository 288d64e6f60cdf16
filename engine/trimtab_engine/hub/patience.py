"""How long to go on with a hub that answers with errors: back-off, `Retry-After`, and when to give up.

Pure but for the clock and the sleep, which are passed in. Used by `hub.client`'s callers for each request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import TypeVar

from trimtab_engine.errors import ModelLoadError

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
LONGEST_ASKED_S = 600.0  # what a Retry-After may ask for

T = TypeVar("T")


class Transient(Exception):
    """The hub failed in a way that time may mend; `retry_after_s` is what it asked for."""

    def __init__(self, cause: str, retry_after_s: float | None = None) -> None:
        super().__init__(cause)
        self.retry_after_s = retry_after_s


class Patience:
    """One series of attempts at one thing. `news` starts the clock again: something has come."""

    def __init__(
        self,
        limit_s: float,
        on_wait: Callable[[str, float], None] = lambda cause, pause_s: None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        random: Random | None = None,
    ) -> None:
        """`limit_s`: how long there may be nothing but errors; `on_wait` is told why and how long is waited."""
        self._limit_s = limit_s
        self._on_wait = on_wait
        self._now = now
        self._sleep = sleep
        self._random = random or Random()
        self._since_s = now()
        self._failures = 0

    def news(self) -> None:
        """Something has come: the next failure is a first one."""
        self._failures = 0
        self._since_s = self._now()

    def run(self, attempt: Callable[[], T]) -> T:
        """Call `attempt` until it returns; ModelLoadError with the last cause once the patience is used up."""
        while True:
            try:
                return attempt()
            except Transient as failure:
                self._pause(failure)

    def _pause(self, failure: Transient) -> None:
        self._failures += 1
        # Half of it drawn: replicas that start together should not come back together.
        backoff_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 10))
        pause_s = backoff_s * (0.5 + 0.5 * self._random.random())
        asked_s = min(failure.retry_after_s or 0.0, LONGEST_ASKED_S)
        if self._now() + pause_s - self._since_s > self._limit_s:
            tries = f"{self._failures} {'try' if self._failures == 1 else 'tries'}"
            raise ModelLoadError(f"{failure} (gave up after {tries})") from failure
        if asked_s > pause_s:
            self._since_s += asked_s - pause_s  # waiting as told is no lack of patience
            pause_s = asked_s
        self._on_wait(str(failure), pause_s)
        self._sleep(pause_s)
