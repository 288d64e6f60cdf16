"""Scheduling policies: who goes first, who is preempted, how large a prompt's chunk is. Pure functions over small views.

Called by `core.scheduler`, by the simulator, and usable by any other scheduler whose requests offer the attributes of
`RequestView`. Nothing here knows queues, blocks or steps; nothing changes what it is given.

A policy is two orderings, both "smaller goes first", both fixed once a request has entered the state they are for, so that
nothing is sorted again while time passes:

    fcfs      waiting: preempted ones first, then in order of `add`     running: in order of admission
    priority  waiting and running alike: priority + arrival / aging, ties by arrival, then order of `add`
    sla-aware waiting and running prompts alike: overdue by arrival, savable by latest start, late by arrival

The rules behind the last (deadlines, chunk sizes, laxity) are in `core.policy_sla`. Time passing changes no key: a request
that can no longer be saved changes its standing, once, and is ranked again by its owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from trimtab_engine.core.live import POLICIES, LiveConfig
from trimtab_engine.core.policy_sla import Standing
from trimtab_engine.errors import ConfigError

Rank = tuple[float, ...]  # of one length under one policy; ends in the unique order of `add`

# A waiting request displaces a running one only when it is ahead by this many priority levels (after aging): a hair's
# breadth is not worth a recomputation.
DISPLACEMENT_MARGIN = 0.5
# A request that was preempted this often is not displaced again: it has paid its share.
MAX_DISPLACEMENTS = 3


class RequestView(Protocol):
    """What a policy may see of a request."""

    @property
    def priority(self) -> int:
        """Lower is earlier."""

    @property
    def arrival_s(self) -> float:
        """Monotonic seconds."""

    @property
    def sequence(self) -> int:
        """Order of `add`."""

    @property
    def admission(self) -> int:
        """Stamp of the latest admission; later is larger."""

    @property
    def num_preemptions(self) -> int:
        """How often it lost its place."""

    @property
    def standing(self) -> Standing:
        """Whether its first token can still be in time."""

    @property
    def latest_start_s(self) -> float:
        """When its prompt must start for that."""

    @property
    def last_token_s(self) -> float | None:
        """When its latest token was made; None before the first."""

    @property
    def rank(self) -> Rank:
        """The order under the policy in force, as computed by `waiting_rank` or `running_rank`."""


View = TypeVar("View", bound=RequestView)


class Policy(Protocol):
    """The two orderings, and whether a waiting request may take a running one's place."""

    @property
    def name(self) -> str:
        """As in `LiveConfig.scheduling_policy`."""

    @property
    def displaces(self) -> bool:
        """Whether `may_displace` is asked at all."""

    @property
    def has_deadlines(self) -> bool:
        """Whether the rules of `policy_sla` hold: standings, chunk sizes by time, victims by laxity."""

    @property
    def uses_priority(self) -> bool:
        """Whether a request's `priority` means anything."""

    def waiting_rank(self, view: RequestView) -> Rank:
        """Order of admission, smallest first."""

    def running_rank(self, view: RequestView) -> Rank:
        """Order of service among the running, smallest first; the largest is preempted first."""


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served; whoever was preempted goes to the front."""

    name: str = "fcfs"
    displaces: bool = False
    has_deadlines: bool = False
    uses_priority: bool = False

    def waiting_rank(self, view: RequestView) -> Rank:
        """Preempted ones (they had been admitted) stand before all that never ran."""
        return (0.0 if view.num_preemptions else 1.0, 0.0, view.sequence)

    def running_rank(self, view: RequestView) -> Rank:
        """Order of admission: the most recently admitted is the victim."""
        return (float(view.admission), 0.0, view.sequence)


@dataclass(frozen=True, slots=True)
class Priority:
    """Lower `priority` first; `aging_s` seconds of waiting are worth one level, 0 switches aging off.

    priority - (now - arrival) / aging orders like priority + arrival / aging, which does not change as time passes.
    """

    aging_s: float
    name: str = "priority"
    displaces: bool = True
    has_deadlines: bool = False
    uses_priority: bool = True

    def waiting_rank(self, view: RequestView) -> Rank:
        """The static aged priority, then arrival, then order of `add`. Preemption does not change it."""
        aged = view.priority + (view.arrival_s / self.aging_s if self.aging_s > 0 else 0.0)
        return (aged, view.arrival_s, view.sequence)

    def running_rank(self, view: RequestView) -> Rank:
        """The same order: the victim is the largest by the full key."""
        return self.waiting_rank(view)


@dataclass(frozen=True, slots=True)
class SlaAware:
    """Whoever can be saved first, by latest start; late ones behind them; overdue ones before; ties by `priority`."""

    name: str = "sla-aware"
    displaces: bool = False
    has_deadlines: bool = True
    uses_priority: bool = True

    def waiting_rank(self, view: RequestView) -> Rank:
        """By standing, then its key, then priority, then order of `add`.

        A preempted request that has spoken already stands before all: its stream is open and its gap grows.
        """
        if view.last_token_s is not None:
            return (-1.0, view.last_token_s, view.priority, view.sequence)
        by_arrival = view.standing is not Standing.SAVABLE
        key = view.arrival_s if by_arrival else view.latest_start_s
        return (float(view.standing), key, view.priority, view.sequence)

    def running_rank(self, view: RequestView) -> Rank:
        """The same order; it decides which prompt goes first in a step. Victims are chosen by laxity."""
        return self.waiting_rank(view)


def policy_of(live: LiveConfig) -> Policy:
    """The policy that `live` names; ConfigError for a name that is none."""
    if live.scheduling_policy == "fcfs":
        return Fcfs()
    if live.scheduling_policy == "priority":
        return Priority(aging_s=live.priority_aging_s)
    if live.scheduling_policy == "sla-aware":
        return SlaAware()
    raise ConfigError("config.scheduling_policy", live.scheduling_policy, f"one of {', '.join(POLICIES)}")


def choose_victim(running: Iterable[View]) -> View:
    """Who gives way when a running request needs memory: the largest rank. May be the one that asks.

    Under a policy with deadlines `policy_sla.laxity_s` decides instead.
    """
    return max(running, key=_rank)


def may_displace(waiting: RequestView, running: RequestView) -> bool:
    """Whether a waiting request may take a running one's place.

    Only a strictly more important one (never an equal), ahead by the margin, and not of one that lost its place
    `MAX_DISPLACEMENTS` times already. Ranks are static, so two requests can never displace each other in turn.
    """
    return (
        waiting.priority < running.priority
        and running.rank[0] - waiting.rank[0] >= DISPLACEMENT_MARGIN
        and running.num_preemptions < MAX_DISPLACEMENTS
    )


def prefill_chunk(need: int, budget: int, long_prefill_token_threshold: int) -> int:
    """Tokens of one prompt to compute in this step. `need` and `budget` are at least 1; threshold 0 is off."""
    cap = min(need, budget)
    return min(cap, long_prefill_token_threshold) if long_prefill_token_threshold > 0 else cap


def whole_prefill(need: int, budget: int, step_is_empty: bool) -> int:
    """The same without chunking: all or nothing; a prompt above the whole budget runs when the step holds nothing else."""
    return need if need <= budget or step_is_empty else 0


def _rank(view: RequestView) -> Rank:
    return view.rank
