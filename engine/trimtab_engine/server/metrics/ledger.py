"""Follows every request from arrival to end and books, exactly, whether its latency targets were met.

Fed by the OpenAI routes (arrival, delivery, end) and by the engine client (scheduling, preemptions); read by `exporter`.
Knows nothing of HTTP, Prometheus or the scheduler. Single-threaded: everything happens on the server's event loop.

Rules (each has a test in `tests/engine/metrics`):
  - The unit is the request (each choice of an n > 1 request is one). Per request and SLO one outcome, `met` or `violated`.
  - TTFT is violated when the first token is handed to the socket later than its target after arrival; ITL when *any* gap
    between two deliveries is longer than its target. Targets are those in force at arrival.
  - A violation is booked the moment its deadline passes, delivered or not, on the generation in force at that moment.
  - Rejected, errored, timed-out and server-aborted requests violate what was still open. Client aborts book nothing more
    and are counted apart.
  - Two generations are kept: the one in force and the one before it. A new generation's series start at 0.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trimtab_engine.core.live import Slo
from trimtab_engine.messages import Token
from trimtab_engine.server.metrics import buckets
from trimtab_engine.server.metrics.histogram import Histogram
from trimtab_engine.server.workload import WorkloadLog

SLOS = ("ttft", "itl")
OUTCOMES = ("met", "violated")
KEPT_GENERATIONS = 2
FINISHED_REASONS = ("stop", "length", "client_abort", "server_abort", "error", "timeout")
_FAILED = ("server_abort", "error", "timeout")


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One sequence. Times are seconds of the monotonic clock but for `arrival_unix_s`."""

    request_id: str
    slo_class: str
    tenant: str | None
    arrival_s: float
    arrival_unix_s: float
    num_prompt_tokens: int
    ttft_target_s: float
    itl_target_s: float
    max_tokens: int | None = None
    prefix_block_ids: Sequence[int] = ()
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ttft_outcome: str | None = None
    itl_outcome: str | None = None
    finished_reason: str | None = None


@dataclass(slots=True)
class ClassHistograms:
    """Shape of one class's latencies, in seconds; no generation label."""

    ttft: Histogram = field(default_factory=lambda: Histogram(buckets.TTFT_S))
    itl: Histogram = field(default_factory=lambda: Histogram(buckets.ITL_S))


