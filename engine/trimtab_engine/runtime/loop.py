"""The engine loop: drain messages, schedule, run, commit, send; one thread, nothing else touches its state.

Run by `runtime.process` in the engine process. Blocks on the socket when idle, and then only as long as the next lease
allows. Knows the scheduler through `engine_state`, the model as something with `run(step)`, the peer as a channel.

Who fails when something goes wrong: a bad row fails its request; a step that raises fails its requests (the scheduler
rolls it back); a broken device, or three failing steps in a row, end the process with `Fatal`.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable
from typing import Protocol

from trimtab_engine.core.request import FinishReason, Request
from trimtab_engine.core.step import Step, StepResult, TokenEvent, TokenLogprobs
from trimtab_engine.core.step_fit import StepTimeFit, is_disturbed
from trimtab_engine.core.step_time import StepFeatures, StepTimeModel, features_of
from trimtab_engine.engine_state import EngineState
from trimtab_engine.framing import EngineChannel, PeerGone
from trimtab_engine.messages import (
    Abort,
    Add,
    Drain,
    EndLease,
    Fatal,
    Init,
    Reconfigure,
    StepModel,
    StepOutput,
    StepStats,
    Stop,
    Stopped,
    ToEngine,
    Token,
)
from trimtab_engine.runtime.lost_time import LostTime
from trimtab_engine.step_record import StepRecorder

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row: then it is not one request's fault
MAX_BACKLOG_BYTES = 64 * 2**20  # unsent output; a peer that far behind is waited for
FLUSH_S = 2.0
REPORT_EXCLUDED_STEPS = 64  # excluded steps bring no new model; their share is reported all the same
_COLLECT_AFTER_S = 0.05  # idle that long: time for the garbage collector
_BLOCKED_WAIT_S = 0.01  # work is there and none of it can run; look again soon


class Executor(Protocol):
    """Runs steps; `runtime.runner.Runner` in production."""

    def run(self, step: Step) -> StepResult:
        """One forward pass."""
        ...


class EngineLoop:
    """Owns the process from Ready to its end."""

    def __init__(
        self,
        channel: EngineChannel,
        state: EngineState,
        executor: Executor,
        recorder: StepRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        lost_s: Callable[[], float] | None = None,
        step_model: StepTimeModel | None = None,
    ) -> None:
        """`lost_s`: seconds that the calling thread has waited for a CPU so far.

        `step_model`: a saved one, to schedule by until enough steps have been measured.
        """
        self._channel = channel
        self._state = state
        self._scheduler = state.scheduler
        self._executor = executor
        self._recorder = recorder
        self._clock = clock
        self._lost_s = LostTime() if lost_s is None else lost_s
        self._fit = StepTimeFit(step_model)
        self._failed_steps = 0
        self._blocked = False
        self._draining = False
        self._idle_said = False  # the peer knows that nothing runs
        self._collected = True
        self._counted = self._scheduler.stats
        self._last_step_id = 0
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}

    def run(self, backlog: list[ToEngine]) -> int:
        """Work until told to stop or until the peer is gone; the exit code. `backlog`: messages read before."""
        if self._fit.model is not None:
            self._use(self._fit.model)
        messages = backlog
        while True:
            now = self._clock()
            for message in messages:
                match message:
                    case Stop():
                        return 0
                    case Drain():
                        self._draining = True
                    case Init():
                        logger.error("a second Init was ignored")
                    case Add() | Abort() | Reconfigure() | EndLease():
                        self._apply(message, now)
            if (ended := self._state.expire(now)) is not None:
                logger.info("lease ended", extra={"generation": self._state.live.in_force.generation})
                self._channel.send(ended)
            try:
                if self._scheduler.has_work:
                    if not self._step(now):
                        return 1
                elif self._rest():
                    return 0
                messages = self._receive()
            except PeerGone:
                logger.error("the HTTP process is gone; the engine ends")
                return 1

    def _apply(self, message: Add | Abort | Reconfigure | EndLease, now: float) -> None:
        if self._recorder is not None:
            self._recorder.drained(message, now)
        if isinstance(message, Abort):
            for request_id in message.ids:
                self._prompt_logprobs.pop(request_id, None)
        answer = self._state.apply(message, now)
        if answer is not None:
            self._channel.send(answer)

    def _receive(self) -> list[ToEngine]:
        self._channel.wait_for_room(MAX_BACKLOG_BYTES)
        if self._scheduler.has_work:
            return self._channel.receive(_BLOCKED_WAIT_S if self._blocked else 0)
        wait_s = self._state.live.next_end_s - self._clock()
        if not self._collected:
            messages = self._channel.receive(max(0.0, min(wait_s, _COLLECT_AFTER_S)))
            if not messages and wait_s > _COLLECT_AFTER_S:
                self._tidy()
            return messages
        return self._channel.receive(None if math.isinf(wait_s) else max(0.0, wait_s))

    def _tidy(self) -> None:
        """What costs time and can wait for a quiet moment."""
        self._collected = True
        gc.collect()
        if self._recorder is not None:
            self._recorder.flush()
        try:
            self._scheduler.check_integrity()
        except AssertionError:
            logger.exception("the scheduler's books do not balance; please report this")

    def _rest(self) -> bool:
        """Nothing to run: say so once. True when a drain is complete."""
        tokens = self._outside_tokens()
        if tokens or not self._idle_said:
            self._send(tokens, self._stats(None, 0.0, 0.0, self._clock(), 0.0))
        self._idle_said = True
        if self._draining:
            self._channel.send(Stopped())
            self._channel.flush(FLUSH_S)
        return self._draining

    def _step(self, now: float) -> bool:
        """One step. False: the process must end."""
        self._idle_said = self._collected = False
        lost_s = self._lost_s()
        tokens = self._outside_tokens()
        step = self._scheduler.schedule(now)
        schedule_s = self._clock() - now
        self._blocked = not step
        if not step:
            events = self._scheduler.drain_events()
            self._record(step, StepResult([]), now, events)
            if tokens or events:
                tokens += (self._token(event) for event in events)
                self._send(tokens, self._stats(None, schedule_s, 0.0, now, 0.0))
            return True
        self._last_step_id = step.step_id
        try:
            result = self._executor.run(step)
        except (
            Exception
        ) as error:  # whatever a forward pass can raise must end requests, not leave them hanging
            logger.exception("step failed", extra={"step_id": step.step_id, "rows": len(step.requests)})
            tokens += self._fail(step, error)
            self._send(tokens, self._stats(step, schedule_s, self._clock() - now, now, 0.0))
            return not self._is_fatal(error)
        self._failed_steps = 0
        self._keep_prompt_logprobs(step, result)
        committed = self._clock()
        events = [*self._scheduler.commit(step, result, committed), *self._scheduler.drain_events()]
        self._record(step, result, committed, events)
        tokens += (self._token(event) for event in events)
        stats = self._stats(step, schedule_s, self._clock() - now, now, self._lost_s() - lost_s)
        self._send(tokens, stats)
        self._learn(stats)
        return True

    def _learn(self, stats: StepStats) -> None:
        """Fit the step-time model to a step, after its tokens are on their way."""
        features = StepFeatures(
            stats.num_tokens,
            stats.num_decodes + stats.num_prefills,
            stats.decode_context,
            stats.prefill_attention,
        )
        disturbed = is_disturbed(stats.step_s, stats.lost_s)
        new = self._fit.observe(features, stats.step_s, disturbed)
        model = self._fit.model
        if new and model is not None:
            self._use(model)
        elif disturbed and self._fit.num_excluded % REPORT_EXCLUDED_STEPS == 1:
            self._tell(model)

    def _use(self, model: StepTimeModel) -> None:
        """Schedule by it from the next step on, record that, and tell the peer."""
        self._scheduler.use_step_time(model)
        if self._recorder is not None:
            self._recorder.step_model(model)
        self._tell(model)

    def _tell(self, model: StepTimeModel | None) -> None:
        self._channel.send(StepModel(None if model is None else model.to_json(), self._fit.score.to_json()))

    def _fail(self, step: Step, error: Exception) -> list[Token]:
        """End the requests of a step that raised, as if it had never been scheduled."""
        self._failed_steps += 1
        reason = f"the step failed: {type(error).__name__}: {error}"
        self._scheduler.rollback(step)
        tokens = []
        for request in step.requests:
            self._scheduler.abort(request.id)
            self._prompt_logprobs.pop(request.id, None)
            tokens.append(Token(request.id, None, FinishReason.ERROR.value, error=reason))
        if self._recorder is not None:
            finished = [(request.id, FinishReason.ERROR.value) for request in step.requests]
            self._recorder.step(step, None, self._clock(), finished, reason)
        return tokens

    def _is_fatal(self, error: Exception) -> bool:
        device = _is_device_error(error)
        if not device and self._failed_steps < MAX_FAILED_STEPS:
            return False
        kind = "device" if device else "internal"
        reason = f"{type(error).__name__}: {error}"
        if not device:
            reason = f"{MAX_FAILED_STEPS} steps in a row failed, the last with {reason}"
        self._channel.send(Fatal(kind, reason))
        self._channel.flush(FLUSH_S)
        return True

    def _record(self, step: Step, result: StepResult, committed: float, events: list[TokenEvent]) -> None:
        if self._recorder is not None:
            finished = [(e.request.id, str(e.request.finish_reason)) for e in events if e.finished]
            self._recorder.step(step, result, committed, finished)

    def _outside_tokens(self) -> list[Token]:
        """News of requests that ended without a step."""
        return [*self._state.take_tokens(), *(self._token(e) for e in self._scheduler.drain_events())]

    def _send(self, tokens: list[Token], stats: StepStats) -> None:
        self._channel.send(StepOutput(tokens, stats))

    def _keep_prompt_logprobs(self, step: Step, result: StepResult) -> None:
        for row, entries in result.prompt_logprobs.items():
            request_id = step.requests[row].id
            if step.context[row] == 0:  # a new start, perhaps after a preemption
                self._prompt_logprobs[request_id] = []
            self._prompt_logprobs[request_id] += entries

    def _token(self, event: TokenEvent) -> Token:
        request, logprobs = event.request, event.logprobs
        first = request.num_output_tokens <= 1
        prompt_logprobs = self._prompt_logprobs.pop(request.id, None) if first or event.finished else None
        return Token(
            id=request.id,
            token_id=event.token_id,
            finish_reason=_finish_reason(request) if event.finished else None,
            stop_token=request.stop_token if event.finished else None,
            error=request.error if event.finished else None,
            num_cached=request.num_cached if first else None,
            first_scheduled_s=request.first_scheduled_s if first else None,
            logprob=None if logprobs is None else logprobs.logprob,
            rank=None if logprobs is None else logprobs.rank,
            top=None if logprobs is None else logprobs.top,
            prompt_logprobs=None
            if prompt_logprobs is None
            else [None if p is None else (p.logprob, p.rank, p.top) for p in prompt_logprobs],
            num_preemptions=request.num_preemptions,
            retry_after_s=request.retry_after_s if event.finished else None,
        )

    def _stats(
        self, step: Step | None, schedule_s: float, step_s: float, started_s: float, lost_s: float
    ) -> StepStats:
        """Numbers of `step` (None: of no step) and of the scheduler now; counters as deltas since the last call."""
        after, before = self._scheduler.stats, self._counted
        self._counted = after
        features = None if step is None else features_of(step)
        return StepStats(
            step_id=self._last_step_id,
            generation=self._scheduler.generation if step is None else step.generation,
            budget=self._scheduler.live.max_num_batched_tokens if step is None else step.budget,
            num_tokens=0 if step is None else step.num_tokens,
            num_decodes=0 if step is None else step.num_decodes,
            num_prefills=0 if step is None else len(step.requests) - step.num_decodes,
            schedule_s=schedule_s,
            step_s=step_s,
            started_s=started_s,
            num_running=after.num_running,
            num_waiting=after.num_waiting,
            num_waiting_capacity=after.waiting_capacity,
            oldest_waiting_arrival_s=after.oldest_waiting_arrival_s,
            kv_used_fraction=after.kv_used_fraction,
            prefix_queries=after.prefix_queries - before.prefix_queries,
            prefix_hits=after.prefix_hits - before.prefix_hits,
            preemptions_recompute=after.preemptions_recompute - before.preemptions_recompute,
            preemptions_swap=after.preemptions_swap - before.preemptions_swap,
            recomputed_tokens=after.recomputed_tokens - before.recomputed_tokens,
            decode_context=0 if features is None else features.decode_context,
            prefill_attention=0.0 if features is None else features.prefill_attention,
            lost_s=lost_s,
        )


def _finish_reason(request: Request) -> str:
    assert request.finish_reason is not None, "a finished request says why"
    return request.finish_reason.value


def _is_device_error(error: Exception) -> bool:
    """Whether the device is lost (after such an error every CUDA call fails), unlike being out of its memory."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)
