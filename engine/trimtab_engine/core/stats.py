"""Numbers that the scheduler keeps about itself: cumulative counters, and a snapshot for whoever asks.

Read by the engine loop (metrics), the simulator and tests. Counters only grow, but for a step rolled back as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass


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
