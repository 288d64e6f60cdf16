"""Shows a tuning run: one live line on a terminal, a plain line per trial elsewhere. Made by `commands.run`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from trimtab_engine.core.live import LiveConfig
from trimtab_tuner import space
from trimtab_tuner.metrics.reading import Reading
from trimtab_tuner.trial import Trial
from trimtab_tuner.units import format_duration

LABEL_WIDTH = 16


class RunView:
    """Context manager and `run.View`. Writes to `stream` (stderr by default)."""

    def __init__(self, stream: TextIO | None = None, plain_every_s: float = 15.0) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._console = Console(file=self._stream, highlight=False, soft_wrap=True)
        self._plain_every_s = plain_every_s
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._base: LiveConfig | None = None
        if self._stream.isatty():
            self._progress = Progress(
                TextColumn("  {task.fields[label]:<16}"),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
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
            self._progress.stop()

    def begin(self, what: str, trial: int, of: int) -> Callable[[float], None]:
        """A measurement begins; the returned function takes the fraction done."""
        text = f"trial {trial} of {of} · {what}"
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            # Nothing moves before the measurement: what the last config left behind is waited out.
            self._task = self._progress.add_task(f"{text} · settling", total=1.0, label="tune")
            task, progress = self._task, self._progress
            progress.refresh()

            def show(done: float) -> None:
                progress.update(task, completed=done, description=text)
                progress.refresh()

            return show
        self._line("tune", text)
        last = time.monotonic()

        def say(done: float) -> None:
            nonlocal last
            if time.monotonic() - last >= self._plain_every_s:
                last = time.monotonic()
                self._line("tune", f"{text} · {done:.0%}")

        return say

    def end(self, trial: Trial) -> None:
        """One line about what a trial showed."""
        if self._progress is not None and self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        if trial.role == "incumbent":
            self._base = trial.config
        self._line(f"trial {trial.number + 1}", describe(trial, self._base))

    def note(self, label: str, text: str) -> None:
        """One line about the run."""
        self._line(label, text)

    def _line(self, label: str, text: str) -> None:
        if self._progress is not None:
            # A terminal would cut words at its edge; a log's reader wants one line.
            row = Table.grid()
            row.add_column(width=2 + LABEL_WIDTH, no_wrap=True)
            row.add_column()
            row.add_row(Text(f"  {label}"), Text(text))
            self._console.print(row, soft_wrap=False)
            return
        self._console.print(f"  {label:<{LABEL_WIDTH}}{text}", markup=False)


def describe(trial: Trial, base: LiveConfig | None) -> str:
    """`256 tokens · fcfs · 60 requests · violated TTFT 0, ITL 2 · ITL p99 210 ms · improves`."""
    parts = [space.describe(trial.config, base)]
    reading = trial.measurement.reading
    if isinstance(reading, Reading):
        parts.append(f"{reading.n} requests")
        parts.append(f"violated TTFT {reading.slo('ttft').violated}, ITL {reading.slo('itl').violated}")
        client = trial.measurement.client or {}
        parts.append(f"ITL p99 {format_duration(client.get('itl_p99_s', reading.itl_p99_s))}")
    parts.append(trial.decision)
    if trial.decision in ("stopped", "unknown") and trial.reason:
        parts.append(trial.reason)
    return " · ".join(parts)
