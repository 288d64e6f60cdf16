"""One simulated engine: the engine's own scheduler with an injected clock, and a step-time cost where the model would be.

Driven by `fleet.py` (and by `identity.py`, with recorded times in place of a cost): `begin(now)` plans a step and says when it
ends, `end(now)` commits it. Knows nothing of arrivals, other replicas or traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from trimtab_engine.core.request import Request
from trimtab_engine.core.scheduler import Scheduler
from trimtab_engine.core.step import Step, StepResult, TokenEvent
from trimtab_engine.core.step_time import StepFeatures, features_of
from trimtab_tuner.result import RequestResult

from .cost import StepCost
from .stop_rule import StopRule
from .tally import Tally
from .tokens import output_token

# Steps planned ahead at most in one go; bounds the work that is thrown away when memory runs short.
_SKIP_AT_MOST = 512


class Executor(Protocol):
    """Answers a step as a runner would, without side effects."""

    def run(self, step: Step) -> StepResult:
        """One token for each sampled row."""


class StepObserver(Protocol):
    """Whoever wants to see every step; its presence switches skipping ahead off."""

    def on_step(self, replica: int, step: Step, begin_s: float, end_s: float) -> None:
        """A step was planned."""

    def on_events(self, replica: int, events: Sequence[TokenEvent], now: float) -> None:
        """A step was committed (or requests ended without one)."""


class Replica:
    """A scheduler and the step that it has in flight. `open` maps ids of unfinished requests to their results."""

    def __init__(
        self,
        number: int,
        scheduler: Scheduler,
        cost: StepCost,
        executor: Executor,
        *,
        skip_ahead: bool = True,
        observer: StepObserver | None = None,
        stop_rule: StopRule | None = None,
        swap_block_s: float = 0.0,
        tally: Tally | None = None,
    ) -> None:
        self.number = number
        self.scheduler = scheduler
        self.open: dict[str, RequestResult] = {}
        self.step: Step | None = None
        self.num_steps = 0
        self.num_skipped = 0
        self.busy_s = 0.0
        self.tally = tally
        self.num_swapped_out = self.num_swapped_in = 0  # blocks
        self._cost = cost
        self._executor = executor
        self._skip_ahead = skip_ahead and observer is None
        self._observer = observer
        self._stop_rule = stop_rule
        self._swap_block_s = swap_block_s

    def add(self, request: Request, result: RequestResult) -> None:
        """Queue a request; raises what `Scheduler.add` raises, and nothing changed then."""
        self.scheduler.add(request)
        self.open[request.id] = result

    def begin(self, now: float, quiet_until_s: float = float("-inf")) -> float | None:
        """Plan the next step; returns when it ends, None when nothing can run.

        Until `quiet_until_s` nothing reaches this replica from outside: steady steps that end before are skipped over.
        """
        if self._skip_ahead and now < quiet_until_s:
            now = self._skip(now, quiet_until_s)
        step = self.scheduler.schedule(now)
        if not step:
            self._deliver(self.scheduler.drain_events(), now)
            return None
        self.step = step
        # Copies are made before the forward pass and on the same stream, so they lengthen the step.
        self.num_swapped_out += len(step.swap_out)
        self.num_swapped_in += len(step.swap_in)
        copies_s = self._swap_block_s * (len(step.swap_out) + len(step.swap_in))
        seconds = self._cost.predict(features_of(step)) + copies_s
        self.num_steps += 1
        self.busy_s += seconds
        if self.tally is not None:
            self.tally.step(step, self.scheduler.stats, now, seconds)
        if self._stop_rule is not None:
            for request in step.admitted:
                if request.num_preemptions == 0:
                    self._stop_rule.started(request.arrival_s, now)
        if self._observer is not None:
            self._observer.on_step(self.number, step, now, now + seconds)
        return now + seconds

    def end(self, now: float) -> list[TokenEvent]:
        """Commit the step in flight and stamp its tokens with `now`."""
        step, self.step = self.step, None
        assert step is not None, "a step ends once"
        events = self.scheduler.commit(step, self._executor.run(step), now)
        events += self.scheduler.drain_events()
        self._deliver(events, now)
        return events

    def _deliver(self, events: Sequence[TokenEvent], now: float) -> None:
        rule, results = self._stop_rule, self.open
        for event in events:
            request = event.request
            result = results.get(request.id)
            if result is None:
                continue
            if event.token_id is not None:
                times = result.token_times_s
                if rule is not None and times and now - times[-1] > rule.gap_s:
                    rule.late_gaps += 1
                times.append(now)
            if event.finished:
                del results[request.id]
                _close(request, result, now)
        if self._observer is not None and events:
            self._observer.on_events(self.number, events, now)
        for event in events:
            if event.finished:
                # Nobody asks for them any more, and thousands of long prompts would fill the memory.
                event.request.token_ids, event.request.block_hashes = [], []

    def _skip(self, now: float, quiet_until_s: float) -> float:
        """Run the steady steps that end before `quiet_until_s` in one go; returns when the last of them ends."""
        steady = self.scheduler.steady_steps
        if steady == 0:
            return now
        requests = self.scheduler.running_decodes
        rows = len(requests)
        context = sum(request.num_computed for request in requests)
        ends: list[float] = []
        at, predict = now, self._cost.predict
        for _ in range(min(steady, _SKIP_AT_MOST)):
            at += predict(StepFeatures(rows, rows, context, 0.0))
            if at >= quiet_until_s:
                break
            ends.append(at)
            context += rows
        done = self.scheduler.skip_decodes(output_token, ends) if ends else 0
        if done == 0:
            return now
        ends = ends[:done]
        times = [self.open[request.id].token_times_s for request in requests]
        if self._stop_rule is not None:
            self._count_late(times, ends)
        for each in times:
            each.extend(ends)
        self.num_steps += done
        self.num_skipped += done
        self.busy_s += ends[-1] - now
        if self.tally is not None:
            budget, kv = self.scheduler.live.max_num_batched_tokens, self.scheduler.stats.kv_used_fraction
            self.tally.decodes(rows, budget, kv, now, done, ends[-1] - now)
        return ends[-1]

    def _count_late(self, times: list[list[float]], ends: list[float]) -> None:
        rule = self._stop_rule
        assert rule is not None
        rule.late_gaps += sum(ends[0] - each[-1] > rule.gap_s for each in times)
        late = sum(b - a > rule.gap_s for a, b in pairwise(ends))
        rule.late_gaps += late * len(times)


def _close(request: Request, result: RequestResult, now: float) -> None:
    result.finish_s = now
    result.output_tokens = request.num_output_tokens
    result.cached_tokens = request.num_cached
    if request.retry_after_s is not None:  # shed: nothing is wrong with it
        result.status, result.error, result.http_status = "rejected", request.error, 503
    elif request.error is not None:
        result.status, result.error, result.http_status = "failed", request.error, 500
    else:
        result.status, result.http_status = "ok", 200
