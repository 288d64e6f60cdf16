"""Steps that are scheduled and not yet committed, and which of their rows no longer count.

Owned by `core.scheduler`. A row goes stale when its request is preempted or ends while the step runs: its result is
dropped at commit. Steps come back in the order in which they were scheduled, and are rolled back from the newest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from trimtab_engine.core.request import Request
from trimtab_engine.core.step import Step


class StepsInFlight:
    """A queue of steps with the stale rows of each."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: deque[tuple[Step, set[int]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[tuple[Step, set[int]]]:
        return iter(self._steps)

    def push(self, step: Step) -> None:
        """The step is handed to the runner."""
        self._steps.append((step, set()))

    def check_oldest(self, step: Step) -> None:
        """Assert that the step is the next one to be committed."""
        oldest = self._steps[0][0] if self._steps else None
        assert oldest is step, (
            f"step {step.step_id} is not the oldest in flight; steps are committed in order, once"
        )

    def pop_oldest(self) -> set[int]:
        """Take the oldest step out; returns its stale rows."""
        return self._steps.popleft()[1]

    def pop_newest(self, step: Step) -> set[int]:
        """Take the newest step, which must be `step`, out; returns its stale rows."""
        newest = self._steps[-1][0] if self._steps else None
        assert newest is step, (
            f"step {step.step_id} is not the newest in flight; steps are rolled back newest first"
        )
        return self._steps.pop()[1]

    def drop(self, request: Request) -> None:
        """Make every row of the request stale: what comes back for it no longer counts."""
        if request.num_in_flight == 0:
            return
        for step, stale in self._steps:
            stale.update(row for row, other in enumerate(step.requests) if other is request)
        request.num_in_flight = 0
