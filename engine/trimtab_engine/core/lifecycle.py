"""Every change of a request's state, and all that moves with it: queue, running set, KV blocks, steps in flight, counters.

Used by `core.scheduler`, which decides; this carries out. One method is one legal transition:

    enter      (new) → WAITING, queued or held back for a sibling's prefix
    admit      WAITING, PREEMPTED, SWAPPED → RUNNING
    take_back  RUNNING → where it was before `admit`, when nothing was computed
    preempt    RUNNING → PREEMPTED or SWAPPED, queued again
    lose_swap  SWAPPED → PREEMPTED, where it is queued
    close      any → FINISHED
"""

from __future__ import annotations

from trimtab_engine.core.admission import Need, num_blocks_for
from trimtab_engine.core.blocks import BlockPool
from trimtab_engine.core.fairness import OUTPUT_WEIGHT, PROMPT_WEIGHT, FairQueue
from trimtab_engine.core.in_flight import StepsInFlight
from trimtab_engine.core.policy import Policy
from trimtab_engine.core.policy_sla import next_standing
from trimtab_engine.core.prefix import PrefixCache
from trimtab_engine.core.request import FinishReason, Request, RequestState
from trimtab_engine.core.running import RunningSet
from trimtab_engine.core.standings import Standings
from trimtab_engine.core.stats import Counters
from trimtab_engine.core.swap import SwapSpace
from trimtab_engine.core.waiting import SiblingGroups, WaitingQueue


