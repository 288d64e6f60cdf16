"""Everything that may happen to requests between two steps: leases that lapse, new configs, requests thrown out of memory.

Drives the engine's own message handling (`EngineState`) over a scheduler that a test steps by itself.
"""

from __future__ import annotations

from trimtab_engine.core.admission import num_blocks_for
from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_engine.core.scheduler import Scheduler
from trimtab_engine.engine_state import EngineState
from trimtab_engine.live_state import LiveState, Versioned
from trimtab_engine.messages import Reconfigure


class Disturber:
    """Counts what it did, so that a test can tell that it disturbed at all."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        incumbent = Versioned(scheduler.generation, "Spec", scheduler.live)
        self.state = EngineState(scheduler, LiveState(incumbent, Ceilings(4096, 256)), 0.0)
        self.num_lapsed = self.num_swapped = self.num_recomputed = 0
        self._generation = scheduler.generation

    def lapse(self, now: float) -> None:
        """What the engine loop does before each step."""
        self.num_lapsed += self.state.expire(now) is not None

    def push(self, live: LiveConfig, lease_s: float | None, now: float) -> None:
        """A new incumbent, or with a lease a candidate, under the next number."""
        self._generation += 1
        answer = self.state.apply(
            Reconfigure(0, self._generation, "Recommendation", live.to_json(), lease_s), now
        )
        assert answer is not None
        assert answer.error is None, answer.error
        assert self.scheduler.live == live

    def throw_out(self, number: int, swap: bool, *, gently: bool = False) -> None:
        """Take a running request's memory, to CPU memory if asked and possible; else it will be computed again.

        `gently`: not if it would have to be; thrown out so again and again it would never get to an end.
        """
        running = list(self.scheduler._state.running)
        if not running:
            return
        victim = running[number % len(running)]
        used = num_blocks_for(victim.num_computed, self.scheduler._block_size)
        swap = swap and 0 < used <= self.scheduler._state.swap.num_free
        if gently and not swap:
            return
        self.num_swapped += swap
        self.num_recomputed += not swap
        self.scheduler._state.preempt(victim, swap=swap)
        self.scheduler.check_integrity()
