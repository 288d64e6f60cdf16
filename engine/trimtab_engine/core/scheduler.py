"""The scheduler: which tokens of which requests the next engine step computes.

Driven by the engine loop (`runtime.loop`) and by the simulator: `schedule(now)` → a runner executes the step →
`commit(step, result, now)`. Knows no clock, device or text; `now` is the caller's monotonic seconds.

There are no prefill and decode modes: every request catches its computed tokens up to its tokens. A step's budget is
spent in three passes, so that a long prompt never takes a decode's token:

    A  running decodes, one token each
    B  running prompts, in chunks
    C  waiting requests, if nothing was preempted in this step

`prefill_first` is the baseline that the passes are measured against: C, B, A, and no chunking.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from trimtab_engine.core import policy as policies
from trimtab_engine.core.admission import (
    WATERMARK,
    Need,
    check_fits,
    num_blocks_for,
    outstanding_blocks,
    whole_sequence_need,
)
from trimtab_engine.core.blocks import BlockPool
from trimtab_engine.core.in_flight import StepsInFlight
from trimtab_engine.core.integrity import check_integrity
from trimtab_engine.core.live import LiveConfig
from trimtab_engine.core.prefix import PrefixCache
from trimtab_engine.core.request import FinishReason, Request, RequestState
from trimtab_engine.core.running import RunningSet
from trimtab_engine.core.stats import Counters, SchedulerStats
from trimtab_engine.core.step import Step, StepResult, TokenEvent
from trimtab_engine.core.step_builder import Blocked, StepBuilder
from trimtab_engine.core.stop_rules import finish_reason
from trimtab_engine.core.waiting import SiblingGroups, WaitingQueue
from trimtab_engine.errors import ConfigError, RequestError


class Scheduler:
    """Owns every request from `add` to its end. Not thread-safe: one thread calls everything, between or around steps."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        live: LiveConfig,
        generation: int,
        enable_prefix_caching: bool = True,
        prefill_first: bool = False,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
    ) -> None:
        """`num_blocks` counts usable KV blocks (ids 1..num_blocks); `seed` draws the seeds of requests without one."""
        self.max_model_len = max_model_len
        self.prefill_first = prefill_first
        self.eos_token_ids = eos_token_ids
        self._block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache(self._pool, block_size, enable_prefix_caching)
        self._watermark = int(num_blocks * WATERMARK)
        self._requests: dict[str, Request] = {}
        self._running = RunningSet()
        self._queue = WaitingQueue()
        self._groups = SiblingGroups()
        self._in_flight = StepsInFlight()
        self._counters = Counters()
        self._events: list[TokenEvent] = []
        self._random = Random(seed)
        self._next_sequence = 0
        self._next_admission = 0
        self._next_step_id = 0
        self._now = float("-inf")
        # Of the latest step: why pass C stopped, at whom, and how many blocks were short.
        self._blocked: Blocked | None = None
        self._blocked_head: Request | None = None
        self._shortfall = 0
        self._first_decode = 0  # where pass A begins when the budget is smaller than the decodes
        # KV that preempted requests lost: tokens computed again below this count as recomputed.
        self._high_water: dict[str, int] = {}
        self.live, self.generation, self._policy = live, generation, policies.policy_of(live)
        _check_live(live)

    # ---- messages, applied between steps -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request. RequestTooLarge or RequestError, and nothing changed, when it can never run."""
        if request.id in self._requests:
            raise RequestError(
                f"request id {request.id!r} is in use; ids are unique among live requests", "id"
            )
        check_fits(
            request,
            num_blocks=self._pool.num_blocks,
            block_size=self._block_size,
            max_model_len=self.max_model_len,
        )
        if request.sampling.seed is None:
            # Drawn once here, so that neither preemption nor batch mates change what the request says.
            request.sampling = replace(request.sampling, seed=self._random.getrandbits(63))
        request.sequence = self._next_sequence
        self._next_sequence += 1
        self._requests[request.id] = request
        if request.group is not None and self._num_shared_blocks(request) > 0 and self._groups.join(request):
            return
        self._enqueue(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it stands; None when it is unknown or has ended. A result in flight is dropped."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._end(request, FinishReason.ABORT)
        return request

    def reconfigure(self, live: LiveConfig, generation: int) -> None:
        """Take a new live config for the next step. ConfigError, and nothing changed, for one that cannot work.

        Running requests keep their place: what was lowered is reached by draining. A new policy or aging reorders the
        waiting ones and decides who is preempted from now on.
        """
        policy = policies.policy_of(live)
        _check_live(live)
        changed = policy != self._policy
        self.live, self.generation, self._policy = live, generation, policy
        if changed:
            self._queue.rerank(policy.waiting_rank)
            self._running.rerank(policy.running_rank)
            self._blocked_head = None

    # ---- one step ------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Step:
        """Plan the next step; falsy when there is nothing to run just now.

        May be called again before the commit: tokens in flight count as computed, so running prompts go on, and a
        request whose sampled token is in flight sits the step out.
        """
        now = self._now = max(
            now, self._now
        )  # a clock that goes back must not reorder or produce negative times
        builder = StepBuilder(self.live.max_num_batched_tokens)
        self._displace(builder)
        if self.prefill_first:
            self._pass_waiting(builder, now)
            self._pass_prefills(builder)
            self._pass_decodes(builder)
        else:
            self._pass_decodes(builder)
            self._pass_prefills(builder)
            self._pass_waiting(builder, now)
        step = builder.build(self._next_step_id, self.generation, self.live.max_num_batched_tokens, now)
        self._next_step_id += 1
        if step:
            self._in_flight.push(step)
        return step

    def _pass_decodes(self, builder: StepBuilder) -> None:
        """Pass A. Every row costs some 0.3 µs, hence the local names and the budget charged in lots."""
        size, preempted = self._block_size, builder.preempted
        rows, contexts = builder.decodes, builder.decode_context
        limit, charged = builder.budget, 0
        for request in self._decode_order(limit):
            if preempted and request.state is not RequestState.RUNNING:
                continue
            context = request.num_computed + request.num_in_flight
            if context >= len(request.token_ids):
                continue  # its sampled token is in flight
            if charged >= limit:
                break
            if context >= len(request.block_ids) * size:
                builder.budget -= charged
                grown = self._grow(request, context + 1, builder)
                limit, charged = builder.budget, 0
                if not grown:
                    continue
            rows.append(request)
            contexts.append(context)
            request.num_in_flight += 1
            charged += 1
        builder.budget -= charged

    def _decode_order(self, budget: int) -> list[Request]:
        """The decodes, as a copy that preemption cannot shift.

        When the budget does not reach for all (possible while a lowered limit drains, and under `prefill_first`), the
        policy decides who goes first; policies without classes take turns.
        """
        decodes = self._running.decodes
        if budget <= 0:
            return []
        if len(decodes) <= budget:
            return decodes[:]
        if self._policy.displaces:
            return sorted(decodes, key=lambda request: request.rank)
        first = self._first_decode % len(decodes)
        self._first_decode = first + budget
        return decodes[first:] + decodes[:first]

    def _pass_prefills(self, builder: StepBuilder) -> None:
        """Pass B."""
        for request in self._running.prefills[:]:
            if request.state is not RequestState.RUNNING:
                continue
            if builder.budget <= 0:
                break
            context = request.num_computed + request.num_in_flight
            need = len(request.token_ids) - context
            if need == 0 or request in builder.prefills:
                continue
            chunk = self._chunk(need, builder)
            if chunk and self._grow(request, context + chunk, builder):
                builder.add_prefill(request, context, chunk)

    def _pass_waiting(self, builder: StepBuilder, now: float) -> None:
        """Pass C. The first that cannot be admitted ends the pass: passing it over would starve large prompts."""
        self._blocked = "preempted" if builder.preempted else None
        if builder.preempted:
            return (
                None  # memory is short, or was just made for somebody: admitting now would take it away again
            )
        promised: int | None = None
        while (head := self._queue.peek()) is not None:
            if len(self._running) >= self.live.max_num_seqs:
                return self._block("max_num_seqs", head)
            if builder.budget <= 0:
                return self._block("budget", head)
            need = whole_sequence_need(head, self._pool, self._cache)
            chunk = self._chunk(len(head.token_ids) - need.num_hit_tokens, builder)
            if chunk == 0:
                return self._block("budget", head)
            if promised is None:
                promised = self._promised_blocks()
            short = need.num_free_needed + promised - self._pool.num_free
            if len(self._running) > 0:
                short += self._watermark
            elif short > 0:
                # All blocks are free and it still does not fit: nothing that could happen would help.
                self._fail(head, self._too_large(head))
                continue
            if short > 0:
                return self._block("memory", head, short)
            self._admit(head, need, chunk, builder, now)
            promised += need.num_new_blocks - (len(head.block_ids) - len(need.hits))
        return None

    def _block(self, reason: Blocked, head: Request, shortfall: int = 0) -> None:
        self._blocked, self._blocked_head, self._shortfall = reason, head, shortfall

    def _promised_blocks(self) -> int:
        """Free blocks that running requests will need: of half-computed prompts, and of decodes that run after pass C."""
        promised = outstanding_blocks(self._running.prefills, self._block_size)
        if self.prefill_first:
            size = self._block_size
            promised += sum(
                1
                for r in self._running.decodes
                if r.num_computed + r.num_in_flight >= len(r.block_ids) * size
            )
        return promised

    def _chunk(self, need: int, builder: StepBuilder) -> int:
        if self.prefill_first:
            return policies.whole_prefill(need, builder.budget, builder.is_empty)
        return policies.prefill_chunk(need, builder.budget, self.live.long_prefill_token_threshold)

    # ---- admission and preemption --------------------------------------------------------------------------------

    def _admit(self, request: Request, need: Need, chunk: int, builder: StepBuilder, now: float) -> None:
        """Carry out a plan that fits. Hits are held before new blocks are taken, which could otherwise evict them."""
        counters, first = self._counters, request.num_cached is None
        if self._cache.readable(request):
            if first:
                counters.prefix_queries += len(request.token_ids)
                counters.prefix_hits += need.num_hit_tokens
            else:
                counters.readmission_queries += len(request.token_ids)
                counters.readmission_hits += need.num_hit_tokens
        if first:
            request.num_cached = need.num_hit_tokens
            request.first_scheduled_s = now
        self._queue.remove(request)
        self._pool.hold(need.hits)
        reach = num_blocks_for(need.num_hit_tokens + chunk, self._block_size)
        request.block_ids = need.hits + self._pool.allocate(reach - len(need.hits))
        request.num_computed = need.num_hit_tokens
        request.num_published = len(need.hits)
        request.state = RequestState.RUNNING
        self._next_admission += 1
        request.admission = self._next_admission
        request.rank = self._policy.running_rank(request)
        self._running.admit(request)
        builder.add_prefill(request, need.num_hit_tokens, chunk)
        builder.admitted.append(request)

    def _take_back(self, request: Request) -> None:
        """Undo an admission of which nothing was computed: the request is queued as if it had not been tried."""
        counters, hit_tokens = self._counters, request.num_computed
        first = request.num_preemptions == 0
        if self._cache.readable(request):
            if first:
                counters.prefix_queries -= len(request.token_ids)
                counters.prefix_hits -= hit_tokens
            else:
                counters.readmission_queries -= len(request.token_ids)
                counters.readmission_hits -= hit_tokens
        if first:
            request.num_cached = request.first_scheduled_s = None
        self._leave_running(request)
        request.state = RequestState.WAITING if first else RequestState.PREEMPTED
        self._enqueue(request)

    def _grow(self, request: Request, reach: int, builder: StepBuilder) -> bool:
        """Give a running request blocks up to `reach` tokens; False when it had to give way itself."""
        missing = num_blocks_for(reach, self._block_size) - len(request.block_ids)
        if missing <= 0:
            return True
        while missing > self._pool.num_free:
            victim = policies.choose_victim(self._running)
            if victim is not request:
                self._preempt(victim, builder)
            elif len(self._running) > 1:
                self._preempt(request, builder)
                return False
            else:
                self._fail(request, self._too_large(request))
                return False
        request.block_ids += self._pool.allocate(missing)
        return True

    def _preempt(self, victim: Request, builder: StepBuilder) -> None:
        """Take a running request's memory: roll back its row of this step, drop its KV, queue it for recomputation.

        The only way out of RUNNING that keeps the request. Preemption by swap decides here, before KV is dropped.
        """
        builder.withdraw(victim)
        builder.preempted.append(victim)
        if victim in builder.admitted:
            builder.admitted.remove(victim)
            self._take_back(victim)
            return
        self._counters.preemptions_recompute += 1
        self._high_water[victim.id] = max(self._high_water.get(victim.id, 0), victim.num_computed)
        self._leave_running(victim)
        victim.num_preemptions += 1
        victim.state = RequestState.PREEMPTED
        self._enqueue(victim)

    def _displace(self, builder: StepBuilder) -> None:
        """Give a running request's place to a more important waiting one that the latest step could not admit.

        At most one a step, and none in the step after one (which must first try to admit), only by the strict rule of
        `policy.may_displace`, only when it can help, and never to reach a lowered `max_num_seqs`, which drains.
        """
        head = self._blocked_head
        if not self._policy.displaces or head is None or head is not self._queue.peek():
            return
        weaker = [r for r in self._running if policies.may_displace(head, r)]
        if not weaker:
            return
        if self._blocked == "max_num_seqs":
            helps = len(self._running) <= self.live.max_num_seqs
        else:
            blocks = (block for r in weaker for block in r.block_ids)
            helps = (
                self._blocked == "memory"
                and sum(1 for block in blocks if self._pool.references(block) == 1) >= self._shortfall
            )
        if helps:
            self._counters.displacements += 1
            self._preempt(policies.choose_victim(weaker), builder)

    # ---- results -------------------------------------------------------------------------------------------------

    def commit(self, step: Step, result: StepResult, now: float) -> list[TokenEvent]:
        """Take a step's result: KV counts as computed, full blocks become findable, tokens are appended and judged.

        Rows of requests that were aborted or preempted meanwhile are dropped. Steps are committed in order, once.
        """
        if not step.requests:
            return []
        self._in_flight.check_oldest(step)
        if len(result.token_ids) != len(step.samples):
            raise ValueError(f"{len(result.token_ids)} tokens came back for {len(step.samples)} sampled rows")
        self._now = max(now, self._now)
        stale = self._in_flight.pop_oldest()
        events: list[TokenEvent] = []
        ended: set[str] = set()
        size, publishing = self._block_size, self._cache.enabled
        token_ids, logprobs, failed = result.token_ids, result.logprobs, result.failed
        samples, num_decodes = step.samples, step.num_decodes
        sample = 0
        for row, request in enumerate(step.requests):
            sampled = sample < len(samples) and samples[sample] == row
            sample += sampled
            if row in stale:
                continue
            chunk = step.chunk[row]
            request.num_in_flight -= chunk
            if row in failed:
                # Its KV may be as broken as its logits: nothing of this step is published.
                self._finish(request, FinishReason.ERROR, ended, error=failed[row])
                events.append(TokenEvent(request, None, finished=True))
                continue
            computed = request.num_computed = request.num_computed + chunk
            if row >= num_decodes and request.num_preemptions:
                self._count_recomputed(request, computed - chunk)
            if publishing and computed // size > request.num_published:
                self._publish(request)
            if sampled:
                token = token_ids[sample - 1]
                request.token_ids.append(token)
                verdict = finish_reason(request, token, self.eos_token_ids, self.max_model_len)
                events.append(
                    TokenEvent(
                        request, token, logprobs[sample - 1] if logprobs else None, verdict is not None
                    )
                )
                if verdict is not None:
                    self._finish(request, verdict[0], ended, stop_token=verdict[1])
                    continue
            if row >= num_decodes and self._is_decode(request):
                self._running.promote(request)
        if ended:
            self._running.remove_decodes(ended)
        return events

    def rollback(self, step: Step) -> None:
        """A step failed as a whole: as if it had not been scheduled. Steps in flight are rolled back newest first.

        Requests that it admitted are queued again. Who was preempted to make room stays preempted: the memory is
        gone, and recomputation gives the same tokens.
        """
        if not step.requests:
            return
        stale = self._in_flight.pop_newest(step)
        for row, request in enumerate(step.requests):
            if row not in stale:
                request.num_in_flight -= step.chunk[row]
                if request in step.admitted:
                    self._take_back(request)

    def drain_events(self) -> list[TokenEvent]:
        """Requests that ended outside a step's result since the last call (out of memory alone); each has an error."""
        events, self._events = self._events, []
        return events

    @staticmethod
    def _is_decode(request: Request) -> bool:
        # The whole sequence counts, not the original prompt: after a preemption the outputs are recomputed as well.
        computed = request.num_computed
        return len(request.token_ids) - computed == 1 and computed >= request.num_prompt_tokens

    def _count_recomputed(self, request: Request, before: int) -> None:
        again = min(self._high_water.get(request.id, 0), request.num_computed) - before
        self._counters.recomputed_tokens += max(0, again)

    def _publish(self, request: Request) -> None:
        self._cache.publish(request)
        if request.group is not None:
            for sibling in self._groups.published(request, self._num_shared_blocks(request)):
                self._enqueue(sibling)

    # ---- ends ----------------------------------------------------------------------------------------------------

    def _fail(self, request: Request, error: str) -> None:
        request.error = error
        self._end(request, FinishReason.ERROR)
        self._events.append(TokenEvent(request, None, finished=True))

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        ended: set[str],
        *,
        stop_token: int | None = None,
        error: str | None = None,
    ) -> None:
        """End a request within `commit`. Decodes are only noted in `ended`: they leave the list all at once."""
        request.stop_token, request.error = stop_token, error
        if request in self._running.prefills:
            self._end(request, reason)
        else:
            ended.add(request.id)
            self._release(request)
            self._close(request, reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.state is RequestState.RUNNING:
            self._leave_running(request)
        elif request in self._queue:
            self._queue.remove(request)
        self._close(request, reason)

    def _close(self, request: Request, reason: FinishReason) -> None:
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        del self._requests[request.id]
        self._high_water.pop(request.id, None)
        if request.group is not None:
            for sibling in self._groups.leave(request):
                self._enqueue(sibling)

    def _leave_running(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        """Give a request's KV back. Its block table is a new list: a step in flight may still show the old one.

        Blocks may be handed out at once although a step in flight still writes them: steps execute in order.
        """
        self._in_flight.drop(request)
        self._pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed = request.num_published = 0

    def _enqueue(self, request: Request) -> None:
        request.rank = self._policy.waiting_rank(request)
        self._queue.push(request)

    def _num_shared_blocks(self, request: Request) -> int:
        """Leading blocks that siblings can share: what a look-up of the prompt can hit at most."""
        return (request.num_prompt_tokens - 1) // self._block_size if self._cache.readable(request) else 0

    def _too_large(self, request: Request) -> str:
        return (
            f"out of KV memory: {len(request.token_ids)} tokens do not fit into the pool of "
            f"{self._pool.num_blocks * self._block_size}, although nothing else runs"
        )

    # ---- what others may see -------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is alive or any event is still to be drained."""
        return bool(self._requests) or bool(self._events)

    @property
    def stats(self) -> SchedulerStats:
        """A snapshot of gauges and cumulative counters."""
        counters, queue, groups = self._counters, self._queue, self._groups
        arrivals = [r.arrival_s for r in groups.held_back()] if groups.num_held_back else []
        oldest = queue.oldest_arrival_s()
        if oldest is not None:
            arrivals.append(oldest)
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(queue) + groups.num_held_back,
            waiting_capacity=len(queue) if self._blocked not in (None, "budget") else 0,
            waiting_deferred=groups.num_held_back,
            oldest_waiting_arrival_s=min(arrivals, default=None),
            kv_used_fraction=1 - self._pool.num_free / self._pool.num_blocks,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            readmission_queries=counters.readmission_queries,
            readmission_hits=counters.readmission_hits,
            preemptions_recompute=counters.preemptions_recompute,
            preemptions_swap=counters.preemptions_swap,
            displacements=counters.displacements,
            recomputed_tokens=counters.recomputed_tokens,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken. Costs a walk over everything: for tests and idle times."""
        check_integrity(
            requests=self._requests,
            running=self._running,
            queue=self._queue,
            groups=self._groups,
            in_flight=self._in_flight,
            pool=self._pool,
            block_size=self._block_size,
        )


def _check_live(live: LiveConfig) -> None:
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        if getattr(live, name) < 1:
            raise ConfigError(f"config.{name}", getattr(live, name), "an integer of at least 1")
