"""Does the simulator do what the engine did? A record of the engine's steps, run through a simulated replica.

`compare` gives the replica what the record says came from outside (messages, clock readings, tokens) and checks that it plans
the same batches, row for row. Used by `benchmarks/fidelity.py` and tests; the record is `trimtab-engine serve --record-steps`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trimtab_engine import step_record
from trimtab_engine.core.step import Step, StepResult
from trimtab_engine.core.step_time import StepFeatures, StepTimeModel, features_of
from trimtab_engine.step_record import Entry

from .replica import Replica


@dataclass(frozen=True, slots=True)
class Identity:
    """`equal` of `steps` batches are the same; `first_difference` tells of the first that is not."""

    steps: int
    equal: int
    first_difference: str | None


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """What an engine's step was like and how long it took."""

    features: StepFeatures
    begin_s: float  # schedule() was called
    end_s: float  # commit() was called
    duration_s: float  # until the next step began, when that followed at once, else until the commit


class _Recorded:
    """Cost and executor at once: the durations and tokens of the entry that is being replayed."""

    def __init__(self) -> None:
        self.entry: Entry | None = None

    def predict(self, features: StepFeatures) -> float:
        assert self.entry is not None
        return self.entry.committed - self.entry.now

    def run(self, step: Step) -> StepResult:
        assert self.entry is not None
        return StepResult(list(self.entry.token_ids), failed=dict(self.entry.failed))


def compare(path: Path) -> Identity:
    """Run a record through a replica; raises RecordError for a file that is no record.

    After a difference the rest of the record no longer means anything, so its steps count as different.
    """
    equal = 0
    difference: str | None = None
    for entry, step in _replayed(path):
        rows = _rows(step)
        if rows != [tuple(row) for row in entry.rows]:
            difference = f"step {entry.step_id}: the engine ran {entry.rows}, the simulator {rows}"
            break
        equal += 1
    return Identity(sum(1 for _ in step_record.read(path)[1]), equal, difference)


def recorded_steps(path: Path, adjacent_s: float = 0.005) -> list[RecordedStep]:
    """Features and times of a record's steps that ran, in order: what a step-time model is fitted to.

    When the next step began within `adjacent_s` of a commit, the pause between the two (sending, reading messages) is part
    of the step's `duration_s`: a simulated step begins when the one before ends.
    """
    found = [
        (features_of(step), entry.now, entry.committed)
        for entry, step in _replayed(path)
        if step is not None and entry.runner_error is None
    ]
    steps = []
    for number, (features, begin_s, end_s) in enumerate(found):
        next_begin_s = found[number + 1][1] if number + 1 < len(found) else float("inf")
        over_s = next_begin_s if next_begin_s - end_s <= adjacent_s else end_s
        steps.append(RecordedStep(features, begin_s, end_s, over_s - begin_s))
    return steps


def _replayed(path: Path) -> Iterator[tuple[Entry, Step | None]]:
    """Each entry with the step that a simulated replica plans at its place; the step ends when the next is asked for."""
    header, entries = step_record.read(path)
    state = header.build()
    recorded = _Recorded()
    replica = Replica(0, state.scheduler, recorded, recorded, skip_ahead=False)
    for entry in entries:
        if entry.step_model is not None:
            state.scheduler.use_step_time(StepTimeModel.from_json(entry.step_model))
        for drained in entry.messages:
            state.apply(drained.message, drained.now)
        state.expire(entry.now)
        state.take_tokens()
        state.scheduler.drain_events()
        recorded.entry = entry
        replica.begin(entry.now)
        step = replica.step
        yield entry, step
        if step is None:
            continue
        if entry.runner_error is None:
            replica.end(entry.committed)
        else:
            replica.step = None
            state.scheduler.rollback(step)
            for request in step.requests:
                state.scheduler.abort(request.id)


def _rows(step: Step | None) -> list[tuple[str, int, int]]:
    if step is None:
        return []
    return [(r.id, c, n) for r, c, n in zip(step.requests, step.context, step.chunk, strict=True)]
