"""Live counters of a replay: a bar on a terminal, a plain line every few seconds elsewhere. Knows no HTTP."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


@dataclass(frozen=True, slots=True)
class Counters:
    """Where a replay stands. `planned_s` is when the last request is due."""

    total: int
    sent: int
    finished: int
    failed: int
    tokens: int
    elapsed_s: float
    planned_s: float

    @property
    def in_flight(self) -> int:
        """Sent and not answered yet."""
        return self.sent - self.finished - self.failed


class Observer(Protocol):
    """Whoever wants to show progress; called about twice a second in the event loop, so it must be quick."""

    def update(self, counters: Counters) -> None:
        """Show where the replay stands."""


class ProgressDisplay:
    """Context manager and Observer that writes to `stream` (stderr by default)."""

    def __init__(self, title: str, stream: TextIO | None = None, plain_every_s: float = 10.0) -> None:
        self._title = title
        self._stream = sys.stderr if stream is None else stream
        self._plain_every_s = plain_every_s
        self._next_plain_s = 0.0
        self._last: Counters | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        if self._stream.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[counts]}"),
                TimeElapsedColumn(),
                console=Console(file=self._stream),
                # Refreshed by update() alone: a refresh thread would take the interpreter from the sender at any moment.
                auto_refresh=False,
            )

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.refresh()
            self._progress.stop()
        elif self._last is not None:
            self._print(self._last)

    def update(self, counters: Counters) -> None:
        """Show where the replay stands."""
        self._last = counters
        if self._progress is None:
            if counters.elapsed_s >= self._next_plain_s:
                self._next_plain_s = counters.elapsed_s + self._plain_every_s
                self._print(counters)
            return
        if self._task is None:
            self._task = self._progress.add_task(self._title, total=counters.total, counts="")
        done = counters.finished + counters.failed
        self._progress.update(self._task, completed=done, counts=_text(counters))
        self._progress.refresh()

    def _print(self, counters: Counters) -> None:
        line = (
            f"{self._title}: {_text(counters)}, {counters.elapsed_s:.0f} of about {counters.planned_s:.0f} s"
        )
        print(line, file=self._stream, flush=True)


def _text(counters: Counters) -> str:
    failed = f", {counters.failed} failed" if counters.failed else ""
    return f"{counters.finished} of {counters.total} requests, {counters.in_flight} in flight{failed}, {counters.tokens:,} tokens"
