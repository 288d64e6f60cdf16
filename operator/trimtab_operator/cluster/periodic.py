"""A thread that calls something every so often, until it is stopped.

`main` starts one for each part of the operator that asks by itself: resync, SLO counts, the fleet's switch, the Lease. Knows nothing of them.
What the call raises ends the thread; `main` sees that and ends the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Periodic:
    """See the module. `turn` returns how long to wait for the next one, None for the period; `first_s`: the same before the first."""

    def __init__(
        self, name: str, turn: Callable[[], float | None], period_s: float, first_s: float | None = None
    ) -> None:
        self.name = name
        self._turn = turn
        self._period_s = period_s
        self._first_s = period_s if first_s is None else first_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self, wait_s: float = 5.0) -> None:
        """No further turn; one under way may finish within the time."""
        self._stopping.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        pause_s = self._first_s
        while not self._stopping.wait(pause_s):
            wanted_s = self._turn()
            pause_s = self._period_s if wanted_s is None else wanted_s
