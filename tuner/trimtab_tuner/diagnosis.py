"""Names what binds a service: idle, memory-, scheduling-, prefill-, decode-bound, overloaded, mixed. Pure.

Called by `run` on the incumbent's reading. Tests are ordered and the first match names the state; each says which
numbers led there. Whether a target is broken comes from exact counts, attribution from sums and counts, and only the
spread of the gaps (I) from a histogram. A test whose numbers are missing does not match.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trimtab_engine.core.live import LiveConfig, Slo
from trimtab_tuner.metrics.reading import Reading

State = Literal[
    "idle",
    "memory-bound",
    "scheduling-bound",
    "overloaded",
    "prefill-bound",
    "decode-bound",
    "mixed",
    "unknown",
]

ADVICE: Mapping[str, str] = {
    "idle": "nothing to fix",
    "memory-bound": "fewer sequences or more KV memory; not the budget",
    "scheduling-bound": "policy, max_num_seqs or the long-prompt limit",
    "overloaded": "shed or scale: no knob creates compute",
    "prefill-bound": "the budget: lower it when gaps break, raise it towards the cliff when first tokens are late",
    "decode-bound": "fewer sequences; the budget cannot help",
    "mixed": "try the budget first, then the policy",
    "unknown": "not enough numbers to say",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A state, the numbers behind it (None: not known), and the sentence a person reads."""

    state: State
    because: str
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    n: int = 0
    window_s: float = 0.0

    def to_json(self) -> dict[str, object]:
        """Plain form for results and reports."""
        return {
            "state": self.state,
            "because": self.because,
            "advice": ADVICE[self.state],
            "numbers": dict(self.numbers),
            "n": self.n,
            "window_s": self.window_s,
        }


@dataclass(frozen=True, slots=True)
class Facts:
    """The numbers that the tests read. Ratios of 1, times seconds; None: unknown."""

    ttft_broken: bool
    itl_broken: bool
    q: float | None  # mean wait before the first schedule
    p: float | None  # mean first schedule → first token
    qs: float | None  # queue share of time to first token
    sat: float | None  # share of steps that used more than half the budget
    phi: float | None  # share of step time that is prompts
    spread: float | None  # I: p99 / p50 of gaps
    kv: float | None
    preempted: float
    wcap: float | None
    wcap_share: float | None
    wdef: float | None
    busy: float | None
    sched: float | None
    full: float | None  # running / max_num_seqs
    step_mean_s: float | None
    itl_mean_s: float | None
    itl_slo_s: float


def facts(reading: Reading, config: LiveConfig) -> Facts:
    """What a reading says, in the terms of the tests."""
    slo = config.slo
    steps = sum(count for count, _ in reading.steps.values())
    seconds = sum(total for _, total in reading.steps.values())
    decode_count, decode_s = reading.steps.get("decode", (0.0, 0.0))
    mixed_count, mixed_s = reading.steps.get("mixed", (0.0, 0.0))
    phi = None
    if seconds > 0 and decode_count > 0:
        # Steps with prompts would have taken a decode step's time anyway; the rest is the prompts'.
        phi = max(0.0, mixed_s - mixed_count * decode_s / decode_count) / seconds
    elif seconds > 0:
        phi = mixed_s / seconds
    wall = reading.wall_s * reading.targets
    q, p = reading.queue_mean_s, reading.prefill_mean_s
    spread = None
    if reading.itl_p99_s is not None and reading.itl_p50_s:
        spread = reading.itl_p99_s / reading.itl_p50_s
    return Facts(
        ttft_broken=_broken(reading, slo, "ttft"),
        itl_broken=_broken(reading, slo, "itl"),
        q=q,
        p=p,
        qs=q / (q + p) if q is not None and p is not None and q + p > 0 else None,
        sat=reading.share_over_half_budget,
        phi=phi,
        spread=spread,
        kv=reading.kv_p95,
        preempted=reading.preemptions_per_request,
        wcap=reading.waiting_capacity_mean,
        wcap_share=reading.waiting_capacity_share,
        wdef=reading.waiting_deferred_mean,
        busy=seconds / wall if seconds > 0 and wall > 0 else None,
        sched=reading.schedule_s / wall if reading.schedule_s is not None and wall > 0 else None,
        full=reading.running_mean / config.max_num_seqs if reading.running_mean is not None else None,
        step_mean_s=seconds / steps if steps else None,
        itl_mean_s=reading.itl_mean_s,
        itl_slo_s=min(c.itl_s for c in slo.classes),
    )


def _broken(reading: Reading, slo: Slo, name: str) -> bool:
    for (slo_class, which), count in reading.counts.items():
        target = slo.by_name(slo_class)
        if (
            which == name
            and target is not None
            and count.n
            and count.violated_fraction > 1 - target.objective / 100
        ):
            return True
    return False


def _at_least(value: float | None, bound: float) -> bool:
    return value is not None and value >= bound


def _below(value: float | None, bound: float) -> bool:
    return value is not None and value < bound


def _idle(f: Facts) -> str | None:
    waiting = (f.wcap or 0.0) + (f.wdef or 0.0)
    if not f.ttft_broken and not f.itl_broken and waiting < 0.1 and _below(f.busy, 0.5):
        return f"every target is met, {waiting:.2g} wait, steps run {f.busy:.0%} of the time"
    return None


