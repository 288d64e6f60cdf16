"""Shows a run in a cluster: each trial as a row of the run's status, everything as plain lines in the worker's log.

A `run.View`, made by `worker`. Candidates alone are trials there; the incumbent's measurements are lines of the log and numbers
of the result. A confirmation belongs to the trial whose candidate it confirms.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from trimtab_engine.core.live import LiveConfig
from trimtab_tuner.cluster.notebook import Notebook, TrialRow, by_field
from trimtab_tuner.cluster.results import Arms
from trimtab_tuner.cluster.run_target import RunTarget
from trimtab_tuner.metrics.reading import Reading
from trimtab_tuner.run import View
from trimtab_tuner.trial import Role, Trial

_STATES = {"measured": "Complete", "stopped": "Pruned", "unknown": "Failed"}


class WorkView:
    """See the module. `changed` is set whenever there is something to write."""

    def __init__(self, notebook: Notebook, target: RunTarget, log: View) -> None:
        self._notebook = notebook
        self._target = target
        self._log = log
        self._row: TrialRow | None = None
        self._confirmed: TrialRow | None = None
        self.arms = Arms()
        self.changed = asyncio.Event()

    def begins(self, role: Role, config: LiveConfig | None) -> None:
        """A measurement begins; `config` None: of the incumbent."""
        self._row = self._target.trial = None
        if config is None:
            return
        wanted = by_field(config)
        row = self._notebook.row_of(wanted) if role == "confirm" else None
        if row is None:
            row = TrialRow(self._notebook.next_number(), wanted)
            self._notebook.trials.append(row)
        if role == "confirm":
            self._confirmed = row
        row.state = "Running"
        self._row, self._target.trial = row, row.number
        self.changed.set()

    def begin(self, what: str, trial: int, of: int) -> Callable[[float], None]:
        """See `run.View`."""
        return self._log.begin(what, trial, of)

    def end(self, trial: Trial) -> None:
        """See `run.View`."""
        self._log.end(trial)
        self.arms.add(trial)
        # Raw windows are large; what is shown of them has just been taken.
        trial.measurement = dataclasses.replace(trial.measurement, snapshots=())
        row, self._row = self._row, None
        if row is None:
            return
        status, reading = trial.measurement.status, trial.measurement.reading
        if trial.role == "confirm":
            row.state = "Pruned" if status == "stopped" else "Complete"
            row.message = trial.reason or row.message
        elif trial.measurement.halted:
            # It is tried again, under this number: the operator takes none that reaches maxTrials.
            self._notebook.trials.remove(row)
        else:
            row.state = _STATES[status]
            row.message = trial.reason or trial.decision
            if isinstance(reading, Reading):
                row.requests, row.violated = reading.n, reading.violated
        self.changed.set()

    def refused(self, reason: str) -> None:
        """The candidate of the trial under way was not put in force."""
        if self._row is not None:
            self._row.state, self._row.message = "Failed", reason
            self._row = None
            self.changed.set()

    def note(self, label: str, text: str) -> None:
        """See `run.View`."""
        if label == "compared" and self._confirmed is not None:
            self._confirmed.message = text
            self.changed.set()
        if label == "refused":
            self.refused(text)
        self._log.note(label, text)