class Ledger:
    """All open requests, and the totals of the closed ones."""

    def __init__(
        self,
        slo: Slo,
        generation: int = 0,
        now: Callable[[], float] = time.monotonic,
        workload: WorkloadLog | None = None,
    ) -> None:
        self._now = now
        self._workload = workload
        self._slo = slo
        self._open: dict[str, RequestRecord] = {}
        # One entry per open request and SLO, re-armed lazily: a delivered token only moves `last_token_s`.
        self._deadlines: list[tuple[float, int, str, RequestRecord]] = []
        self._tie = 0
        self._in_force: list[tuple[float, int]] = [
            (float("-inf"), generation)
        ]  # (since, generation), oldest first
        self._kept: list[int] = []  # most recently in force last
        self.outcomes: dict[tuple[str, str, str, int], int] = {}  # (class, slo, outcome, generation)
        self.classes: dict[str, ClassHistograms] = {}
        self.e2e, self.queue, self.prefill, self.decode = (Histogram(buckets.REQUEST_S) for _ in range(4))
        self.prompt_lengths, self.output_lengths = (Histogram(buckets.REQUEST_TOKENS) for _ in range(2))
        self.finished_total: Counter[tuple[str, str]] = Counter()  # (class, finished_reason)
        self.rejections_total: Counter[str] = Counter()
        self.ignored_priority_total = 0
        self.prompt_tokens_total = 0
        self.prompt_tokens_cached_total = 0
        self.generation_tokens_total = 0
        self._keep(generation)

    # -- generations -------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The live-config generation in force."""
        return self._in_force[-1][1]

    @property
    def slo(self) -> Slo:
        """The targets in force for requests that arrive now."""
        return self._slo

    def set_generation(self, generation: int, slo: Slo, now: float | None = None) -> None:
        """Another live config is in force from `now` on. Requests that are open keep the targets they came with."""
        at = self._now() if now is None else now
        self.tick(at)
        self._slo = slo
        if generation != self.generation:
            self._in_force = [*self._in_force[-7:], (at, generation)]
        self._keep(generation)

    def _keep(self, generation: int) -> None:
        self._kept = [*(g for g in self._kept if g != generation), generation][-KEPT_GENERATIONS:]
        self.outcomes = {key: count for key, count in self.outcomes.items() if key[3] in self._kept}
        for slo_class in self._slo.classes:
            self.classes.setdefault(slo_class.name, ClassHistograms())
            for slo in SLOS:
                for outcome in OUTCOMES:
                    self.outcomes.setdefault((slo_class.name, slo, outcome, generation), 0)

    def _generation_at(self, moment: float) -> int:
        for since, generation in reversed(self._in_force):
            if since <= moment:
                return generation if generation in self._kept else self._kept[0]
        return self._kept[0]

    # -- life of a request -------------------------------------------------------------------------------------------

    def arrived(
        self,
        *,
        request_id: str,
        slo_class: str,
        prompt_token_ids: Sequence[int],
        arrival_s: float,
        tenant: str | None = None,
        max_tokens: int | None = None,
        ttft_s: float | None = None,
        itl_s: float | None = None,
    ) -> RequestRecord:
        """Open a record; `arrival_s` is when the request's body had been read. The class must be known.

        `ttft_s` and `itl_s` are targets of its own; it is judged by them, and counted under its class.
        """
        targets = self._slo.by_name(slo_class)
        assert targets is not None, f"class {slo_class!r} was not checked at the door"
        record = RequestRecord(
            request_id=request_id,
            slo_class=slo_class,
            tenant=tenant,
            arrival_s=arrival_s,
            arrival_unix_s=time.time() - (self._now() - arrival_s),
            num_prompt_tokens=len(prompt_token_ids),
            ttft_target_s=targets.ttft_s if ttft_s is None else ttft_s,
            itl_target_s=targets.itl_s if itl_s is None else itl_s,
            max_tokens=max_tokens,
            prefix_block_ids=self._workload.prefix_block_ids(prompt_token_ids) if self._workload else (),
        )
        self._open[request_id] = record
        self._arm(record, "ttft", arrival_s + record.ttft_target_s)
        return record

    def rejected(self, record: RequestRecord, reason: str) -> None:
        """The service refused it for its own reasons (queue full, draining): it violates both SLOs."""
        self.rejections_total[reason] += 1
        self._close(record, f"rejected_{reason}")
        self._fail(record, self._now())

    def engine_token(self, record: RequestRecord, token: Token) -> None:
        """Scheduling facts that travel with the engine's tokens."""
        if token.num_cached is not None:
            record.num_cached_tokens = token.num_cached
        if token.first_scheduled_s is not None:
            record.first_scheduled_s = token.first_scheduled_s
        record.num_preemptions = max(record.num_preemptions, token.num_preemptions)

    def token_delivered(self, record: RequestRecord, num_tokens: int, now: float | None = None) -> None:
        """`num_tokens` tokens were handed to the socket together (a non-streamed answer: to its buffer).

        The first of them ends the gap; the others follow it by 0 s, so that gaps and tokens stay countable.
        """
        if num_tokens <= 0 or record.finished_reason is not None:
            return
        at = self._now() if now is None else now
        shape = self.classes[record.slo_class]
        gaps = num_tokens
        if record.last_token_s is None:
            gaps -= 1
            record.first_token_s = at
            shape.ttft.observe(at - record.arrival_s)
            self.prompt_tokens_total += record.num_prompt_tokens
            self.prompt_tokens_cached_total += record.num_cached_tokens
            self._judge(record, "ttft", record.arrival_s + record.ttft_target_s, at)
            self._arm(record, "itl", at + record.itl_target_s)
        else:
            gaps -= 1
            shape.itl.observe(at - record.last_token_s)
            if at > record.last_token_s + record.itl_target_s:
                self._book(record, "itl", "violated", record.last_token_s + record.itl_target_s)
        if gaps:
            shape.itl.observe(0.0, gaps)
        record.last_token_s = at
        record.num_output_tokens += num_tokens
        self.generation_tokens_total += num_tokens

    def finished(self, record: RequestRecord, reason: str, now: float | None = None) -> None:
        """The request ended; `reason` is one of FINISHED_REASONS. Idempotent: the first reason stands."""
        if record.finished_reason is not None:
            return
        assert reason in FINISHED_REASONS, reason
        at = self._now() if now is None else now
        self._overdue(record, at)
        self._close(record, reason)
        if reason in _FAILED:
            self._fail(record, at)
        elif reason != "client_abort":
            # An answer of no token at all (max_tokens reached by a stop string before any text) has nothing late in it.
            self._book(record, "ttft", "met", at)
            self._book(record, "itl", "met", at)
        self.e2e.observe(at - record.arrival_s)
        if record.first_scheduled_s is not None:
            self.queue.observe(max(0.0, record.first_scheduled_s - record.arrival_s))
            if record.first_token_s is not None:
                self.prefill.observe(max(0.0, record.first_token_s - record.first_scheduled_s))
        if record.first_token_s is not None and record.last_token_s is not None:
            self.decode.observe(record.last_token_s - record.first_token_s)
        self.prompt_lengths.observe(record.num_prompt_tokens)
        self.output_lengths.observe(record.num_output_tokens)

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: float | None = None) -> None:
        """Book every deadline that has passed. Called by the server at least every 20 ms while anything is open."""
        at = self._now() if now is None else now
        while self._deadlines and self._deadlines[0][0] < at:
            _, _, slo, record = heapq.heappop(self._deadlines)
            if record.finished_reason is not None or self._outcome(record, slo) is not None:
                continue
            deadline = self._deadline(record, slo)
            if deadline < at:
                self._book(record, slo, "violated", deadline)
            else:
                self._arm(record, slo, deadline)

    def oldest_waiting_s(self) -> float:
        """Age of the oldest open request that has no token yet (queued or in prefill); 0 when there is none."""
        ages = [r.arrival_s for r in self._open.values() if r.first_token_s is None]
        return max(0.0, self._now() - min(ages)) if ages else 0.0

    def longest_token_gap_s(self) -> float:
        """The longest gap that is open right now; 0 when nothing is being decoded."""
        last = [r.last_token_s for r in self._open.values() if r.last_token_s is not None]
        return max(0.0, self._now() - min(last)) if last else 0.0

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def _arm(self, record: RequestRecord, slo: str, deadline: float) -> None:
        self._tie += 1
        heapq.heappush(self._deadlines, (deadline, self._tie, slo, record))

    @staticmethod
    def _deadline(record: RequestRecord, slo: str) -> float:
        if slo == "ttft":
            return record.arrival_s + record.ttft_target_s
        assert record.last_token_s is not None
        return record.last_token_s + record.itl_target_s

    @staticmethod
    def _outcome(record: RequestRecord, slo: str) -> str | None:
        return record.ttft_outcome if slo == "ttft" else record.itl_outcome

    def _judge(self, record: RequestRecord, slo: str, deadline: float, at: float) -> None:
        if at > deadline:
            self._book(record, slo, "violated", deadline)
        else:
            self._book(record, slo, "met", at)

    def _overdue(self, record: RequestRecord, at: float) -> None:
        """Book what passed between the last tick and the end of the request (a late end is a late token to its reader)."""
        slo = "ttft" if record.first_token_s is None else "itl"
        if at > self._deadline(record, slo):
            self._book(record, slo, "violated", self._deadline(record, slo))

    def _fail(self, record: RequestRecord, at: float) -> None:
        self._book(record, "ttft", "violated", at)
        self._book(record, "itl", "violated", at)

    def _book(self, record: RequestRecord, slo: str, outcome: str, moment: float) -> None:
        """One outcome per request and SLO; later ones are ignored."""
        if self._outcome(record, slo) is not None:
            return
        if slo == "ttft":
            record.ttft_outcome = outcome
        else:
            record.itl_outcome = outcome
        key = (record.slo_class, slo, outcome, self._generation_at(moment))
        self.outcomes[key] = self.outcomes.get(key, 0) + 1

    def _close(self, record: RequestRecord, reason: str) -> None:
        record.finished_reason = reason
        self._open.pop(record.request_id, None)
        self.finished_total[record.slo_class, "rejected" if reason.startswith("rejected") else reason] += 1
        if self._workload is not None:
            self._workload.append(
                arrival_unix_s=record.arrival_unix_s,
                prompt_tokens=record.num_prompt_tokens,
                cached_tokens=record.num_cached_tokens,
                output_tokens=record.num_output_tokens,
                slo_class=record.slo_class,
                tenant=record.tenant,
                outcome=reason,
                prefix_block_ids=record.prefix_block_ids,
            )
