"""Serving capacity by Sarathi's rule, simulated: prefill-first, static budgets, vLLM's default, and `sla-aware`.

Capacity is the highest Poisson rate at which at most 1 % of all gaps between tokens are longer than the target and the median
scheduling delay is at most 2 s, for *every* seed. Rates stand on one geometric ladder with steps of 2.5 %, on which every
configuration is bisected; a seed means the same requests and the same unit gaps for all configurations and rates (common
random numbers), so a tie is exactly 1.00. A run ends early as soon as it is certain that the rule is broken.

Every seed's answer at every rung is kept in `out/capacity/` (one file a cell, `--fresh` starts over), so a break loses nothing, and
cells may run in processes of their own (`--traces code` here, `--traces conv` there, then once without). The files name the
sources that they were computed by; with other sources they count for nothing.

Mistral-7B on an A100 by its data-sheet preset: the figures compare configurations with one another on a model of a device; they
are no measurement of the device. One process. `TRIMTAB_TRACES` names a folder with the public Azure files (see azure_traces.py);
without it lengths come from a stand-in of the same quantiles, and the result says so. `make bench NAME=capacity`; a quick
look: `ARGS='--requests 512 --seeds 2 --slo 0.1'`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import azure_traces
from harness import ROOT, arguments, emit, made_by, provenance, write_table
from ladder import FIRST_RPS, MIDDLE, STEP, highest, rate_of, ratio, search
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from simulated_server import MAX_NUM_SEQS, Setup, add_flags, caveat, count, run

from trimtab_engine.core.live import POLICIES
from trimtab_tuner.simulate.presets import preset
from trimtab_tuner.simulate.simulate import simulate
from trimtab_tuner.simulate.stop_rule import StopRule
from trimtab_tuner.slo import Slo

LATE_SHARE = 0.01
DELAY_S = 2.0
# Sums of floating-point times: a gap that equals the target may come out longer by a rounding error.
TOLERANCE_S = 1e-6
BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
VLLM_BUDGET = 2048  # its max_num_batched_tokens there
TARGETS = {"code": 4.0, "conv": 3.0}  # best over prefill-first at the strict SLO
STRICT_S = 0.1
STATE = ROOT / "out" / "capacity"
FIRST_LOOK = 8  # of a run's requests, the share that tells where to begin the search


SETUPS = (
    # Unchunked prompts, batched up to vLLM's default budget or to a generous one; the better of the two is the baseline.
    Setup("prefill-first 2048", 2048, prefill_first=True),
    Setup("prefill-first 8192", 8192, prefill_first=True),
    *(Setup(f"static {budget}", budget) for budget in BUDGETS),
    *((Setup("sla-aware", BUDGETS[-1], "sla-aware"),) if "sla-aware" in POLICIES else ()),
)


class Answers:
    """What has been simulated of one cell: (setup, requests, rung, seed) → whether the rule was kept. In a file."""

    def __init__(self, path: Path, shape: dict[str, object], fresh: bool) -> None:
        self.cpu_s = 0.0
        self._path = path
        self._shape = shape
        self._held: dict[str, bool] = {}
        if not fresh and path.is_file():
            kept = json.loads(path.read_text())
            if kept["shape"] == shape:
                self._held, self.cpu_s = kept["held"], kept["cpu_s"]

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: str) -> bool | None:
        """The answer, if it is known."""
        return self._held.get(key)

    def put(self, key: str, held: bool, cpu_s: float) -> None:
        """Keep an answer, on disk at once."""
        self._held[key] = held
        self.cpu_s += cpu_s
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps({"shape": self._shape, "held": self._held, "cpu_s": self.cpu_s}))
        written.replace(self._path)


class Cell:
    """One trace under one target: asks whether a setup holds a rate, and finds the highest rung that it holds."""

    def __init__(
        self,
        lengths: azure_traces.Lengths,
        slo_s: float,
        requests: int,
        seeds: int,
        preset_name: str,
        fresh: bool,
    ) -> None:
        self.name = lengths.name
        self.slo_s = slo_s
        self._lengths = lengths
        self._requests = requests
        self._seeds = seeds
        self._preset = preset(preset_name)
        shape: dict[str, object] = {
            "sources": sources(),
            "preset": preset_name,
            "lengths": lengths.source,
            "rule": [STEP, FIRST_RPS, LATE_SHARE, DELAY_S, TOLERANCE_S, MAX_NUM_SEQS],
        }
        self.answers = Answers(STATE / f"{lengths.name}-{slo_s:g}.json", shape, fresh)

    def holds(self, setup: Setup, rung: int, seed: int, requests: int) -> bool:
        """Whether the rule is kept at that rung."""
        key = f"{setup.name} {requests} {rung} {seed}"
        held = self.answers.get(key)
        if held is None:
            begun = time.process_time()
            held = self._simulate(setup, rate_of(rung), seed, requests)
            self.answers.put(key, held, time.process_time() - begun)
        return held

    def _simulate(self, setup: Setup, rate_rps: float, seed: int, requests: int) -> bool:
        trace = self._lengths.poisson(requests, rate_rps, seed)
        gaps = sum(request.output_tokens - 1 for request in trace.requests)

        rule = StopRule(
            gap_s=self.slo_s + TOLERANCE_S,
            late_gaps_allowed=int(LATE_SHARE * gaps),
            delay_s=DELAY_S,
            late_starts_allowed=(len(trace) - 1) // 2,
        )
        return not run(setup, trace, self._preset, self._slo, rule).stopped

    @property
    def _slo(self) -> Slo:
        # The rule knows no TTFT; a first token within the delay that it allows is what the policy is asked for.
        return Slo(DELAY_S, self.slo_s)

    def busy(self, setup: Setup, rung: int) -> float:
        """Share of the time in which the device works at that rung: at 1 no scheduler carries more."""
        trace = self._lengths.poisson(self._requests, rate_of(rung), 0)
        server = setup.server(self._preset, self._slo, cache=True)
        done = simulate(trace, self._preset.model, server, slo=self._slo)
        return done.busy_s / float(done.result.meta["elapsed_s"])

    def highest(self, setup: Setup) -> int:
        """The highest rung that every seed holds; -1 for none. A short run tells where to begin the search."""
        short = max(64, self._requests // FIRST_LOOK)
        guess = search(lambda rung: self.holds(setup, rung, 0, short), MIDDLE, stride=16)
        return highest(
            lambda rung, seed: self.holds(setup, rung, seed, self._requests), self._seeds, max(0, guess)
        )


def sources() -> str:
    """A digest of the code that decides what a simulation answers."""
    digest = hashlib.sha256()
    files = [ROOT / "benchmarks" / name for name in ("azure_traces.py", "simulated_server.py")]
    for folder in ("engine/trimtab_engine/core", "tuner/trimtab_tuner/simulate"):
        files += sorted((ROOT / folder).glob("*.py"))
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Run all cells and print; exit 1 when a target of the strict cells is missed."""
    parser = arguments("capacity", __doc__)
    parser.add_argument("--requests", type=int, default=2048, help="requests a probe and seed (default 2048)")
    add_flags(parser)
    parser.add_argument(
        "--slo",
        type=float,
        nargs="+",
        default=[STRICT_S, 0.5],
        help="targets for gaps, seconds (default 0.1 0.5)",
    )
    parser.add_argument("--traces", nargs="+", default=list(azure_traces.NAMES), choices=azure_traces.NAMES)
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    options = parser.parse_args()
    before = provenance(("numpy",))
    cells = [
        Cell(azure_traces.load(name), slo_s, options.requests, options.seeds, options.preset, options.fresh)
        for name in options.traces
        for slo_s in options.slo
    ]
    rows = []
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("capacity", total=len(cells) * len(SETUPS))
        for cell in cells:
            rungs: dict[str, int] = {}
            for setup in SETUPS:
                bar.update(task, description=f"{cell.name} {cell.slo_s:g} s {setup.name}")
                rungs[setup.name] = cell.highest(setup)
                bar.advance(task)
                console.print(
                    f"{cell.name} {cell.slo_s:g} s  {setup.name:20s} {rate_of(rungs[setup.name]):6.2f} requests/s"
                )
            rows.append(summary(cell, rungs))
    strict = [row for row in rows if row["slo"] == STRICT_S]
    ratios = [row["sla_over_best_static"] for row in rows if row["sla_over_best_static"] is not None]
    passed = all(
        float(str(r["best_over_prefill_first"])) >= TARGETS[str(r["trace"])] for r in strict
    ) and all(float(str(ratio)) >= 1.0 for ratio in ratios)
    figures: dict[str, object] = {"cells": rows, "passed": passed}
    shape: dict[str, object] = {
        "requests": options.requests,
        "seeds": list(range(options.seeds)),
        "preset": options.preset,
        "lengths": azure_traces.load(options.traces[0]).source,
        "ladder_step": STEP,
        "cpu_s": round(sum(cell.answers.cpu_s for cell in cells), 1),
    }
    if options.write:
        write_table("capacity", table(rows, shape, before))
    emit("capacity", figures, **shape, targets={"best_over_prefill_first": TARGETS}, provenance=before)
    sys.exit(0 if passed else 1)