def _memory(f: Facts) -> str | None:
    if _at_least(f.kv, 0.95) and (f.preempted >= 0.01 or (f.wcap or 0.0) > 0):
        return f"KV memory is {f.kv:.0%} full, {f.preempted:.1%} of requests preempted, {f.wcap or 0:.2g} wait for it"
    return None


def _scheduling(f: Facts) -> str | None:
    if _at_least(f.wcap_share, 0.5) and _below(f.kv, 0.85) and _below(f.sat, 0.3):
        return f"requests wait in {f.wcap_share:.0%} of samples with KV {f.kv:.0%} full and {f.sat:.0%} of steps over half the budget"
    if _at_least(f.qs, 0.5) and _below(f.busy, 0.85):
        return f"{f.qs:.0%} of time to first token is waiting, yet steps run only {f.busy:.0%} of the time"
    if _at_least(f.sched, 0.10):
        return f"the scheduler itself takes {f.sched:.0%} of the time"
    if _at_least(f.full, 0.95) and _below(f.sat, 0.3) and _below(f.step_mean_s, 0.5 * f.itl_slo_s):
        return f"the batch is {f.full:.0%} full of sequences while a step takes {f.step_mean_s:.3f} s of {f.itl_slo_s:g} s"
    if f.wdef is not None and f.wdef > 0 and f.wdef >= (f.wcap or 0.0) > 0:
        return f"{f.wdef:.2g} are deferred against {f.wcap:.2g} waiting for capacity"
    return None


def _overloaded(f: Facts) -> str | None:
    if f.ttft_broken and f.itl_broken and _at_least(f.busy, 0.95) and _at_least(f.qs, 0.5):
        return f"both targets are broken, steps run {f.busy:.0%} of the time, {f.qs:.0%} of time to first token is waiting"
    return None


def _prefill(f: Facts) -> str | None:
    if not (_at_least(f.phi, 0.5) and _at_least(f.sat, 0.5)):
        return None
    if f.ttft_broken and f.p is not None and f.q is not None and f.p >= f.q:
        return f"{f.phi:.0%} of step time is prompts, and first tokens are late by computing ({f.p:.2f} s), not by waiting ({f.q:.2f} s)"
    if f.itl_broken and _at_least(f.spread, 3.0):
        return f"{f.phi:.0%} of step time is prompts, and they stall decodes: p99 gap is {f.spread:.1f} × the median"
    return None


def _decode(f: Facts) -> str | None:
    tight = f.spread is not None and f.spread <= 1.5
    if (
        f.phi is not None
        and f.phi <= 0.3
        and _below(f.sat, 0.3)
        and tight
        and _at_least(f.itl_mean_s, 0.8 * f.itl_slo_s)
    ):
        return f"the mean gap is {f.itl_mean_s:.3f} s of {f.itl_slo_s:g} s, with hardly a prompt in the way ({f.phi:.0%} of step time)"
    return None


ORDER: tuple[tuple[State, Callable[[Facts], str | None]], ...] = (
    ("idle", _idle),
    ("memory-bound", _memory),
    ("scheduling-bound", _scheduling),
    ("overloaded", _overloaded),
    ("prefill-bound", _prefill),
    ("decode-bound", _decode),
)


def diagnose(reading: Reading, config: LiveConfig) -> Diagnosis:
    """The first state whose test matches; "mixed" when a target is broken and none does."""
    found = facts(reading, config)
    numbers: dict[str, float | None] = {
        name: float(value) if isinstance(value, int | float) else None
        for name, value in ((f, getattr(found, f)) for f in found.__dataclass_fields__)
    }
    for state, test in ORDER:
        if because := test(found):
            return Diagnosis(state, because, numbers, reading.n, reading.wall_s)
    if found.ttft_broken or found.itl_broken:
        which = " and ".join(n for n, b in (("TTFT", found.ttft_broken), ("ITL", found.itl_broken)) if b)
        return Diagnosis("mixed", _mixed(found, which), numbers, reading.n, reading.wall_s)
    if found.busy is None:
        return Diagnosis(
            "unknown", "the runtime exports no step durations", numbers, reading.n, reading.wall_s
        )
    return Diagnosis(
        "idle",
        f"every target is met; steps run {found.busy:.0%} of the time",
        numbers,
        reading.n,
        reading.wall_s,
    )


def _mixed(f: Facts, which: str) -> str:
    known = [
        f"{value:.0%} {what}"
        for value, what in (
            (f.phi, "of step time is prompts"),
            (f.sat, "of steps use over half the budget"),
            (f.qs, "of time to first token is waiting"),
        )
        if value is not None
    ]
    spread = f", p99 gap {f.spread:.1f} × the median" if f.spread is not None else ""
    return f"{which} broken without one clear cause: {', '.join(known) or 'few numbers'}{spread}"


def settle(states: Sequence[State], *, of: int = 5, needed: int = 3) -> State | None:
    """The state that held in `needed` of the last `of` windows, or None while none did."""
    for state, count in Counter(states[-of:]).most_common(1):
        if count >= needed:
            return state
    return None
