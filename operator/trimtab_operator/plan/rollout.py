"""Which replicas to start, drain and tell the live config: one pure, level-based step, the same for pods and processes.

Called again and again with what is observed now; it keeps nothing between calls, so a restarted shell goes on where the old one
stood. Local mode carries the actions out on processes; in a cluster the Deployment controller owns pods, and the planner judges
progress, strategy and status. Knows nothing of either.

Promise: no ready replica is drained while that would leave fewer than `min_ready` ready ones; a replacement that never gets
ready therefore leaves the old ones serving, and the rollout counts as Stalled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trimtab_operator import names
from trimtab_operator.api.service import ServiceSpec
from trimtab_operator.plan import failures
from trimtab_operator.plan.loading import is_moving

Phase = Literal["Starting", "Running", "Draining", "Failed"]

UNSCHEDULABLE_PATIENCE_S = 60.0  # how long strategy Auto lets a surge replica look for a place
RESTART_BACKOFF_S = (10.0, 300.0)  # second and longest pause, doubling; the same as a kubelet's


@dataclass(frozen=True, slots=True)
class Replica:
    """One observed engine, pod or process. Times are seconds of the same clock as `now`.

    A replica that is gone is simply not listed any more.
    """

    name: str
    template_hash: str
    phase: Phase
    ready: bool = False  # /ready says so; only Running ones are
    created_s: float = 0.0
    started_s: float = 0.0  # of the current process, after restarts
    was_ready: bool = False  # at least once since it was created
    restarts: int = 0
    failed_s: float | None = None  # when the process ended, in phase Failed
    failure: str | None = None  # one of the reasons in `names`
    message: str = ""
    downloading: bool = False  # the message says how far
    unschedulable_since_s: float | None = None  # no place (GPU, memory) for it
    incumbent_generation: int | None = None  # read back; a candidate's lease does not count; None: unknown
    generation_rejected: int | None = None  # the engine refused this one


@dataclass(frozen=True, slots=True)
class Desired:
    """What the spec wants, reduced to what the planner reads."""

    template_hash: str
    replicas: int  # after suspend
    generation: int  # of the live document
    strategy: str = "Auto"
    max_surge: int = 1
    max_unavailable: int = 0
    progress_deadline_s: float = 600.0
    startup_timeout_s: float = 1800.0
    suspended: bool = False
    room_patience_s: float = UNSCHEDULABLE_PATIENCE_S

    @classmethod
    def of(
        cls,
        spec: ServiceSpec,
        template_hash: str,
        generation: int,
        room_patience_s: float = UNSCHEDULABLE_PATIENCE_S,
    ) -> Desired:
        """From a spec, the hash of its template and the number of its live document."""
        return cls(
            template_hash=template_hash,
            replicas=spec.wanted_replicas,
            generation=generation,
            strategy=spec.rollout.strategy,
            max_surge=spec.rollout.max_surge,
            max_unavailable=spec.rollout.max_unavailable,
            progress_deadline_s=spec.rollout.progress_deadline_s,
            startup_timeout_s=spec.startup_timeout_s,
            suspended=spec.suspend,
            room_patience_s=room_patience_s,
        )


@dataclass(frozen=True, slots=True)
class Start:
    """Start one new replica of the current template; the shell names it."""

    template_hash: str
    why: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the ended or stuck process of `name` again, with the arguments it had."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Let `name` finish its requests and end."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End `name` now: it serves nobody."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class PushLive:
    """Push the live document of `generation` to `name` and read back."""

    name: str
    generation: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing changes before `until_s` unless something is observed; plan again then at the latest."""

    until_s: float
    why: str


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """Counts and the verdict of this step. `reason` is a reason of condition Ready (or Stalled, when `stalled`)."""

    wanted: int
    total: int  # without draining ones
    updated: int
    ready: int  # of the current template
    available: int  # ready, of any template
    applied: int  # ready ones with the desired generation in force
    draining: int
    reason: str
    message: str
    progressing: bool
    stalled: bool = False
    rejected: tuple[str, ...] = ()  # replicas that refused the live document
    downloading: str | None = None  # how far the first replica is that fetches its model

    @property
    def is_ready(self) -> bool:
        """All wanted replicas are updated and ready, and nothing old is left. Says nothing of live config or SLO."""
        return self.reason == names.SERVING


@dataclass(frozen=True, slots=True)
class SetStatus:
    """Always the last action of a plan."""

    status: RolloutStatus


Action = Start | Restart | Drain | Stop | PushLive | Wait | SetStatus


@dataclass(frozen=True, slots=True)
class _Pace:
    """Surge and the least number of ready replicas, after strategy and room were judged."""

    surge: int
    min_ready: int
    count_draining: bool  # a leaving replica still holds the place that the next one needs
    recreate: bool = False


