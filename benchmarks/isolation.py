"""A short prompt while a 30,000-token prompt is being computed: how long its first token takes, by policy, simulated.

Every 8 s a prompt of 30,000 tokens (class `batch`: 60 s, gaps of 1 s) arrives, and a short one (Azure 2023 conversation lengths up
to 512 tokens; class `interactive`: 0.5 s, gaps of 0.1 s) at a random moment of the 3 s after it, while it is under way. Conversations
of the same class go on beside them, one a second, so that streams decode all the time. *Idle* is the same trace without the long
prompts. Only the short prompts are measured; those that arrived after the long one had its first token would be left out, and
their number is printed.

Targets, for `sla-aware`: the p99 of the short prompts' TTFT is within their class's target (`ttft_p99_over_target` ≤ 1), and at most
two capped steps above the idle p99 (`extra_capped_steps` ≤ 2; `ttft_p99_over_idle` is the ratio of the two). A capped step is the
longest that the policy plans: 0.9 of the smallest ITL target. p99 over the short prompts of all seeds together; beside it the
spread over seeds.

Mistral-7B on an A100 by its data-sheet preset, the engine's own scheduler; no clock: every run gives the same figures.
`make bench NAME=isolation`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import azure_traces
import numpy as np
from harness import arguments, emit, made_by, provenance, spread, write_table
from numpy.typing import NDArray
from simulated_server import Setup, add_flags, caveat, count

from trimtab_engine.core.policy_sla import step_cap_s
from trimtab_tuner.simulate.presets import preset
from trimtab_tuner.simulate.simulate import live_slo, simulate
from trimtab_tuner.slo import Slo
from trimtab_tuner.stats import ttft_s
from trimtab_tuner.trace import Trace, TraceRequest

INTERACTIVE, BATCH = "interactive", "batch"
SLO = Slo(0.5, 0.1, {INTERACTIVE: Slo(0.5, 0.1), BATCH: Slo(60.0, 1.0)})
LONG_TOKENS, SHORT_TOKENS = 30_000, 512
EVERY_S, WITHIN_S = 8.0, 3.0
OUTPUT_TOKENS = 32  # of long and short prompts; conversations have their own
TALK_RPS = 1.0
MAX_EXTRA_STEPS = 2.0
Floats = NDArray[np.float64]


SETUPS = (
    Setup("prefill-first", 8192, prefill_first=True),
    *(Setup(f"fcfs {budget}", budget) for budget in (8192, 2048, 512)),
    Setup("sla-aware", 8192, "sla-aware"),
)


@dataclass(frozen=True)
class Measured:
    """Seconds to the first token of the short prompts, and how many of them came too late to count."""

    ttft_s: Floats
    not_in_flight: int


def trace_of(pairs: int, seed: int, long_prompts: bool) -> tuple[Trace, list[tuple[int, int]]]:
    """The requests, and for each pair the places of the long and the short one (equal without the long ones)."""
    rng = np.random.default_rng(seed)
    lengths = azure_traces.load("conv")
    short_ones = lengths.prompt[lengths.prompt <= SHORT_TOKENS]
    rows: list[tuple[TraceRequest, int, str]] = []
    for pair in range(pairs):
        at_s, delay_s = pair * EVERY_S, float(rng.uniform(0.0, WITHIN_S))
        short = int(rng.choice(short_ones))
        if long_prompts:
            rows.append((TraceRequest(at_s, LONG_TOKENS, OUTPUT_TOKENS, BATCH), pair, "long"))
        rows.append((TraceRequest(at_s + delay_s, short, OUTPUT_TOKENS, INTERACTIVE), pair, "short"))
    talk = np.random.default_rng(1000 + seed)
    at = np.cumsum(talk.standard_exponential(int(pairs * EVERY_S * TALK_RPS)) / TALK_RPS)
    chosen = talk.choice(len(lengths.prompt), len(at))
    talking = zip(at.tolist(), lengths.prompt[chosen].tolist(), lengths.output[chosen].tolist(), strict=True)
    rows += [(TraceRequest(*each, INTERACTIVE), -1, "talk") for each in talking]
    rows.sort(key=lambda row: row[0].arrival_s)
    places = {(pair, what): place for place, (_, pair, what) in enumerate(rows)}
    pairs_at = [
        (places.get((pair, "long"), places[pair, "short"]), places[pair, "short"]) for pair in range(pairs)
    ]
    return Trace(tuple(row for row, _, _ in rows), "azure 2023 conv", "lengths"), pairs_at


def measure(setup: Setup, pairs: int, seed: int, long_prompts: bool, preset_name: str) -> Measured:
    """One simulation."""
    known = preset(preset_name)
    trace, places = trace_of(pairs, seed, long_prompts)
    # These prompts share nothing.
    simulation = simulate(trace, known.model, setup.server(known, SLO), slo=SLO)
    assert not simulation.stats[0].preemptions_recompute, "without a preemption the cache could find nothing"
    done = simulation.result.requests
    found, missed = [], 0
    for long, short in places:
        first_s, wait_s = done[long].first_token_s, ttft_s(done[short])
        assert first_s is not None, "a simulation runs to its end"
        assert wait_s is not None, "a simulation runs to its end"
        if long_prompts and first_s <= done[short].intended_s:
            missed += 1
        else:
            found.append(wait_s)
    return Measured(np.array(found), missed)


def main() -> None:
    """Simulate all setups and print; exit 1 when `sla-aware` misses a target."""
    parser = arguments("isolation", __doc__)
    parser.add_argument("--pairs", type=int, default=200, help="short prompts each seed (default 200)")
    add_flags(parser)
    options = parser.parse_args()
    before = provenance(("numpy",))
    rows = {}
    for setup in SETUPS:
        idle, busy = (
            [measure(setup, options.pairs, seed, long, options.preset) for seed in range(options.seeds)]
            for long in (False, True)
        )
        rows[setup.name] = row = summary(idle, busy)
        print(
            f"{setup.name:14s} p99 idle {row['idle_p99_s']} s, beside a long prompt {row['p99_s']} s, "
            f"largest {row['max_s']} s",
            file=sys.stderr,
        )
    aware = rows["sla-aware"]
    passed = (
        float(str(aware["ttft_p99_over_target"])) <= 1.0
        and float(str(aware["extra_capped_steps"])) <= MAX_EXTRA_STEPS
    )
    figures: dict[str, object] = {
        **{key: aware[key] for key in ("ttft_p99_over_idle", "ttft_p99_over_target", "extra_capped_steps")},
        "by_setup": rows,
        "targets": {"ttft_p99_over_target": 1.0, "extra_capped_steps": MAX_EXTRA_STEPS},
        "passed": passed,
    }
    shape: dict[str, object] = {
        "long_tokens": LONG_TOKENS,
        "pairs": options.pairs,
        "seeds": list(range(options.seeds)),
        "preset": options.preset,
        "lengths": azure_traces.load("conv").source,
        "ttft_target_s": SLO.of(INTERACTIVE).ttft_s,
        "capped_step_s": round(step_cap_s(live_slo(SLO)), 4),
    }
    if options.write:
        write_table("isolation", table(figures, rows, shape, before))
    emit("isolation", figures, **shape, provenance=before)
    sys.exit(0 if passed else 1)


def summary(idle: list[Measured], busy: list[Measured]) -> dict[str, object]:
    """Pooled over seeds, and the spread of the seeds' own p99."""
    alone, beside = (np.concatenate([each.ttft_s for each in runs]) for runs in (idle, busy))
    idle_p99, p99 = (float(np.quantile(each, 0.99)) for each in (alone, beside))
    target_s = SLO.of(INTERACTIVE).ttft_s
    return {
        "idle_p50_s": round(float(np.median(alone)), 4),
        "idle_p99_s": round(idle_p99, 4),
        "p50_s": round(float(np.median(beside)), 4),
        "p99_s": round(p99, 4),
        "max_s": round(float(beside.max()), 4),
        "p99_s_by_seed": spread([round(float(np.quantile(each.ttft_s, 0.99)), 4) for each in busy]),
        "ttft_p99_over_idle": round(p99 / idle_p99, 3),
        "ttft_p99_over_target": round(p99 / target_s, 3),
        "extra_capped_steps": round((p99 - idle_p99) / step_cap_s(live_slo(SLO)), 3),
        "within_target": round(float((beside <= target_s).mean()), 4),
        "n": len(beside),
        "not_in_flight": sum(each.not_in_flight for each in busy),
    }


