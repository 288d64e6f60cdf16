"""Scheduling policies: who goes first, who is preempted, how large a prompt's chunk is. Pure functions over small views.

Called by `core.scheduler`, by the simulator, and usable by any other scheduler whose requests offer the attributes of
`RequestView`. Nothing here knows queues, blocks or steps; nothing changes what it is given.

A policy is two orderings, both "smaller goes first", both fixed once a request has entered the state they are for, so that
nothing is sorted again while time passes:

    fcfs      waiting: preempted ones first, then in order of `add`     running: in order of admission
    priority  waiting and running alike: priority + arrival / aging, ties by arrival, then order of `add`

A policy with deadlines joins as one more class and one more entry of `policy_of`; a rank that depends on time passing
(a request that can no longer be saved) would be a change of the rank by its owner, not a sort here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from trimtab_engine.core.live import LiveConfig
from trimtab_engine.errors import ConfigError

Rank = tuple[float, float, int]

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

    def waiting_rank(self, view: RequestView) -> Rank:
        """Order of admission, smallest first."""

    def running_rank(self, view: RequestView) -> Rank:
        """Order of service among the running, smallest first; the largest is preempted first."""


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served; whoever was preempted goes to the front."""

    name: str = "fcfs"
    displaces: bool = False

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

    def waiting_rank(self, view: RequestView) -> Rank:
        """The static aged priority, then arrival, then order of `add`. Preemption does not change it."""
        aged = view.priority + (view.arrival_s / self.aging_s if self.aging_s > 0 else 0.0)
        return (aged, view.arrival_s, view.sequence)

    def running_rank(self, view: RequestView) -> Rank:
        """The same order: the victim is the largest by the full key."""
        return self.waiting_rank(view)


def policy_of(live: LiveConfig) -> Policy:
    """The policy that `live` names; ConfigError for a name that is none."""
    if live.scheduling_policy == "fcfs":
        return Fcfs()
    if live.scheduling_policy == "priority":
        return Priority(aging_s=live.priority_aging_s)
    raise ConfigError("config.scheduling_policy", live.scheduling_policy, "one of fcfs, priority")


def choose_victim(running: Iterable[View]) -> View:
    """Who gives way when a running request needs memory: the largest rank. May be the one that asks."""
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