def plan(desired: Desired, replicas: Sequence[Replica], now: float) -> list[Action]:
    """The actions of this moment, in the order to carry them out; the last one is SetStatus."""
    leaving = [r for r in replicas if r.phase == "Draining"]
    alive = sorted((r for r in replicas if r.phase != "Draining"), key=lambda r: (r.created_s, r.name))
    current = [r for r in alive if r.template_hash == desired.template_hash]
    old = [r for r in alive if r.template_hash != desired.template_hash]
    pace = _pace(desired, current, now)
    ends = _ends(desired, current, old, pace)
    gone = {action.name for action in ends}
    starts = _starts(desired, current, old, leaving, gone, pace)
    repairs, waits = _repairs(desired, [r for r in alive if r.name not in gone], now)
    pushes = [
        PushLive(r.name, desired.generation)
        for r in alive
        if r.ready
        and r.name not in gone
        and (r.incumbent_generation is None or r.incumbent_generation < desired.generation)
        and r.generation_rejected != desired.generation
    ]
    status = _status(desired, current, old, leaving, bool(ends or starts), now)
    waits += _deadlines(desired, current, now)
    soonest = [min(waits, key=lambda wait: wait.until_s)] if waits else []
    return [*pushes, *ends, *starts, *repairs, *soonest, SetStatus(status)]


def _pace(desired: Desired, current: Sequence[Replica], now: float) -> _Pace:
    wanted = desired.replicas
    if desired.strategy == "Recreate":
        return _Pace(surge=0, min_ready=0, count_draining=True, recreate=True)
    surge, missing = desired.max_surge, desired.max_unavailable
    if desired.strategy == "Auto" and no_room(current, now, desired.room_patience_s):
        surge, missing = 0, max(1, missing)
    return _Pace(surge, max(0, wanted - missing), count_draining=surge == 0)


def no_room(current: Sequence[Replica], now: float, patience_s: float) -> bool:
    """Whether a replica of the current template has looked for a place in vain for long enough."""
    return any(
        r.unschedulable_since_s is not None and not r.ready and now - r.unschedulable_since_s >= patience_s
        for r in current
    )


def _ends(
    desired: Desired, current: Sequence[Replica], old: Sequence[Replica], pace: _Pace
) -> list[Drain | Stop]:
    """Whom to end now: what is not ready first, and of ready ones only as many as `min_ready` leaves."""
    wanted = desired.replicas
    ready = sum(r.ready for r in (*current, *old))
    # Of the current template the youngest go first; `sorted` keeps that order among equals.
    youngest_first = current[::-1]
    surplus = sorted(youngest_first, key=lambda r: r.ready)[: max(0, len(current) - wanted)]
    # As a Deployment does: replicas above the minimum, less those that are wanted but not there yet.
    new_missing = sum(not r.ready for r in current if r not in surplus)
    spare = len(current) + len(old) - pace.min_ready - new_missing
    candidates = [(r, _why_old(desired)) for r in sorted(old, key=lambda r: r.ready)]
    candidates += [(r, _why_surplus(desired)) for r in surplus]
    if pace.recreate or wanted == 0:
        spare = len(candidates)
    ends: list[Drain | Stop] = []
    for replica, why in candidates:
        if replica.ready:
            if ready - 1 < pace.min_ready or spare <= 0:
                continue
            ready -= 1
            ends.append(Drain(replica.name, why))
        elif spare > 0 or replica in surplus:
            # A replica that was ready may still hold requests; one that never was serves nobody.
            ends.append(
                Drain(replica.name, why)
                if replica.was_ready and replica.phase == "Running"
                else Stop(replica.name, why)
            )
        else:
            continue
        spare -= 1
    return ends


def _why_old(desired: Desired) -> str:
    return names.SUSPENDED if desired.suspended else names.ROLLOUT_IN_PROGRESS


def _why_surplus(desired: Desired) -> str:
    return names.SUSPENDED if desired.suspended else names.SCALING_DOWN


def _starts(
    desired: Desired,
    current: Sequence[Replica],
    old: Sequence[Replica],
    leaving: Sequence[Replica],
    gone: set[str],
    pace: _Pace,
) -> list[Start]:
    if pace.recreate and (old or leaving):
        return []
    standing = sum(r.name not in gone for r in (*current, *old))
    held = standing + (len(leaving) + len(gone) if pace.count_draining else 0)
    missing = desired.replicas - sum(r.name not in gone for r in current)
    room = desired.replicas + pace.surge - held
    why = names.ROLLOUT_IN_PROGRESS if old else names.SCALING_UP
    return [Start(desired.template_hash, why) for _ in range(max(0, min(missing, room)))]


def _repairs(desired: Desired, alive: Sequence[Replica], now: float) -> tuple[list[Restart], list[Wait]]:
    """Restart what ended by itself or does not get through its start, with growing pauses."""
    restarts: list[Restart] = []
    waits: list[Wait] = []
    first, longest = RESTART_BACKOFF_S
    for replica in alive:
        if replica.phase == "Failed":
            # The first restart comes at once, as a kubelet's does: one crash is no loop yet.
            pause = (
                0.0 if replica.restarts == 0 else min(longest, first * 2.0 ** min(replica.restarts - 1, 20))
            )
            due = (replica.failed_s if replica.failed_s is not None else now) + pause
            if due <= now:
                restarts.append(Restart(replica.name, replica.failure or names.ENGINE_CRASHED))
            else:
                waits.append(Wait(due, f"{replica.name} is restarted"))
        elif replica.phase == "Starting" and replica.unschedulable_since_s is None:
            due = replica.started_s + desired.startup_timeout_s
            if due <= now:
                restarts.append(Restart(replica.name, "StartupTimeout"))
            else:
                waits.append(Wait(due, f"{replica.name} reaches startupTimeout"))
    return restarts, waits