class Lifecycle:
    """All live requests and where they stand."""

    __slots__ = (
        "_high_water",
        "_next_admission",
        "_next_sequence",
        "block_size",
        "cache",
        "counters",
        "fair",
        "groups",
        "in_flight",
        "policy",
        "pool",
        "queue",
        "requests",
        "running",
        "standings",
        "swap",
    )

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        policy: Policy,
        fair_tenants: bool = False,
        num_swap_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.policy = policy
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, block_size, enable_prefix_caching)
        self.requests: dict[str, Request] = {}
        self.running = RunningSet()
        self.fair = FairQueue() if fair_tenants else None
        self.queue: WaitingQueue | FairQueue = WaitingQueue() if self.fair is None else self.fair
        self.groups = SiblingGroups()
        self.standings = Standings()
        self.in_flight = StepsInFlight()
        self.swap = SwapSpace(num_swap_blocks)
        self.counters = Counters()
        self._next_sequence = 0
        self._next_admission = 0
        # KV that preempted requests lost: tokens computed again below this count as recomputed.
        self._high_water: dict[str, int] = {}

    def enter(self, request: Request) -> None:
        """Take a new request in."""
        request.sequence = self._next_sequence
        self._next_sequence += 1
        self.requests[request.id] = request
        if request.group is not None and self._num_shared_blocks(request) > 0 and self.groups.join(request):
            return
        self._enqueue(request)

    def admit(self, request: Request, need: Need, chunk: int, now: float) -> None:
        """Carry out a plan that fits: blocks for the hits and the first chunk, counters once.

        Hits are held before new blocks are taken, which could otherwise evict them. What hits do not cover of a swapped
        request comes back from CPU memory.
        """
        first = request.num_cached is None
        self._count_lookup(request, need.num_hit_tokens, first, 1)
        if first:
            request.num_cached = need.num_hit_tokens
            request.first_scheduled_s = now
            if self.fair is not None:
                self.fair.charge(
                    request.tenant, PROMPT_WEIGHT * (request.num_prompt_tokens - need.num_hit_tokens)
                )
        self.queue.remove(request)
        self.pool.hold(need.hits)
        computed = max(need.num_hit_tokens, request.num_swapped)
        reach = num_blocks_for(computed + chunk, self.block_size)
        request.block_ids = need.hits + self.pool.allocate(reach - len(need.hits))
        if request.swap_ids:
            self.swap.copy_in(request.swap_ids, request.block_ids, len(need.hits))
            request.swap_ids, request.num_swapped = [], 0
        request.num_computed = computed
        request.num_published = len(need.hits)
        request.state = RequestState.RUNNING
        self._next_admission += 1
        request.admission = self._next_admission
        request.rank = self.policy.running_rank(request)
        self.running.admit(request)

    def take_back(self, request: Request) -> None:
        """Undo an admission of which nothing was computed: the request is queued as if it had not been tried."""
        first = request.num_preemptions == 0
        self._count_lookup(request, request.num_published * self.block_size, first, -1)
        charged = PROMPT_WEIGHT * (request.num_prompt_tokens - request.num_computed) if first else 0
        if first:
            request.num_cached = request.first_scheduled_s = None
        if not first:
            self._note_lost(request, request.num_computed)
        self._leave_running(request)
        request.state = RequestState.WAITING if first else RequestState.PREEMPTED
        self._enqueue(request)
        if self.fair is not None:
            self.fair.charge(request.tenant, -charged)

    def preempt(self, request: Request, swap: bool = False) -> None:
        """Take a running request's KV, to CPU memory with `swap`, and queue it. Its tokens, outputs included, stay."""
        if swap:
            self.counters.preemptions_swap += 1
            used = num_blocks_for(request.num_computed, self.block_size)
            request.swap_ids = self.swap.copy_out(request.block_ids[:used])
            request.num_swapped = request.num_computed
        else:
            self.counters.preemptions_recompute += 1
            self._note_lost(request, request.num_computed)
        self._leave_running(request)
        request.num_preemptions += 1
        request.state = RequestState.SWAPPED if swap else RequestState.PREEMPTED
        self._enqueue(request)

    def lose_swap(self, request: Request) -> None:
        """What CPU memory holds of the request cannot be trusted: it will be computed again."""
        self._note_lost(request, request.num_swapped)
        self.swap.discard(request.swap_ids)
        request.swap_ids, request.num_swapped = [], 0
        request.state = RequestState.PREEMPTED

    def _note_lost(self, request: Request, num_tokens: int) -> None:
        self._high_water[request.id] = max(self._high_water.get(request.id, 0), num_tokens)

    def trim(self, request: Request) -> None:
        """Give back the blocks of a running request that lie beyond what is computed or in flight."""
        reach = num_blocks_for(request.num_computed + request.num_in_flight, self.block_size)
        self.pool.release(request.block_ids[reach:])
        request.block_ids = request.block_ids[:reach]

    def end(self, request: Request, reason: FinishReason) -> None:
        """Finish a request wherever it stands."""
        if request.state is RequestState.RUNNING:
            self._leave_running(request)
        elif request in self.queue:
            self.queue.remove(request)
        self._close(request, reason)

    def end_decode(self, request: Request, reason: FinishReason) -> None:
        """The same for a decode whose removal from `running.decodes` the caller does, for many at once."""
        self._release(request)
        self._close(request, reason)

    def publish(self, request: Request) -> None:
        """Make the request's computed full blocks findable; siblings that waited for them are queued."""
        self.cache.publish(request)
        if request.group is not None:
            for sibling in self.groups.published(request, self._num_shared_blocks(request)):
                self._enqueue(sibling)

    def count_recomputed(self, request: Request, before: int) -> None:
        """Tokens [before, num_computed) were computed; count those that had been computed before a preemption."""
        again = min(self._high_water.get(request.id, 0), request.num_computed) - before
        self.counters.recomputed_tokens += max(0, again)

    def charge_output(self, request: Request, tokens: int = 1) -> None:
        """The request got tokens."""
        if self.fair is not None:
            self.fair.charge(request.tenant, OUTPUT_WEIGHT * tokens)

    def rerank(self, policy: Policy) -> None:
        """A new policy: new ranks for everybody, in place."""
        self.policy = policy
        self.queue.rerank(policy.waiting_rank)
        self.running.rerank(policy.running_rank)
        self.standings.clear()
        if policy.has_deadlines:
            for request in (*self.queue, *self.running):
                self.standings.watch(request)

    def move(self, request: Request) -> None:
        """Change the standing of a request without a first token, where it is."""
        request.standing = next_standing(request.standing)
        request.rank = self.policy.waiting_rank(request)
        if request.state is RequestState.RUNNING:
            self.running.sort()
        elif request in self.queue:
            self.queue.push(request)
        self.standings.watch(request)

    def _enqueue(self, request: Request) -> None:
        request.rank = self.policy.waiting_rank(request)
        self.queue.push(request)
        if self.policy.has_deadlines:
            self.standings.watch(request)

    def _close(self, request: Request, reason: FinishReason) -> None:
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        del self.requests[request.id]
        self._high_water.pop(request.id, None)
        if request.swap_ids:
            self.swap.discard(request.swap_ids)
            request.swap_ids, request.num_swapped = [], 0
        if request.group is not None:
            for sibling in self.groups.leave(request):
                self._enqueue(sibling)

    def _leave_running(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        """Give a request's KV back. Its block table becomes a new list: a step in flight may still show the old one.

        Blocks may be handed out at once although a step in flight still writes them: steps execute in order.
        """
        self.in_flight.drop(request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed = request.num_published = 0

    def _num_shared_blocks(self, request: Request) -> int:
        """Leading blocks that siblings can share: what a look-up of the prompt can hit at most."""
        return (request.num_prompt_tokens - 1) // self.block_size if self.cache.readable(request) else 0

    def _count_lookup(self, request: Request, num_hit_tokens: int, first: bool, sign: int) -> None:
        """Once per admission that succeeded; readmissions apart, as they hit what the request itself left behind."""
        if not self.cache.readable(request):
            return
        counters, num_tokens = self.counters, len(request.token_ids)
        if first:
            counters.prefix_queries += sign * num_tokens
            counters.prefix_hits += sign * num_hit_tokens
        else:
            counters.readmission_queries += sign * num_tokens
            counters.readmission_hits += sign * num_hit_tokens
