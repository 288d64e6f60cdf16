"""The scheduler: which tokens of which requests the next engine step computes.

Driven by the engine loop and by the simulator: `schedule(now)` → a runner executes the step → `commit(step, result,
now)`. Knows no clock, device or text; `now` is the caller's monotonic seconds.

There are no prefill and decode modes: every request catches its computed tokens up to its tokens. A step's budget is
spent in three passes, so that a long prompt never takes a decode's token:

    A  running decodes, one token each
    B  running prompts, in chunks
    C  waiting requests, if nothing was preempted in this step

Under a policy with deadlines B and C are merged by rank, so that a prompt that is still to be saved does not wait for a
long one under way, and the step-time model bounds how much prompt a step holds.

`prefill_first` is the baseline that the passes are measured against: C, B, A, and no chunking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from trimtab_engine.core import policy as policies
from trimtab_engine.core import skip_ahead, swap
from trimtab_engine.core.admission import (
    WATERMARK,
    check_fits,
    num_blocks_for,
    outstanding_blocks,
    whole_sequence_need,
)
from trimtab_engine.core.deadlines import Deadlines
from trimtab_engine.core.integrity import check_integrity
from trimtab_engine.core.lifecycle import Lifecycle
from trimtab_engine.core.live import LiveConfig
from trimtab_engine.core.request import FinishReason, Request, RequestState
from trimtab_engine.core.stats import SchedulerStats, snapshot
from trimtab_engine.core.step import Step, StepResult, TokenEvent
from trimtab_engine.core.step_builder import Blocked, BlockedHead, StepBuilder
from trimtab_engine.core.step_time import StepTimeModel
from trimtab_engine.core.stop_rules import finish_reason
from trimtab_engine.errors import ConfigError, RequestError

# For how many steps the memory that a blocked request needs is remembered instead of looked up again. It can only fall
# when somebody else computes the same prefix; looking up 2,000 cached blocks takes 0.7 ms.
NEED_REMEMBERED_STEPS = 16
# A displacement costs the victim a recomputation; one in so many steps bounds what a stream of important requests costs.
DISPLACEMENT_INTERVAL_STEPS = 8


class Scheduler:
    """Owns every request from `add` to its end. Not thread-safe: one thread makes all calls."""

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
        shed_late: bool = False,
        fair_tenants: bool = False,
        num_swap_blocks: int = 0,
        swap_block_s: float = 0.0,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
    ) -> None:
        """`num_blocks` counts usable KV blocks (ids 1..num_blocks); `seed` draws the seeds of requests without one.

        `num_swap_blocks`: room for preempted requests' blocks in CPU memory; copying one takes `swap_block_s`.
        """
        _check_live(live)
        self.max_model_len = max_model_len
        self.prefill_first = prefill_first
        self.eos_token_ids = eos_token_ids
        self.live = live
        self.generation = generation
        self._victims: list[Request] | None = None  # by laxity, the largest last; None: to be computed
        self._policy = policies.policy_of(live)
        self._state = Lifecycle(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            policy=self._policy,
            fair_tenants=fair_tenants,
            num_swap_blocks=num_swap_blocks,
        )
        self._swap_block_s = swap_block_s
        self._deadlines = Deadlines(self._state, live, shed_late)
        self._block_size = block_size
        self._watermark = int(num_blocks * WATERMARK)
        self._events: list[TokenEvent] = []
        self._random = Random(seed)
        self._next_step_id = 0
        self._now = float("-inf")
        # Of the latest step: why pass C stopped, and at whom.
        self._blocked: Blocked | None = None
        self._blocked_head: BlockedHead | None = None
        self._next_displacement_step_id = 0
        self._first_decode = 0  # where pass A begins when the budget is smaller than the decodes

    # ---- messages, applied between steps -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request. RequestTooLarge or RequestError, and nothing changed, when it can never run."""
        state = self._state
        if request.id in state.requests:
            raise RequestError(
                f"request id {request.id!r} is in use; ids are unique among live requests", "id"
            )
        check_fits(
            request,
            num_blocks=state.pool.num_blocks,
            block_size=self._block_size,
            max_model_len=self.max_model_len,
        )
        if request.sampling.seed is None:
            # Drawn once here, so that neither preemption nor batch mates change what the request says.
            request.sampling = replace(request.sampling, seed=self._random.getrandbits(63))
        self._deadlines.fix(request, look_up=self._policy.has_deadlines)
        if request.priority != 0 and not self._policy.uses_priority:
            state.counters.priorities_ignored += 1
        state.enter(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it stands; None when it is unknown or has ended. A result in flight is dropped."""
        request = self._state.requests.get(request_id)
        if request is not None:
            self._state.end(request, FinishReason.ABORT)
        return request

    def reconfigure(self, live: LiveConfig, generation: int) -> None:
        """Take a new live config for the next step. ConfigError, and nothing changed, for one that cannot work.

        Running requests keep their place: what was lowered is reached by draining. A new policy or aging reorders the
        waiting ones and decides who is preempted from now on.
        """
        policy = policies.policy_of(live)
        _check_live(live)
        self.live, self.generation = live, generation
        self._deadlines.reconfigure(live)
        if policy != self._policy:
            self._policy = policy
            self._state.rerank(policy)
            self._blocked_head = None

    def use_step_time(self, model: StepTimeModel) -> None:
        """Predict steps by this model from now on, between steps."""
        self._deadlines.use_step_time(model)

    # ---- one step ------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Step:
        """Plan the next step; falsy when nothing can run before a commit or a new request.

        May be called again before the commit: tokens in flight count as computed, so running prompts go on, and a
        request whose sampled token is in flight sits the step out.
        """
        now = self._now = max(now, self._now)  # a clock that goes back must not make negative times
        self._victims = None
        if self._policy.has_deadlines:
            self._events += self._deadlines.move_standings(now)
        builder = StepBuilder(self.live.max_num_batched_tokens)
        self._displace(builder)
        self._run_passes(builder, now)
        if builder.is_empty and builder.preempted and not self._state.in_flight:
            # The only running request gave way to a waiting one. An empty step would be a step lost.
            displaced, builder = builder.preempted, StepBuilder(self.live.max_num_batched_tokens)
            self._run_passes(builder, now)
            builder.preempted[:0] = displaced
        step = builder.build(self._next_step_id, self.generation, self.live.max_num_batched_tokens, now)
        self._next_step_id += 1
        if step:
            step.swap_out, step.swap_in = self._state.swap.take()
            self._state.in_flight.push(step)
        return step

    def _run_passes(self, builder: StepBuilder, now: float) -> None:
        if self.prefill_first:
            self._pass_waiting(builder, now)
            self._pass_prefills(builder)
            self._pass_decodes(builder)
        elif self._policy.has_deadlines:
            self._pass_decodes(builder)
            self._pass_prompts(builder, now)
        else:
            self._pass_decodes(builder)
            self._pass_prefills(builder)
            self._pass_waiting(builder, now)

    def _pass_decodes(self, builder: StepBuilder) -> None:
        """Pass A. A row costs about 0.15 µs, hence the local names and the budget charged in lots."""
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

        When the budget does not reach for all (while a lowered limit drains, and under `prefill_first`), the policy
        decides who goes first; a policy without classes lets them take turns.
        """
        decodes = self._state.running.decodes
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
        for request in self._state.running.prefills[:]:
            if builder.budget <= 0:
                break
            self._continue_prompt(request, builder)

    def _continue_prompt(self, request: Request, builder: StepBuilder) -> None:
        if request.state is not RequestState.RUNNING:
            return
        context = request.num_computed + request.num_in_flight
        need = len(request.token_ids) - context
        if need == 0:
            return  # all in flight, or admitted by pass C of this step
        chunk = self._chunk(need, context, builder)
        if chunk and self._grow(request, context + chunk, builder):
            builder.add_prefill(request, context, chunk)

    def _pass_prompts(self, builder: StepBuilder, now: float) -> None:
        """Passes B and C merged: before each running prompt those that outrank it, or are quick, are admitted."""
        self._blocked = None
        if not self._state.running.prefills and self._state.queue.peek() is None:
            return  # decodes alone need no limit
        self._deadlines.limit(builder, now)
        for request in self._state.running.prefills[:]:
            if not self._blocked:
                self._pass_waiting(builder, now, before=request)
            if builder.budget <= 0 or builder.cut_short:
                break
            self._continue_prompt(request, builder)
        if not self._blocked:
            self._pass_waiting(builder, now)

    def _pass_waiting(self, builder: StepBuilder, now: float, before: Request | None = None) -> None:
        """Pass C. The first that cannot be admitted ends the pass: passing it over would starve large prompts.

        With `before`, only those that go before that running prompt.
        """
        state = self._state
        self._blocked = "preempted" if builder.preempted else None
        promised = -1
        while not self._blocked and (head := state.queue.peek()) is not None:
            if before is not None and not self._deadlines.goes_before(head, before, builder):
                return
            num_running = len(state.running)
            if num_running >= self.live.max_num_seqs:
                self._block("max_num_seqs", head)
                return
            if builder.budget <= 0 or builder.cut_short:
                self._block("budget", head)
                return
            if promised < 0:
                promised = self._promised_blocks()
            available = state.pool.num_free - promised - (self._watermark if num_running else 0)
            if num_running and self._known_to_be_short(head, available):
                self._blocked = "memory"
                return
            need = whole_sequence_need(head, state.pool, state.cache)
            if need.num_free_needed > available:
                if num_running == 0:
                    # All blocks are free and it still does not fit: nothing that could happen would help.
                    self._fail(head)
                    continue
                self._block("memory", head, need.num_free_needed, available)
                return
            computed = max(need.num_hit_tokens, head.num_swapped)
            chunk = self._chunk(len(head.token_ids) - computed, computed, builder)
            if chunk == 0:
                self._block("budget", head)
                return
            state.admit(head, need, chunk, now)
            builder.add_prefill(head, computed, chunk)
            builder.admitted.append(head)
            promised += need.num_new_blocks - (len(head.block_ids) - len(need.hits))

    def _block(self, reason: Blocked, head: Request, needed: int = 0, available: int = 0) -> None:
        self._blocked = reason
        expires = self._next_step_id + NEED_REMEMBERED_STEPS if reason == "memory" else 0
        self._blocked_head = BlockedHead(head, needed, available, expires)

    def _known_to_be_short(self, head: Request, available: int) -> bool:
        """Whether the latest look-up for this request still tells that it does not fit; notes what is available now."""
        known = self._blocked_head
        if known is None or known.request is not head or self._next_step_id >= known.expires_step_id:
            return False
        known.available = available
        return known.needed > available

    def _promised_blocks(self) -> int:
        """Free blocks that are spoken for: by half-computed prompts, and by decodes when they run after pass C."""
        running, size = self._state.running, self._block_size
        promised = outstanding_blocks(running.prefills, size)
        if self.prefill_first:
            promised += sum(
                1 for r in running.decodes if r.num_computed + r.num_in_flight >= len(r.block_ids) * size
            )
        return promised

    def _chunk(self, need: int, context: int, builder: StepBuilder) -> int:
        if self.prefill_first:
            return policies.whole_prefill(need, builder.budget, builder.is_empty)
        most = policies.prefill_chunk(need, builder.budget, self.live.long_prefill_token_threshold)
        return most if builder.rows is None else self._deadlines.chunk(need, context, most, builder)

    # ---- memory --------------------------------------------------------------------------------------------------

    def _grow(self, request: Request, reach: int, builder: StepBuilder) -> bool:
        """Give a running request blocks up to `reach` tokens; False when it had to give way itself."""
        state = self._state
        missing = num_blocks_for(reach, self._block_size) - len(request.block_ids)
        if missing <= 0:
            return True
        while missing > state.pool.num_free:
            victim = self._next_victim()
            if victim is not request:
                self._preempt(victim, builder)
            elif len(state.running) > 1:
                self._preempt(request, builder)
                return False
            else:
                self._fail(request)
                return False
        request.block_ids += state.pool.allocate(missing)
        return True

    def _next_victim(self) -> Request:
        """Who gives way: by the policy's order, or by laxity, computed once a step as nothing of it changes within one."""
        running = self._state.running
        if not self._policy.has_deadlines:
            return policies.choose_victim(running)
        if self._victims is None:
            self._victims = self._deadlines.by_laxity(running)
        while self._victims[-1].state is not RequestState.RUNNING:
            self._victims.pop()
        return self._victims[-1]

    def _preempt(self, victim: Request, builder: StepBuilder) -> None:
        """Take a running request's memory, and its row of this step if it has one."""
        assert victim not in builder.admitted, "admission counts what the passes after it will need"
        builder.withdraw(victim)
        builder.preempted.append(victim)
        self._state.preempt(victim, swap=self._can_swap(victim))

    def _can_swap(self, victim: Request) -> bool:
        """Whether its KV goes to CPU memory: there is some, none of it is being written, there is room, and it pays."""
        used = num_blocks_for(victim.num_computed, self._block_size)
        if used == 0 or victim.num_in_flight or used > self._state.swap.num_free:
            return False
        return swap.pays(used, self._swap_block_s, self._deadlines.recompute_s(victim.num_computed))

    def _displace(self, builder: StepBuilder) -> None:
        """Give a running request's place to a more important waiting one that the latest step could not admit.

        At most one in `DISPLACEMENT_INTERVAL_STEPS`, only by the strict rule of `policy.may_displace`, only when it can
        help, and never to reach a lowered `max_num_seqs`, which drains.
        """
        known, state = self._blocked_head, self._state
        if not self._policy.displaces or known is None or known.request is not state.queue.peek():
            return
        if self._next_step_id < self._next_displacement_step_id:
            return
        head, priority = known.request, known.request.priority
        weaker = [r for r in state.running if r.priority > priority and policies.may_displace(head, r)]
        if not weaker:
            return
        if self._blocked == "max_num_seqs":
            helps = len(state.running) <= self.live.max_num_seqs
        else:
            helps = self._blocked == "memory" and self._would_free(weaker, known.needed - known.available)
        if helps:
            state.counters.displacements += 1
            self._next_displacement_step_id = self._next_step_id + DISPLACEMENT_INTERVAL_STEPS
            self._preempt(policies.choose_victim(weaker), builder)

    def _would_free(self, requests: list[Request], num_blocks: int) -> bool:
        """Whether preempting all of `requests` frees that many blocks; shared ones do not count."""
        if sum(len(request.block_ids) for request in requests) < num_blocks:
            return False  # the usual no, without a walk over the whole pool
        freed, references = 0, self._state.pool.references
        for request in requests:
            freed += sum(1 for block in request.block_ids if references(block) == 1)
            if freed >= num_blocks:
                return True
        return False

    def _fail(self, request: Request) -> None:
        """End a request that is alone and still does not fit. The engine goes on."""
        request.error = (
            f"out of KV memory: {len(request.token_ids)} tokens do not fit into the pool of "
            f"{self._state.pool.num_blocks * self._block_size}, although nothing else runs"
        )
        self._state.end(request, FinishReason.ERROR)
        self._events.append(TokenEvent(request, None, finished=True))

    # ---- results -------------------------------------------------------------------------------------------------

    def commit(self, step: Step, result: StepResult, now: float) -> list[TokenEvent]:
        """Take a step's result: KV counts as computed, full blocks become findable, tokens are appended and judged.

        Rows of requests that were aborted or preempted meanwhile are dropped. Steps are committed in order, once.
        """
        if not step.requests:
            return []
        state = self._state
        state.in_flight.check_oldest(step)
        if len(result.token_ids) != len(step.samples):
            raise ValueError(f"{len(result.token_ids)} tokens came back for {len(step.samples)} sampled rows")
        self._now = max(now, self._now)
        stale = state.in_flight.pop_oldest()
        events: list[TokenEvent] = []
        ended: set[str] = set()
        size, publishing, charging = self._block_size, state.cache.enabled, state.fair is not None
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
                request.error = failed[row]
                self._finish(request, FinishReason.ERROR, ended)
                events.append(TokenEvent(request, None, finished=True))
                continue
            computed = request.num_computed = request.num_computed + chunk
            if row >= num_decodes and request.num_preemptions:
                state.count_recomputed(request, computed - chunk)
            if publishing and computed // size > request.num_published:
                state.publish(request)
            if sampled:
                token = token_ids[sample - 1]
                request.token_ids.append(token)
                request.last_token_s = now
                if charging:
                    state.charge_output(request)
                verdict = finish_reason(request, token, self.eos_token_ids, self.max_model_len)
                about = logprobs[sample - 1] if logprobs else None
                events.append(TokenEvent(request, token, about, verdict is not None))
                if verdict is not None:
                    request.stop_token = verdict[1]
                    self._finish(request, verdict[0], ended)
                    continue
            if row >= num_decodes and _is_decode(request):
                state.running.promote(request)
        if ended:
            state.running.remove_decodes(ended)
        return events

    def _finish(self, request: Request, reason: FinishReason, ended: set[str]) -> None:
        """End a request within `commit`. Decodes are only noted in `ended`: they leave the list all at once."""
        if request in self._state.running.prefills:
            self._state.end(request, reason)
        else:
            ended.add(request.id)
            self._state.end_decode(request, reason)

    def rollback(self, step: Step) -> None:
        """A step failed as a whole: as if it had not been scheduled. Steps in flight are rolled back newest first.

        Requests that it admitted are queued again. Who was preempted to make room stays preempted: the memory is
        gone, and recomputation gives the same tokens.
        """
        if not step.requests:
            return
        stale = self._state.in_flight.pop_newest(step)
        if step.swap_out:  # whether the copies were made is not known
            places = {place for _, place in step.swap_out}
            for request in [*self._state.queue]:
                if not places.isdisjoint(request.swap_ids):
                    self._state.lose_swap(request)
        for row, request in enumerate(step.requests):
            if row in stale:
                continue
            request.num_in_flight -= step.chunk[row]
            if request in step.admitted:
                self._state.take_back(request)
            else:
                self._state.trim(request)

    def drain_events(self) -> list[TokenEvent]:
        """Requests that ended outside a step's result since the last call (out of memory alone); each has an error."""
        events, self._events = self._events, []
        return events

    # ---- many steps at once, for the simulator -------------------------------------------------------------------

    @property
    def steady_steps(self) -> int:
        """How many of the next steps are certain to be one token for each running decode, with nobody ending."""
        return skip_ahead.steady_steps(self._state, self.live.max_num_batched_tokens, self.max_model_len)

    @property
    def running_decodes(self) -> list[Request]:
        """The requests that decode, in row order; a copy."""
        return self._state.running.decodes[:]

    def skip_decodes(self, token_of: Callable[[Request], int], ends_s: list[float]) -> int:
        """Do steps at once, at most `steady_steps`, as schedule and commit one by one would; returns how many.

        Step i is committed at `ends_s[i]`; every new token of a request is `token_of(request)`. Stops early when memory
        runs short.
        """
        done = skip_ahead.run_decodes(self._state, token_of, ends_s)
        if done:
            self._blocked = None
            self._next_step_id += done
            self._now = max(self._now, ends_s[done - 1])
        return done

    # ---- what others may see -------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is alive or any event is still to be drained."""
        return bool(self._state.requests) or bool(self._events)

    @property
    def stats(self) -> SchedulerStats:
        """A snapshot of gauges and cumulative counters."""
        held_back_by_capacity = self._blocked not in (None, "budget")
        return snapshot(self._state, held_back_by_capacity)

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken. Costs a walk over everything: for tests and idle times."""
        check_integrity(self._state)


def _is_decode(request: Request) -> bool:
    # The whole sequence counts, not the original prompt: after a preemption the outputs are recomputed as well.
    computed = request.num_computed
    return len(request.token_ids) - computed == 1 and computed >= request.num_prompt_tokens


def _check_live(live: LiveConfig) -> None:
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        if getattr(live, name) < 1:
            raise ConfigError(f"config.{name}", getattr(live, name), "an integer of at least 1")