def _deadlines(desired: Desired, current: Sequence[Replica], now: float) -> list[Wait]:
    """Moments at which this plan changes by itself."""
    waits: list[Wait] = []
    for replica in current:
        if not replica.was_ready and not replica.ready:
            waits.append(Wait(replica.created_s + desired.progress_deadline_s, "progressDeadline"))
        if replica.unschedulable_since_s is not None and desired.strategy == "Auto":
            waits.append(
                Wait(
                    replica.unschedulable_since_s + desired.room_patience_s, "no place for the surge replica"
                )
            )
    return [wait for wait in waits if wait.until_s > now]


def _status(
    desired: Desired,
    current: Sequence[Replica],
    old: Sequence[Replica],
    leaving: Sequence[Replica],
    acting: bool,
    now: float,
) -> RolloutStatus:
    ready = sum(r.ready for r in current)
    available = ready + sum(r.ready for r in old)
    done = ready == desired.replicas and len(current) == desired.replicas and not old
    reason, message, stalled = _verdict(desired, current, old, leaving, ready, done, now)
    return RolloutStatus(
        wanted=desired.replicas,
        total=len(current) + len(old),
        updated=len(current),
        ready=ready,
        available=available,
        applied=sum(r.ready and r.incumbent_generation == desired.generation for r in (*current, *old)),
        draining=len(leaving),
        reason=reason,
        message=message,
        progressing=not stalled and (acting or not done or bool(leaving)),
        stalled=stalled,
        rejected=tuple(r.name for r in (*current, *old) if r.generation_rejected == desired.generation),
        downloading=_downloading(current),
    )


def _downloading(current: Sequence[Replica]) -> str | None:
    """The one that bytes come to, before those that wait for it or for the hub."""
    under_way = [r for r in current if r.downloading and not r.ready]
    first = min(under_way, key=lambda r: not is_moving(r.message), default=None)
    return None if first is None else f"{first.name} {first.message}"


def _verdict(
    desired: Desired,
    current: Sequence[Replica],
    old: Sequence[Replica],
    leaving: Sequence[Replica],
    ready: int,
    done: bool,
    now: float,
) -> tuple[str, str, bool]:
    """Reason, message and whether only a person can help."""
    if desired.suspended:
        left = len(current) + len(old) + len(leaving)
        return (
            names.SUSPENDED,
            "spec.suspend is true" + (f"; {left} replicas are leaving" if left else ""),
            False,
        )
    if done:
        return names.SERVING, f"{ready} of {desired.replicas} replicas ready", False
    for replica in current:
        if replica.ready or replica.was_ready:
            continue
        waited = now - replica.created_s
        detail = f": {replica.message}" if replica.message else ""
        serving = sum(r.ready for r in old)
        kept = f"; {serving} old replica{' goes' if serving == 1 else 's go'} on serving" if old else ""
        if replica.failure in names.FATAL_REASONS:
            return str(replica.failure), f"{replica.name} cannot start{detail}{kept}", True
        # A download that moves is progress, however big the model; one that does not move ends by itself.
        if waited >= desired.progress_deadline_s and not replica.downloading:
            reason = replica.failure or names.PROGRESS_DEADLINE_EXCEEDED
            detail = detail or ": it runs, and /ready has not said yes yet"
            if replica.unschedulable_since_s is not None and not leaving:
                reason = failures.no_place(replica.message)
            # The deadline, not the time that has passed: a message that counts on would be written again at every look.
            return (
                reason,
                f"{replica.name} is not ready after {desired.progress_deadline_s:g} s{detail}{kept}",
                True,
            )
    hint = next((f"; {r.name}: {r.message}" for r in current if not r.ready and r.message), "")
    if old:
        return (
            names.ROLLOUT_IN_PROGRESS,
            f"{ready} of {desired.replicas} replicas updated and ready, {len(old)} old left{hint}",
            False,
        )
    if len(current) > desired.replicas:
        return names.SCALING_DOWN, f"{len(current)} replicas go down to {desired.replicas}", False
    failed = next((r for r in current if r.phase == "Failed"), None)
    if failed is not None:
        detail = f": {failed.message}" if failed.message else ""
        return (
            names.PODS_NOT_READY,
            f"{failed.name} ended{detail}; {ready} of {desired.replicas} replicas ready",
            False,
        )
    lacking = next((r for r in current if r.failure in names.MISSING_REASONS), None)
    if lacking is not None:
        return str(lacking.failure), f"{ready} of {desired.replicas} replicas are ready{hint}", False
    if len(current) < desired.replicas or any(not r.was_ready for r in current):
        return names.SCALING_UP, f"{ready} of {desired.replicas} replicas ready{hint}", False
    return names.PODS_NOT_READY, f"{ready} of {desired.replicas} replicas ready{hint}", False
