"""Two classes on one simulated server: how much more load `sla-aware` carries than fcfs while both classes keep their targets.

Interactive requests (Azure 2023 conversation lengths; first token in 1 s, gaps of at most 0.1 s) come one by one, Poisson. Batch
requests (Azure 2023 code lengths; 30 s and 1 s) are a fifth of all and come in two ways, a cell each:

    jobs     32 at a time, jobs Poisson: what a batch job does
    steady   one by one, Poisson, as the interactive ones

A rate holds when, for *every* seed, at least 90 % of *each* class meet both of their targets: the first token, and every gap.
Rates stand on one ladder with steps of 2.5 %; a seed means the same requests and the same unit gaps for all. fcfs is run under
each static budget and the best of them is the baseline; all other settings are equal.

`rate_over_fcfs` and `max_wait_over_target` are those of the cell `jobs`: the longest wait for a first token, over its own target,
of any request of any seed at the highest rate that `sla-aware` holds. Mistral-7B on an A100 by its data-sheet preset, the engine's
own scheduler; one process, no clock: every run gives the same figures. `make bench NAME=classes`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import azure_traces
import numpy as np
from harness import arguments, emit, made_by, provenance, spread, write_table
from ladder import MIDDLE, STEP, highest, rate_of, ratio, search
from rich.console import Console
from simulated_server import Setup, add_flags, caveat, count, run

from trimtab_tuner.result import ReplayResult
from trimtab_tuner.simulate.presets import Preset, preset
from trimtab_tuner.slo import Slo
from trimtab_tuner.stats import outcomes, ttft_s
from trimtab_tuner.trace import Trace, TraceRequest

INTERACTIVE, BATCH = "interactive", "batch"
SLO = Slo(1.0, 0.1, {INTERACTIVE: Slo(1.0, 0.1), BATCH: Slo(30.0, 1.0)})
BATCH_SHARE = 0.2
JOB = 32  # requests of one batch job
ATTAINMENT = 0.9
CELLS = ("jobs", "steady")
TARGET_RATE, TARGET_WAIT = 2.0, 10.0


SETUPS = (
    *(Setup(f"fcfs {budget}", budget) for budget in (256, 512, 1024, 2048)),
    Setup("sla-aware", 8192, "sla-aware"),
)


@dataclass(frozen=True)
class Run:
    """What one simulation says of the two classes."""

    attainment: dict[str, float]
    max_wait_over_target: float
    median_ttft_s: dict[str, float]

    @property
    def holds(self) -> bool:
        """Enough of each class."""
        return min(self.attainment.values()) >= ATTAINMENT


class Cell:
    """One way in which batch requests come."""

    def __init__(self, name: str, requests: int, preset_name: str) -> None:
        self.name = name
        self._requests = requests
        self._conv, self._code = azure_traces.load("conv"), azure_traces.load("code")
        self._preset: Preset = preset(preset_name)
        self._runs: dict[tuple[str, int, int, int], Run] = {}

    def trace(self, rate_rps: float, seed: int, requests: int) -> Trace:
        """Both classes at `rate_rps` together; the same requests at every rate, closer together."""
        rng = np.random.default_rng(seed)
        num_batch = round(BATCH_SHARE * requests)
        num_interactive = requests - num_batch
        job = JOB if self.name == "jobs" else 1
        at = np.cumsum(rng.standard_exponential(num_interactive)) / (rate_rps * (1 - BATCH_SHARE))
        jobs = np.cumsum(rng.standard_exponential(-(-num_batch // job))) * job / (rate_rps * BATCH_SHARE)
        # A job that would come long after the last interactive request would meet an idle server.
        jobs = jobs[jobs <= at[-1]] if len(jobs) > 1 else jobs
        batch_at = np.repeat(jobs, job)
        chosen = [
            (INTERACTIVE, at, self._conv, rng.choice(len(self._conv.prompt), len(at))),
            (BATCH, batch_at, self._code, rng.choice(len(self._code.prompt), len(batch_at))),
        ]
        rows = [
            TraceRequest(*each, slo_class=name)
            for name, times, lengths, rows in chosen
            for each in zip(
                times.tolist(), lengths.prompt[rows].tolist(), lengths.output[rows].tolist(), strict=True
            )
        ]
        return Trace(tuple(sorted(rows, key=lambda row: row.arrival_s)), "azure 2023 conv + code", "lengths")

    def run(self, setup: Setup, rung: int, seed: int, requests: int | None = None) -> Run:
        """Simulate, once for each question."""
        requests = self._requests if requests is None else requests
        key = (setup.name, rung, seed, requests)
        if key not in self._runs:
            trace = self.trace(rate_of(rung), seed, requests)
            self._runs[key] = judged(run(setup, trace, self._preset, SLO).result)
        return self._runs[key]

    def highest(self, setup: Setup, seeds: int) -> int:
        """The highest rung that the setup holds; a short run tells where to begin the search."""
        short = max(10 * JOB, self._requests // 4)
        guess = search(lambda rung: self.run(setup, rung, 0, short).holds, MIDDLE, stride=16)
        return highest(lambda rung, seed: self.run(setup, rung, seed).holds, seeds, max(0, guess))


def judged(result: ReplayResult) -> Run:
    """Attainment by class, and the longest wait."""
    met: dict[str, list[bool]] = {INTERACTIVE: [], BATCH: []}
    waits: dict[str, list[float]] = {INTERACTIVE: [], BATCH: []}
    for outcome, request in zip(outcomes(result), result.requests, strict=True):
        met[request.slo_class].append(outcome.met)
        wait_s = ttft_s(request)
        assert wait_s is not None, "a simulation runs to its end"
        waits[request.slo_class].append(wait_s)
    return Run(
        {name: sum(each) / len(each) for name, each in met.items()},
        max(max(each) / SLO.of(name).ttft_s for name, each in waits.items()),
        {name: float(np.median(each)) for name, each in waits.items()},
    )


def main() -> None:
    """Search both cells and print; exit 1 when a target is missed."""
    parser = arguments("classes", __doc__)
    parser.add_argument(
        "--requests", type=int, default=1600, help="of both classes, each seed (default 1600)"
    )
    add_flags(parser)
    options = parser.parse_args()
    before = provenance(("numpy",))
    console = Console(stderr=True)
    rows = []
    for name in CELLS:
        cell = Cell(name, options.requests, options.preset)
        rungs = {}
        for setup in SETUPS:
            rungs[setup.name] = cell.highest(setup, options.seeds)
            console.print(f"{name:7s} {setup.name:10s} {rate_of(rungs[setup.name]):6.2f} requests/s")
        rows.append(summary(cell, rungs, range(options.seeds)))
    jobs = rows[0]
    passed = (
        float(str(jobs["rate_over_fcfs"] or 0)) >= TARGET_RATE
        and float(str(jobs["max_wait_over_target"])) <= TARGET_WAIT
    )
    figures: dict[str, object] = {
        "rate_over_fcfs": jobs["rate_over_fcfs"],
        "max_wait_over_target": jobs["max_wait_over_target"],
        "cells": rows,
        "targets": {"rate_over_fcfs": TARGET_RATE, "max_wait_over_target": TARGET_WAIT},
        "passed": passed,
    }
    shape: dict[str, object] = {
        "requests": options.requests,
        "seeds": list(range(options.seeds)),
        "preset": options.preset,
        "lengths": azure_traces.load("conv").source,
        "ladder_step": STEP,
    }
    if options.write:
        write_table("classes", table(figures, rows, shape, before))
    emit("classes", figures, **shape, provenance=before)
    sys.exit(0 if passed else 1)


def summary(cell: Cell, rungs: dict[str, int], seeds: Sequence[int]) -> dict[str, object]:
    """Rates, their ratio, and what the highest rates look like."""
    fcfs = max((name for name in rungs if name.startswith("fcfs")), key=lambda name: rungs[name])
    aware, baseline = SETUPS[-1], next(setup for setup in SETUPS if setup.name == fcfs)
    if rungs[aware.name] < 0:
        raise SystemExit(f"{cell.name}: sla-aware holds no rate at all")
    at = {
        setup.name: [cell.run(setup, rungs[setup.name], seed) for seed in seeds]
        for setup in (aware, baseline)
        if rungs[setup.name] >= 0
    }
    # The same load, which fcfs does not hold: what each makes of it.
    overloaded = [cell.run(baseline, rungs[aware.name], seed) for seed in seeds]
    return {
        "cell": cell.name,
        "rate_over_fcfs": ratio(rungs[aware.name], rungs[fcfs]),
        "max_wait_over_target": round(max(run.max_wait_over_target for run in at[aware.name]), 2),
        "best_fcfs": fcfs,
        "rate_rps": {name: round(rate_of(rung), 3) for name, rung in rungs.items()},
        "attainment": attainments(at[aware.name]),
        "max_wait_over_target_by_seed": spread([run.max_wait_over_target for run in at[aware.name]]),
        "median_ttft_s": {
            name: spread([run.median_ttft_s[name] for run in at[aware.name]]) for name in (INTERACTIVE, BATCH)
        },
        "fcfs_at_that_rate": {
            "attainment": attainments(overloaded),
            "max_wait_over_target": round(max(run.max_wait_over_target for run in overloaded), 2),
        },
    }


def attainments(runs: list[Run]) -> dict[str, dict[str, float]]:
    """By class, over the seeds."""
    return {name: spread([run.attainment[name] for run in runs]) for name in (INTERACTIVE, BATCH)}


def table(
    figures: dict[str, object],
    rows: list[dict[str, object]],
    shape: dict[str, object],
    before: dict[str, object],
) -> str:
    """docs/benchmarks/classes.md."""
    names = [setup.name for setup in SETUPS]
    lines = [
        "# Two classes on one server (simulated)",
        "",
        caveat(shape["preset"], "policies"),
        "How much a policy can do depends on how batch work comes: in jobs it can wait for everybody else, one by one there is little to reorder.",
        f"Lengths: {shape['lengths']} (Azure 2023), interactive = conversation, batch = code, a fifth of {shape['requests']} requests; "
        f"{count(shape['seeds'])} seeds,",
        "all of which must hold; rates on one ladder with steps of 2.5 %.",
        "",
        f"A rate holds when {ATTAINMENT:.0%} of each class meet both targets: interactive 1 s and 0.1 s, batch 30 s and 1 s. `jobs`: {JOB} batch",
        "requests at a time. `fcfs` under the best static budget is the baseline.",
        "",
        "| batch work comes as | " + " | ".join(names) + " | sla-aware / best fcfs | longest wait / target |",
        "|---|" + "---:|" * (len(names) + 2),
    ]
    for row in rows:
        rates = row["rate_rps"]
        assert isinstance(rates, dict)
        lines.append(
            f"| {row['cell']} | "
            + " | ".join(f"{rates[name]:.2f}" for name in names)
            + f" | **{row['rate_over_fcfs']}** | **{row['max_wait_over_target']}** |"
        )
    lines += [
        "",
        f"Requests a second. Targets: ≥ {TARGET_RATE} and ≤ {TARGET_WAIT:g} for `jobs`: **{'met' if figures['passed'] else 'missed'}**.",
        "",
        "At the highest rate of `sla-aware`, median (lowest to highest) over seeds:",
        "",
        "| batch work comes as | class | sla-aware meets | fcfs would meet | sla-aware's median TTFT s |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        for name in (INTERACTIVE, BATCH):
            fcfs = row["fcfs_at_that_rate"]
            assert isinstance(fcfs, dict)
            lines.append(
                f"| {row['cell']} | {name} | {shares(row['attainment'], name)} | {shares(fcfs['attainment'], name)} "
                f"| {seconds(row['median_ttft_s'], name)} |"
            )
    lines += [
        "",
        made_by(before),
        "",
    ]
    return "\n".join(lines)


def shares(by_class: object, name: str) -> str:
    """Median and range in percent."""
    assert isinstance(by_class, dict)
    each = by_class[name]
    return f"{each['median']:.1%} ({each['min']:.1%} to {each['max']:.1%})"


def seconds(by_class: object, name: str) -> str:
    """Median and range."""
    assert isinstance(by_class, dict)
    each = by_class[name]
    return f"{each['median']:.2f} ({each['min']:.2f} to {each['max']:.2f})"


if __name__ == "__main__":
    main()
