"""How much faster than real time the simulator is, with the real scheduler, at 5 requests a second on one core.

Azure 2023 conversation lengths, Poisson arrivals, Mistral-7B on an A100 by its preset, budget 512. Speed is simulated seconds over
seconds of CPU of this process: on a machine that others use, wall time measures them too (it is reported beside it). Each run
is repeated without skipping ahead, and both must come out equal in every token time. `make bench NAME=simulator_speed`.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass

import azure_traces
from harness import arguments, emit, provenance, spread, write_table

from trimtab_engine.core.live import LiveConfig
from trimtab_tuner.simulate.presets import preset
from trimtab_tuner.simulate.simulate import Server, Simulation, simulate
from trimtab_tuner.slo import Slo
from trimtab_tuner.trace import Trace

TARGET = 200.0
PRESET = "a100-80gb/mistral-7b"


@dataclass(frozen=True)
class Timed:
    """One simulation and what it took."""

    simulation: Simulation
    cpu_s: float
    wall_s: float

    @property
    def times_real_time(self) -> float:
        """Simulated seconds a second of CPU."""
        return float(self.simulation.result.meta["elapsed_s"]) / self.cpu_s


def main() -> None:
    """Measure and print; exit 1 when the target is missed or skipping ahead changed something."""
    parser = arguments("simulator_speed", __doc__)
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second (default 5)")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    before = provenance(("numpy",))
    lengths = azure_traces.load("conv")
    skipped, stepped = [], []
    for seed in range(options.repeats):
        trace = lengths.poisson(options.requests, options.rate, seed)
        fast, slow = (timed(trace, options.budget, skip) for skip in (True, False))
        if fast.simulation.result.requests != slow.simulation.result.requests:
            raise SystemExit(f"seed {seed}: skipping ahead changed token times")
        skipped.append(fast)
        stepped.append(slow)
        print(
            f"seed {seed}: {fast.times_real_time:.0f} times real time, {slow.times_real_time:.0f} step by step",
            file=sys.stderr,
        )
    speeds = spread([each.times_real_time for each in skipped])
    steps = sum(each.simulation.num_steps for each in skipped)
    figures: dict[str, object] = {
        "times_real_time": round(speeds["median"], 1),
        "times_real_time_spread": speeds,
        "times_real_time_step_by_step": spread([each.times_real_time for each in stepped]),
        "times_real_time_by_wall": spread(
            [float(each.simulation.result.meta["elapsed_s"]) / each.wall_s for each in skipped]
        ),
        "identical": True,
        "steps": steps,
        "skipped_share": round(sum(each.simulation.num_skipped for each in skipped) / steps, 4),
        "target": TARGET,
        "passed": speeds["median"] >= TARGET,
    }
    shape = {
        "rate_rps": options.rate,
        "requests": options.requests,
        "budget": options.budget,
        "preset": PRESET,
        "lengths": lengths.source,
        "seeds": list(range(options.repeats)),
    }
    if options.write:
        write_table("simulator_speed", table(skipped, stepped, figures, shape, before))
    emit("simulator_speed", figures, **shape, provenance=before)
    sys.exit(0 if figures["passed"] else 1)


def timed(trace: Trace, budget: int, skip_ahead: bool) -> Timed:
    """Simulate once, with the collector quiet."""
    known = preset(PRESET)
    live = LiveConfig(max_num_batched_tokens=budget, max_num_seqs=256)
    server = Server(known.name, live, known.num_blocks, max_model_len=known.max_model_len)
    gc.collect()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    simulation = simulate(trace, known.model, server, slo=Slo(1.0, 0.1), skip_ahead=skip_ahead)
    return Timed(simulation, time.process_time() - cpu_s, time.perf_counter() - wall_s)


def table(
    skipped: list[Timed],
    stepped: list[Timed],
    figures: dict[str, object],
    shape: dict[str, object],
    before: dict[str, object],
) -> str:
    """docs/benchmarks/simulator_speed.md."""
    lines = [
        "# Speed of the simulator",
        "",
        "Caveats first: simulated seconds over seconds of CPU of one process; the machine below was shared, so wall time was",
        f"longer (load average {before['load_before']} on {before['cores']} cores at the start). Lengths: {shape['lengths']}.",
        "",
        f"{shape['requests']} conversations of Azure 2023 at {shape['rate_rps']:g} a second (Poisson), {shape['preset']}, budget "
        f"{shape['budget']}, the engine's own scheduler.",
        "",
        f"**times_real_time = {figures['times_real_time']}** (target ≥ {TARGET:g}): "
        f"{'met' if figures['passed'] else 'missed'}. {figures['skipped_share']:.0%} of the steps are skipped over; every token time "
        "equals the step-by-step run's.",
        "",
        "| seed | times real time | step by step | steps | skipped | by wall clock |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for seed, (fast, slow) in enumerate(zip(skipped, stepped, strict=True)):
        simulated_s = float(fast.simulation.result.meta["elapsed_s"])
        lines.append(
            f"| {seed} | {fast.times_real_time:.0f} | {slow.times_real_time:.0f} | {fast.simulation.num_steps:,} "
            f"| {fast.simulation.num_skipped / fast.simulation.num_steps:.0%} | {simulated_s / fast.wall_s:.0f} |"
        )
    lines += [
        "",
        f"{before['cpu']}, Python {before['python']}, commit {before['commit']}.",
        "",
        "Reproduce: `make bench NAME=simulator_speed ARGS=--write`.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
