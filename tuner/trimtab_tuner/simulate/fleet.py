"""N simulated replicas behind a router: the event loop. `pop → handle → push`, in the order that `events.py` defines.

Used by `simulate.py`. Knows when requests arrive and where they go; what a step contains is the scheduler's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from trimtab_engine.core.request import Request, SamplingParams
from trimtab_engine.errors import RequestError
from trimtab_tuner.errors import InputError
from trimtab_tuner.result import RequestResult
from trimtab_tuner.trace import Trace, TraceRequest

from .events import EventQueue, Kind
from .replica import Replica
from .stop_rule import StopRule
from .tokens import SyntheticTokens

Routing = Literal["round-robin", "least-loaded"]
ROUTINGS: tuple[str, ...] = get_args(Routing)
# An engine that has work and cannot schedule any of it looks again after this long.
_BLOCKED_WAIT_S = 0.01
_MAX_BLOCKED_LOOKS = 10_000


def router(routing: str) -> Callable[[int, Sequence[Replica]], Replica]:
    """Who gets request number n. Raises InputError for an unknown name.

    round-robin   replicas in turn
    least-loaded  the fewest unfinished requests, ties to the lowest number: what the local operator's proxy does
    """
    if routing == "round-robin":
        return lambda number, replicas: replicas[number % len(replicas)]
    if routing == "least-loaded":
        return lambda number, replicas: min(replicas, key=lambda replica: (len(replica.open), replica.number))
    raise InputError("--routing", routing, f"one of {', '.join(ROUTINGS)}")


def placed(placement: Sequence[int]) -> Callable[[int, Sequence[Replica]], Replica]:
    """Request number n goes to replica `placement[n]`, as it was recorded."""
    return lambda number, replicas: replicas[placement[number]]


@dataclass(frozen=True, slots=True)
class Delays:
    """What the way through the HTTP process and the network adds, in seconds, the same for every request and token."""

    ingress_s: float = 0.0  # from the intended send until the engine has the request
    egress_s: float = 0.0  # from the commit of a step until its tokens are with the client


class Fleet:
    """Replicas, a trace, and the events between them."""

    def __init__(
        self,
        trace: Trace,
        tokens: SyntheticTokens,
        replicas: Sequence[Replica],
        routing: str,
        delays: Delays,
        stop_rule: StopRule | None = None,
        placement: Sequence[int] | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """`placement`: the replica of each request, in place of a routing. `on_progress`: see `simulate`."""
        self._trace = trace
        self._tokens = tokens
        self._replicas = replicas
        self._route = router(routing) if placement is None else placed(placement)
        self._on_progress = on_progress
        self._delays = delays
        self._stop_rule = stop_rule
        self._queue = EventQueue()
        self._arrivals_s = [request.arrival_s + delays.ingress_s for request in trace.requests]
        self._next_arrival = 0
        self._working = [False] * len(replicas)  # a step is in flight or about to be planned
        self._blocked_looks = [0] * len(replicas)
        self.requests: list[Request] = []
        self.results: list[RequestResult] = []
        self.stopped = False

    @property
    def now(self) -> float:
        """Seconds since the start of the trace."""
        return self._queue.now

    def run(self) -> None:
        """Until every request has ended, or the stop rule is broken."""
        queue, replicas, rule = self._queue, self._replicas, self._stop_rule
        self._plan_arrival()
        while queue:
            now, kind, number = queue.pop()
            if kind is Kind.STEP_START:
                self._begin(replicas[number], now)
            elif kind is Kind.STEP_END:
                replicas[number].end(now)
                self._go_on(replicas[number], now)
            else:
                self._arrive(number, now)
                if rule is not None:
                    rule.arrived(self._arrivals_s, now)
            if self._on_progress is not None:
                self._on_progress(self._next_arrival / len(self._arrivals_s))
            if rule is not None and rule.broken:
                self.stopped = True
                return

    def _plan_arrival(self) -> None:
        if self._next_arrival < len(self._arrivals_s):
            self._queue.push(self._arrivals_s[self._next_arrival], Kind.ARRIVAL, self._next_arrival)

    def _arrive(self, index: int, now: float) -> None:
        self._next_arrival = index + 1
        self._plan_arrival()
        each = self._trace.requests[index]
        result = RequestResult(
            index=index,
            intended_s=each.arrival_s,
            asked_prompt_tokens=each.prompt_tokens,
            asked_output_tokens=each.output_tokens,
            slo_class=each.slo_class,
            sent_s=each.arrival_s,
            prompt_tokens=each.prompt_tokens,
        )
        request = self._request(index, each)
        self.requests.append(request)
        self.results.append(result)
        replica = self._route(index, self._replicas)
        try:
            replica.add(request, result)
        except RequestError as error:
            result.status, result.error, result.http_status = "failed", str(error), 400
            result.finish_s = now
            return
        if not self._working[replica.number]:
            self._working[replica.number] = True
            self._queue.push(now, Kind.STEP_START, replica.number)

    def _request(self, index: int, each: TraceRequest) -> Request:
        """As the engine builds one; the seed is the index, so that nothing is drawn."""
        prompt = self._tokens.prompt(index, each)
        return Request(
            id=str(index),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=each.output_tokens, ignore_eos=True, seed=index),
            arrival_s=each.arrival_s,
            slo_class=each.slo_class,
            tenant=each.tenant,
        )

    def _begin(self, replica: Replica, now: float) -> None:
        upcoming = self._next_arrival
        quiet_until_s = self._arrivals_s[upcoming] if upcoming < len(self._arrivals_s) else math.inf
        end_s = replica.begin(now, quiet_until_s)
        if end_s is not None:
            self._blocked_looks[replica.number] = 0
            self._queue.push(end_s, Kind.STEP_END, replica.number)
        elif replica.scheduler.has_work:
            self._blocked_looks[replica.number] += 1
            assert self._blocked_looks[replica.number] < _MAX_BLOCKED_LOOKS, (
                f"replica {replica.number} has work that it never schedules: {replica.scheduler.stats}"
            )
            self._queue.push(now + _BLOCKED_WAIT_S, Kind.STEP_START, replica.number)
        else:
            self._working[replica.number] = False

    def _go_on(self, replica: Replica, now: float) -> None:
        if replica.scheduler.has_work:
            self._queue.push(now, Kind.STEP_START, replica.number)
        else:
            self._working[replica.number] = False

    def settle(self) -> None:
        """Add the way back to every time, and mark what was cut off as cancelled. Call once, after `run`."""
        egress_s, cut_off_s = self._delays.egress_s, max(self.now, 0.0)
        for result in self.results:
            if egress_s:
                result.token_times_s = [at + egress_s for at in result.token_times_s]
            times = result.token_times_s
            result.first_token_s = times[0] if times else None
            if result.finish_s is None:
                result.status, result.finish_s = "cancelled", cut_off_s + egress_s
            elif result.status == "ok":
                result.finish_s += egress_s