def summary(cell: Cell, rungs: dict[str, int]) -> dict[str, object]:
    """The ratios of one cell. Ratios are of ladder rates; None where a side has no capacity or was not run."""
    static = {name: rung for name, rung in rungs.items() if name.startswith("static")}
    best_static = max(static, key=lambda name: static[name])
    prefill_first = max(rung for name, rung in rungs.items() if name.startswith("prefill-first"))
    best = max(rungs, key=lambda name: rungs[name])
    setup = next(setup for setup in SETUPS if setup.name == best)
    return {
        "trace": cell.name,
        "slo": cell.slo_s,
        "best": best,
        "best_static": best_static,
        "best_over_prefill_first": ratio(rungs[best], prefill_first),
        "best_static_over_prefill_first": ratio(static[best_static], prefill_first),
        "best_over_vllm_default": ratio(rungs[best], rungs[f"static {VLLM_BUDGET}"]),
        "sla_over_best_static": ratio(rungs["sla-aware"], static[best_static])
        if "sla-aware" in rungs
        else None,
        "busy_at_best": round(cell.busy(setup, rungs[best]), 3),
        "capacity_rps": {name: round(rate_of(rung), 3) for name, rung in rungs.items()},
        "simulations": len(cell.answers),
    }


def table(rows: list[dict[str, object]], shape: dict[str, object], before: dict[str, object]) -> str:
    """docs/benchmarks/capacity.md."""
    names = [setup.name for setup in SETUPS]
    lines = [
        "# Capacity under a target for the gaps between tokens (simulated)",
        "",
        caveat(shape["preset"], "configurations"),
        f"Lengths: {shape['lengths']} (Azure 2023). {shape['requests']} requests a probe, {count(shape['seeds'])} seeds, all of which "
        "must keep the rule; rates on one ladder with steps of 2.5 %. `static 2048` with 256 sequences is vLLM's default here.",
        "",
        "Rule: at most 1 % of all gaps longer than the target, median scheduling delay at most 2 s.",
        "",
        "| trace, target | "
        + " | ".join(names)
        + " | best / prefill-first | sla-aware / best static | device busy at the best |",
        "|---|" + "---:|" * (len(names) + 3),
    ]
    for row in rows:
        capacities = row["capacity_rps"]
        assert isinstance(capacities, dict)
        lines.append(
            f"| {row['trace']}, {row['slo']} s | "
            + " | ".join(f"{capacities[name]:.2f}" for name in names)
            + f" | **{row['best_over_prefill_first']}** | **{row['sla_over_best_static']}** "
            + f"| {float(str(row['busy_at_best'])):.1%} |"
        )
    lines += [
        "",
        "Requests a second. The baseline is the better of the two prefill-first columns; it gives decodes what prompts leave of a step,",
        "which is kinder to them than steps of prompts alone. Where the device is busy all the time, no scheduler carries more: that",
        "bounds the ratio to the baseline. Targets at 0.1 s: best / prefill-first ≥ "
        + " and ≥ ".join(f"{target:g} for {name}" for name, target in TARGETS.items())
        + "; sla-aware / best static ≥ 1 everywhere.",
        "",
        made_by(before, f"{shape['cpu_s']} s of CPU"),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
