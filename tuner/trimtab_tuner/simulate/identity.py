"""Does the simulator do what the engine did? A record of the engine's steps, run through a simulated replica.

`compare` gives one replica what the record says came from outside (messages, clock readings, tokens) and checks that it plans
the same batches, row for row. `compare_free_running` gives a whole simulation no more than arrivals and how long each step
took: event order, clock and token source are then the simulator's own. Used by `benchmarks/fidelity.py` and tests; the record
is `trimtab-engine serve --record-steps`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab_engine import step_record
from trimtab_engine.core.scheduler import Scheduler
from trimtab_engine.core.stats import SchedulerStats
from trimtab_engine.core.step import Step, StepResult, TokenEvent
from trimtab_engine.core.step_time import StepFeatures, StepTimeModel, features_of
from trimtab_engine.engine_state import EngineState
from trimtab_engine.messages import Add
from trimtab_engine.step_record import Entry, RecordError
from trimtab_tuner.trace import Trace, TraceRequest

from .fleet import Delays, Fleet
from .replica import Replica
from .tokens import SyntheticTokens


@dataclass(frozen=True, slots=True)
class Identity:
    """`equal` of `steps` batches are the same; `first_difference` tells of the first that is not.

    `stats` is the simulated scheduler's at the end: what happened while these batches were planned.
    """

    steps: int
    equal: int
    first_difference: str | None
    stats: SchedulerStats


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """What an engine's step was like and how long it took."""

    features: StepFeatures
    begin_s: float  # schedule() was called
    end_s: float  # commit() was called
    duration_s: float  # until the next step began, when anything was left to do, else until the commit


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
    state = step_record.read(path)[0].build()
    for entry, step in _replayed(path, state):
        rows = _rows(step)
        if rows != [tuple(row) for row in entry.rows]:
            difference = f"step {entry.step_id}: the engine ran {entry.rows}, the simulator {rows}"
            break
        equal += 1
    return Identity(sum(1 for _ in step_record.read(path)[1]), equal, difference, state.scheduler.stats)


def compare_free_running(path: Path) -> Identity:
    """Simulate a record's requests from their arrivals and the recorded step times alone, and compare all batches.

    For records of requests that only their length ended, under one live config: raises RecordError for others.
    """
    header, entries = _read(path)
    sequence = [entry for entry in entries if entry.rows]
    requests, adds, outputs = [], _adds(path, entries), Counter[str]()
    for entry in sequence:
        _count_outputs(entry, adds, outputs)
    for at_s, add in adds.values():
        if outputs[add.id] == 0:
            raise RecordError(f"{path}: request {add.id} said nothing, so it cannot be simulated")
        requests.append(TraceRequest(at_s, len(add.prompt_token_ids), outputs[add.id], add.slo_class))
    trace = Trace(tuple(requests), str(path), "step record")
    state = header.build()
    batches = _Batches(sequence, state.scheduler)
    tokens = _RecordedPrompts(trace, [add.prompt_token_ids for _, add in adds.values()])
    replica = Replica(0, state.scheduler, batches, tokens, skip_ahead=False, observer=batches)
    Fleet(trace, tokens, [replica], "round-robin", Delays()).run()
    number_of = {request_id: str(number) for number, request_id in enumerate(adds)}
    want = [[(number_of[row[0]], row[1], row[2]) for row in entry.rows] for entry in sequence]
    equal = next(
        (n for n, pair in enumerate(zip(want, batches.rows, strict=False)) if pair[0] != pair[1]),
        min(len(want), len(batches.rows)),
    )
    if equal == len(want) == len(batches.rows):
        return Identity(len(want), equal, None, state.scheduler.stats)
    got = batches.rows[equal] if equal < len(batches.rows) else "nothing"
    ran = want[equal] if equal < len(want) else "nothing"
    difference = f"batch {equal}: the engine ran {ran}, the simulator {got}"
    return Identity(len(want), equal, difference, state.scheduler.stats)


class _RecordedPrompts(SyntheticTokens):
    """The prompts of the record; outputs are synthetic, as in any simulation."""

    def __init__(self, trace: Trace, prompts: list[list[int]]) -> None:
        super().__init__(trace)
        self._prompts = prompts

    def prompt(self, index: int, request: TraceRequest) -> list[int]:
        return list(self._prompts[index])


