"""Step records: everything that decided a step, written by the engine (`--record-steps`), replayable without a model.

One JSON object per line: a header, then an entry per step with the messages drained since the step before, the clock
readings, the rows, and what came back. `replay` runs them through the same scheduler and finds the first difference;
the simulator builds on it. Contains token ids (never text): treat a record as you would treat its prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_engine.core.request import FinishReason
from trimtab_engine.core.scheduler import Scheduler
from trimtab_engine.core.step import Step, StepResult
from trimtab_engine.core.step_time import StepTimeModel
from trimtab_engine.engine_state import EngineState
from trimtab_engine.errors import TrimtabError
from trimtab_engine.live_state import LiveState, Versioned
from trimtab_engine.messages import Abort, Add, EndLease, Reconfigure

FORMAT = 1


class RecordError(TrimtabError):
    """A record cannot be read, or its replay does something else than the engine did; names file and line."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine was when it started."""

    format: int = FORMAT
    num_blocks: int
    block_size: int
    max_model_len: int
    enable_prefix_caching: bool
    prefill_first: bool
    shed_late: bool = False
    fair_tenants: bool = False
    num_swap_blocks: int = 0
    swap_block_s: float = 0.0
    eos_token_ids: list[int]
    seed: int
    ceilings: dict[str, int]
    live: dict[str, object]
    generation: int
    source: str

    def build(self) -> EngineState:
        """Scheduler and live state as they were then."""
        ceilings = Ceilings(**self.ceilings)
        live = LiveConfig.from_json(self.live, ceilings)
        scheduler = Scheduler(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            live=live,
            generation=self.generation,
            enable_prefix_caching=self.enable_prefix_caching,
            prefill_first=self.prefill_first,
            shed_late=self.shed_late,
            fair_tenants=self.fair_tenants,
            num_swap_blocks=self.num_swap_blocks,
            swap_block_s=self.swap_block_s,
            eos_token_ids=frozenset(self.eos_token_ids),
            seed=self.seed,
        )
        return EngineState(scheduler, LiveState(Versioned(self.generation, self.source, live), ceilings), 0.0)


class Drained(msgspec.Struct, frozen=True):
    """One message and the clock reading at which it was applied."""

    now: float
    message: Add | Abort | Reconfigure | EndLease


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Times are monotonic seconds of the recording machine."""

    step_id: int
    step_model: dict[str, object] | None = None  # the step-time model from here on, when it has changed
    messages: list[Drained]  # since the step before, in order
    now: float  # given to schedule()
    generation: int
    budget: int
    rows: list[tuple[str, int, int]]  # request id, context, chunk
    token_ids: list[int]  # of the sampled rows
    failed: dict[int, str]  # row → reason
    runner_error: str | None  # the step failed as a whole; it was rolled back and its requests ended
    committed: float  # given to commit()
    finished: list[tuple[str, str]]  # request id, finish reason


class StepRecorder:
    """Writes a record. Buffered: `flush` when there is time for it."""

    def __init__(self, path: Path, header: Header) -> None:
        self._encoder = msgspec.json.Encoder()
        self._file = path.open("wb", buffering=1 << 20)
        self._drained: list[Drained] = []
        self._step_model: dict[str, object] | None = None
        self._line(header)
        self.flush()

    def __enter__(self) -> StepRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def drained(self, message: Add | Abort | Reconfigure | EndLease, now: float) -> None:
        """Keep a message for the next step's entry."""
        self._drained.append(Drained(now, message))

    def step_model(self, model: StepTimeModel) -> None:
        """The model that the steps after this are scheduled by."""
        self._step_model = model.to_json()

    def step(
        self,
        step: Step,
        result: StepResult | None,
        committed: float,
        finished: list[tuple[str, str]],
        runner_error: str | None = None,
    ) -> None:
        """Write one step; `result` None: it failed as a whole with `runner_error`."""
        drained, self._drained = self._drained, []
        step_model, self._step_model = self._step_model, None
        self._line(
            Entry(
                step_id=step.step_id,
                step_model=step_model,
                messages=drained,
                now=step.scheduled_at_s,
                generation=step.generation,
                budget=step.budget,
                rows=[
                    (request.id, context, chunk)
                    for request, context, chunk in zip(step.requests, step.context, step.chunk, strict=True)
                ],
                token_ids=[] if result is None else result.token_ids,
                failed={} if result is None else result.failed,
                runner_error=runner_error,
                committed=committed,
                finished=finished,
            )
        )

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()

    def _line(self, value: msgspec.Struct) -> None:
        self._file.write(self._encoder.encode(value) + b"\n")


def read(path: Path) -> tuple[Header, Iterator[Entry]]:
    """Header and entries of a record; raises RecordError naming file and line. A torn last line is left out."""
    lines = _lines(path)
    try:
        header = msgspec.json.decode(next(lines), type=Header)
    except (OSError, StopIteration, msgspec.DecodeError) as error:
        raise RecordError(f"{path}:1: not a step record: {error}") from error
    if header.format != FORMAT:
        raise RecordError(f"{path}:1: format {header.format} is not known; this version reads {FORMAT}")
    return header, _entries(path, lines)


def replay(path: Path) -> Iterator[Entry]:
    """Run a record through the scheduler; yields each entry once it has come out equal, else raises RecordError."""
    header, entries = read(path)
    state = header.build()
    for entry in entries:
        if entry.step_model is not None:
            state.scheduler.use_step_time(StepTimeModel.from_json(entry.step_model))
        for drained in entry.messages:
            state.apply(drained.message, drained.now)
        state.expire(entry.now)
        state.take_tokens()
        state.scheduler.drain_events()
        step = state.scheduler.schedule(entry.now)
        rows = [(r.id, c, n) for r, c, n in zip(step.requests, step.context, step.chunk, strict=True)]
        want = (entry.step_id, entry.generation, entry.budget, entry.rows)
        got = (step.step_id, step.generation, step.budget, rows)
        if want != got:
            raise RecordError(f"{path}: step {entry.step_id} replays differently: recorded {want}, now {got}")
        finished = _finish(state.scheduler, step, entry)
        if finished != entry.finished:
            raise RecordError(
                f"{path}: step {entry.step_id} ends differently: recorded {entry.finished}, now {finished}"
            )
        yield entry


def _finish(scheduler: Scheduler, step: Step, entry: Entry) -> list[tuple[str, str]]:
    if entry.runner_error is not None:
        scheduler.rollback(step)
        for request in step.requests:
            scheduler.abort(request.id)
        return [(request.id, FinishReason.ERROR.value) for request in step.requests]
    if not step:
        return [(e.request.id, str(e.request.finish_reason)) for e in scheduler.drain_events() if e.finished]
    result = StepResult(token_ids=list(entry.token_ids), failed=dict(entry.failed))
    events = [*scheduler.commit(step, result, entry.committed), *scheduler.drain_events()]
    return [(e.request.id, str(e.request.finish_reason)) for e in events if e.finished]


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _entries(path: Path, lines: Iterator[bytes]) -> Iterator[Entry]:
    decoder = msgspec.json.Decoder(Entry)
    for number, line in enumerate(lines, start=2):
        if not line.endswith(b"\n"):
            return  # the engine was killed while writing
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise RecordError(f"{path}:{number}: {error}") from error
