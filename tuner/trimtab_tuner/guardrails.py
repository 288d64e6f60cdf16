"""What a tuner may not do to a service, as pure functions: may it explore, which way may it move, must it stop now.

Called by `run` (before a candidate) and by the evaluator (while one is in force). Every rule answers None or a reason
that goes into the audit trail. A missing number is a reason to stop, never a pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_engine.core.live import LiveConfig, Slo
from trimtab_tuner.decide import evidence, paired_differences
from trimtab_tuner.metrics.reading import Block, Reading, Unknown

PAUSE_ANNOTATION = "serving.trimtab.dev/tuning"
TRYING_MODES = ("Canary", "Apply")
NUMERIC = ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what a run may do. Defaults are for live traffic; a replay on an idle service loosens some."""

    step_share: float = 0.9  # of the ITL target that a full step may take
    max_factor: float | None = 2.0  # of one knob in one live move; None: any distance in one move
    cooldown_windows: int = 3  # after a rollback
    min_requests: int = 300  # judged in each arm before a verdict
    error_budget_left: float = 0.2  # no exploring below; 0: no gate
    max_fault_fraction: float = 0.01  # above the incumbent's
    max_preemptions_per_request: float = 0.02  # above the incumbent's
    gauge_factor: float = (
        5.0  # oldest waiter and longest gap: times their target, and twice the incumbent's worst
    )
    alpha: float = 0.05
    max_throughput_loss: float | None = None  # share of the incumbent's tokens a second; None: any

    def to_json(self) -> dict[str, object]:
        """Plain form for the audit trail."""
        return dataclasses.asdict(self)


def step_time_limit_s(slo: Slo, limits: Limits) -> float:
    """Longest step that may be proposed: a share of the tightest ITL target of any class."""
    return limits.step_share * min(c.itl_s for c in slo.classes)


def paused(status: Mapping[str, object], *, pause_file: bool) -> str | None:
    """The kill switch: why no candidate may be tried. Looks at what an operator says of tuning and at a local file."""
    if pause_file:
        return "paused by the pause file"
    tuning = status.get("tuning")
    if not isinstance(tuning, Mapping):
        return None  # a bare engine knows no tuning state
    if tuning.get("state") == "quiet":
        quiet = tuning.get("quiet")
        return str(quiet["message"] if isinstance(quiet, Mapping) else "a quiet time is in force")
    if tuning.get("state", "active") != "active":
        return f"tuning is {tuning['state']} by the annotation {PAUSE_ANNOTATION}"
    if tuning.get("mode", "Apply") not in TRYING_MODES:
        return f"spec.tuning.mode is {tuning['mode']}; trying candidates needs {' or '.join(TRYING_MODES)}"
    return None


def error_budget_left(reading: Reading, slo: Slo) -> float:
    """Smallest share of error budget left over all targets in a reading; 1: untouched, below 0: overspent."""
    left = 1.0
    for (slo_class, _), count in reading.counts.items():
        target = slo.by_name(slo_class)
        if target is not None and count.n:
            left = min(left, 1 - count.violated_fraction / (1 - target.objective / 100))
    return left


def may_explore(
    *, pause: str | None, budget_left: float, windows_since_rollback: int | None, limits: Limits
) -> str | None:
    """Why no candidate may be tried now, or None. `windows_since_rollback` None: nothing was rolled back."""
    if pause:
        return pause
    if limits.error_budget_left > 0 and budget_left < limits.error_budget_left:
        return f"only {max(budget_left, 0):.0%} of the error budget is left, exploring needs {limits.error_budget_left:.0%}"
    if windows_since_rollback is not None and windows_since_rollback < limits.cooldown_windows:
        return f"cooling down: {windows_since_rollback} of {limits.cooldown_windows} windows since the last rollback"
    return None


def path(current: LiveConfig, wanted: LiveConfig, limits: Limits) -> tuple[LiveConfig, ...]:
    """The moves from `current` to `wanted`, last one `wanted`: one knob each, by `max_factor` at most.

    Without `max_factor` (offline) it is one move. Budgets grow before, and shrink after, whatever must fit under them.
    """
    if current == wanted:
        return ()
    if limits.max_factor is None:
        return (wanted,)
    moves: list[LiveConfig] = []
    at = current
    names = [*NUMERIC, *(f for f in LiveConfig.__dataclass_fields__ if f not in NUMERIC)]
    if wanted.max_num_batched_tokens < current.max_num_batched_tokens:
        names = [*names[1:], names[0]]
    for name in names:
        goal = getattr(wanted, name)
        while getattr(at, name) != goal:
            value = getattr(at, name)
            change: dict[str, Any] = {name: _towards(value, goal, limits.max_factor, name)}
            at = dataclasses.replace(at, **change)
            moves.append(at)
    return tuple(moves)


def _towards(value: object, goal: object, factor: float, name: str) -> object:
    # A threshold of 0 means off: there is no factor to it, it is a switch.
    if (
        name not in NUMERIC
        or not isinstance(value, int)
        or not isinstance(goal, int)
        or value == 0
        or goal == 0
    ):
        return goal
    if goal > value:
        return min(goal, max(int(value * factor), value + 1))
    return max(goal, min(-int(-value // factor), value - 1))


def must_stop(
    now: Reading | Unknown,
    *,
    baseline: Reading | None,
    slo: Slo,
    limits: Limits,
    incumbent_blocks: Sequence[Block] = (),
    candidate_blocks: Sequence[Block] = (),
) -> str | None:
    """Why the candidate in force must go at once, or None. `now` is read from its start to this moment.

    The incumbent may be bad itself, so rates are judged against it where a baseline exists.
    """
    if isinstance(now, Unknown):
        return f"metrics are unknown: {now.reason}"
    faults = (baseline.fault_fraction if baseline else 0.0) + limits.max_fault_fraction
    if now.faults >= 2 and now.fault_fraction > faults:
        return f"{now.faults:g} requests failed ({now.fault_fraction:.1%}, {faults:.1%} is allowed)"
    preempted = (baseline.preemptions_per_request if baseline else 0.0) + limits.max_preemptions_per_request
    if now.preemptions >= 3 and now.preemptions_per_request > preempted:
        return f"{now.preemptions_per_request:.1%} of requests were preempted ({preempted:.1%} is allowed)"
    waits = (
        ("oldest waiting request", now.oldest_waiting_s, baseline and baseline.oldest_waiting_s, "ttft_s"),
        ("longest token gap", now.longest_gap_s, baseline and baseline.longest_gap_s, "itl_s"),
    )
    for what, seen, usual, target in waits:
        if seen is None:
            continue
        allowed = max(limits.gauge_factor * max(getattr(c, target) for c in slo.classes), 2 * (usual or 0.0))
        if seen > allowed:
            return f"{what} is {seen:.2f} s ({allowed:.2f} s is allowed)"
    pairs = min(len(incumbent_blocks), len(candidate_blocks))
    judged = sum(b.n for b in candidate_blocks[:pairs])
    worse = evidence([-d for d in paired_differences(incumbent_blocks[:pairs], candidate_blocks[:pairs])])
    if worse >= 1 / limits.alpha and judged >= min(limits.min_requests, 20):
        return (
            f"it violates more than the incumbent: e-value {worse:.3g} over {pairs} blocks, {judged} requests"
        )
    return None