class _Batches:
    """Cost and observer at once: recorded durations one after the other, and the rows that were planned."""

    def __init__(self, entries: list[Entry], scheduler: Scheduler) -> None:
        self.rows: list[list[tuple[str, int, int]]] = []
        self._scheduler = scheduler
        self._entries = entries
        self._durations = _durations(
            [(entry.now, entry.committed) for entry in entries], _busy_after(entries)
        )
        self._believe(0)

    def predict(self, features: StepFeatures) -> float:
        number = len(self.rows)
        self._believe(number + 1)
        return self._durations[number] if number < len(self._durations) else 0.01

    def on_step(self, replica: int, step: Step, begin_s: float, end_s: float) -> None:
        self.rows.append(_rows(step))

    def on_events(self, replica: int, events: Sequence[TokenEvent], now: float) -> None:
        """Ends are compared by the batches that follow."""

    def _believe(self, number: int) -> None:
        """The step-time model that the engine had from this step on."""
        if number < len(self._entries) and (model := self._entries[number].step_model) is not None:
            self._scheduler.use_step_time(StepTimeModel.from_json(model))


def _read(path: Path) -> tuple[step_record.Header, list[Entry]]:
    header, entries = step_record.read(path)
    return header, list(entries)


def _adds(path: Path, entries: list[Entry]) -> dict[str, tuple[float, Add]]:
    """Requests in order of arrival, with a moment at which each may arrive to be in the same step.

    A message was drained at the very moment a step began; anywhere between that and the step before does as well, and the
    middle is safe from rounding. When the engine was idle, the moment itself started the step.
    """
    found: dict[str, tuple[float, Add]] = {}
    ran = [entry for entry in entries if entry.rows]
    busy_after = dict(zip((entry.step_id for entry in ran), _busy_after(ran), strict=True))
    before: Entry | None = None
    for entry in entries:
        for drained in entry.messages:
            if not isinstance(drained.message, Add):
                raise RecordError(
                    f"{path}: step {entry.step_id}: only records of plain requests can be simulated"
                )
            busy = before is not None and busy_after[before.step_id]
            at_s = (before.now + drained.now) / 2 if before is not None and busy else drained.now
            found[drained.message.id] = (at_s, drained.message)
        if entry.rows:
            before = entry
    return found


def _busy_after(ran: list[Entry]) -> list[bool]:
    """For each step whether requests were left when it was committed, so that the next one followed at once."""
    unfinished: set[str] = set()
    found = []
    for entry in ran:
        unfinished.update(
            drained.message.id for drained in entry.messages if isinstance(drained.message, Add)
        )
        unfinished.difference_update(request_id for request_id, _ in entry.finished)
        found.append(bool(unfinished))
    return found


def _count_outputs(entry: Entry, adds: dict[str, tuple[float, Add]], outputs: Counter[str]) -> None:
    """Add the tokens of a step: one for each row that reaches the end of what its request has, outputs included."""
    if entry.failed or entry.runner_error is not None:
        raise RecordError(f"step {entry.step_id}: records with failures cannot be simulated")
    for request_id, context, chunk in entry.rows:
        if context + chunk == len(adds[request_id][1].prompt_token_ids) + outputs[request_id]:
            outputs[request_id] += 1


def _durations(times: list[tuple[float, float]], busy_after: list[bool]) -> list[float]:
    """From the start of each step to that of the next when that followed at once, else to its commit.

    The pause between two steps (sending, reading messages) belongs to the one before: a simulated step begins when the one
    before ends.
    """
    found = []
    for number, (begin_s, end_s) in enumerate(times):
        follows = busy_after[number] and number + 1 < len(times)
        found.append((times[number + 1][0] if follows else end_s) - begin_s)
    return found


def recorded_steps(path: Path) -> list[RecordedStep]:
    """Features and times of a record's steps that ran, in order: what a step-time model is fitted to."""
    busy_after: list[bool] = []
    found = [
        (features_of(step), entry.now, entry.committed)
        for entry, step in _replayed(path, step_record.read(path)[0].build(), busy_after)
        if step is not None and entry.runner_error is None
    ]
    durations = _durations([(begin_s, end_s) for _, begin_s, end_s in found], busy_after)
    return [RecordedStep(*each, duration_s) for each, duration_s in zip(found, durations, strict=True)]


def _replayed(
    path: Path, state: EngineState, busy_after: list[bool] | None = None
) -> Iterator[tuple[Entry, Step | None]]:
    """Each entry with the step that a replica over `state`, as the header builds it, plans at its place.

    The step ends when the next is asked for. `busy_after` collects, for each step that ran, whether anything was left.
    """
    _, entries = step_record.read(path)
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
            if busy_after is not None:
                busy_after.append(state.scheduler.has_work)
        else:
            replica.step = None
            state.scheduler.rollback(step)
            for request in step.requests:
                state.scheduler.abort(request.id)


def _rows(step: Step | None) -> list[tuple[str, int, int]]:
    if step is None:
        return []
    return [(r.id, c, n) for r, c, n in zip(step.requests, step.context, step.chunk, strict=True)]
