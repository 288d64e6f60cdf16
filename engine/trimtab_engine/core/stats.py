"""Numbers that the scheduler keeps about itself: cumulative counters, and a snapshot for whoever asks.

Read by the engine loop (metrics), the simulator and tests. Counters only grow, but for a step rolled back as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab_engine.core.lifecycle import Lifecycle


@dataclass(slots=True)
class Counters:
    """Cumulative over the scheduler's life. Tokens unless the name says otherwise."""

    prefix_queries: int = 0  # looked up at first admissions; a failed attempt counts nothing
    prefix_hits: int = 0  # of those, found
    readmission_queries: int = (
        0  # the same for preempted requests, kept apart: they would inflate the hit rate
    )
    readmission_hits: int = 0
    preemptions_recompute: int = 0  # events
    preemptions_swap: int = 0  # events
    displacements: int = 0  # events: of the preemptions, those made for a more important waiting request
    recomputed_tokens: int = 0  # computed again after their KV was dropped
    shed: int = 0  # events: requests ended because their first token could no longer be in time
    priorities_ignored: int = 0  # events: requests with a priority added under a policy that has none


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The scheduler right now."""

    num_running: int
    num_waiting: int  # queued, preempted and held back
    waiting_capacity: int  # of those: held back by memory or max_num_seqs in the latest step
    waiting_deferred: int  # of those: siblings that wait for a shared prefix
    oldest_waiting_arrival_s: float | None
    kv_used_fraction: float  # 1 - free/total; cached but unreferenced blocks count as free
    prefix_queries: int
    prefix_hits: int
    readmission_queries: int
    readmission_hits: int
    preemptions_recompute: int
    preemptions_swap: int
    displacements: int
    recomputed_tokens: int
    shed: int
    priorities_ignored: int


def snapshot(state: Lifecycle, held_back_by_capacity: bool) -> SchedulerStats:
    """Gauges and counters now; the flag tells whether memory or max_num_seqs stopped the latest admissions."""
    counters, queue, groups = state.counters, state.queue, state.groups
    arrivals = [r.arrival_s for r in groups.held_back()] if groups.num_held_back else []
    oldest = queue.oldest_arrival_s()
    if oldest is not None:
        arrivals.append(oldest)
    return SchedulerStats(
        num_running=len(state.running),
        num_waiting=len(queue) + groups.num_held_back,
        waiting_capacity=len(queue) if held_back_by_capacity else 0,
        waiting_deferred=groups.num_held_back,
        oldest_waiting_arrival_s=min(arrivals, default=None),
        kv_used_fraction=1 - state.pool.num_free / state.pool.num_blocks,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
        readmission_queries=counters.readmission_queries,
        readmission_hits=counters.readmission_hits,
        preemptions_recompute=counters.preemptions_recompute,
        preemptions_swap=counters.preemptions_swap,
        displacements=counters.displacements,
        recomputed_tokens=counters.recomputed_tokens,
        shed=counters.shed,
        priorities_ignored=counters.priorities_ignored,
    )