def table(
    figures: dict[str, object],
    rows: dict[str, dict[str, object]],
    shape: dict[str, object],
    before: dict[str, object],
) -> str:
    """docs/benchmarks/isolation.md."""
    lines = [
        "# A short prompt beside a 30,000-token prompt (simulated)",
        "",
        caveat(shape["preset"], "policies"),
        f"Lengths of short prompts and conversations: {shape['lengths']} (Azure 2023).",
        "",
        f"A prompt of {LONG_TOKENS:,} tokens every {EVERY_S:g} s, a short one (up to {SHORT_TOKENS} tokens; TTFT target "
        f"{shape['ttft_target_s']} s, gaps 0.1 s) within {WITHIN_S:g} s after it, conversations",
        f"beside them. {shape['pairs']} short prompts, {count(shape['seeds'])} seeds; p99 over all of them (lowest to highest seed).",
        "",
        "| setup | idle p50 s | idle p99 s | p50 s | p99 s | largest s | within target | p99 / idle | p99 / target | above idle, in capped steps |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        by_seed = row["p99_s_by_seed"]
        assert isinstance(by_seed, dict)
        lines.append(
            f"| {name} | {row['idle_p50_s']} | {row['idle_p99_s']} | {row['p50_s']} | {row['p99_s']} ({by_seed['min']} to {by_seed['max']}) "
            f"| {row['max_s']} | {float(str(row['within_target'])):.1%} | {row['ttft_p99_over_idle']} | {row['ttft_p99_over_target']} "
            f"| {row['extra_capped_steps']} |"
        )
    lines += [
        "",
        f"A capped step is {shape['capped_step_s']} s. Targets for `sla-aware`: p99 / target ≤ 1 and at most {MAX_EXTRA_STEPS:g} capped steps above idle: "
        f"**{'met' if figures['passed'] else 'missed'}**.",
        "",
        made_by(before),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
