"""How punctual the replayer is: send-time error at 100 requests a second against a dummy server.

Send-time error = when a request was handed to the socket − when the trace wanted it. Poisson arrivals, 512-token prompts,
16 tokens each; the dummy server is a process of its own on the same machine. `make bench NAME=replay_accuracy`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
from harness import arguments, emit, provenance, spread, write_table

from trimtab_tuner.burstiness import WINDOWS_S
from trimtab_tuner.replay import ReplayOptions, replay
from trimtab_tuner.slo import Slo
from trimtab_tuner.stats import Summary, summarise
from trimtab_tuner.trace import Trace, TraceRequest

TARGET_MS = 5.0


def main() -> None:
    """Run the repeats, print one line each, end with the JSON line."""
    parser = arguments("replay_accuracy", __doc__)
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second (default 100)")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of one repeat (default 20)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="repeats, each with its own arrivals (default 3)"
    )
    args = parser.parse_args()
    context = provenance(("numpy",))
    count = round(args.rate * args.seconds)
    trace = Trace(
        tuple(TraceRequest(index / args.rate, 512, 16) for index in range(count)), "even", "records"
    )
    server = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("dummy_openai.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None, "piped"
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        runs = [measure(trace, url, seed) for seed in range(args.repeats)]
    finally:
        if server.stdin is not None:
            server.stdin.close()
        server.wait(timeout=10)
    figures = {
        "send_error_p99_ms": max(run["p99_ms"] for run in runs),
        "send_error_p50_ms": max(run["p50_ms"] for run in runs),
        "send_error_max_ms": max(run["max_ms"] for run in runs),
        "timer_floor_p99_ms": max(run["timer_floor_p99_ms"] for run in runs),
        "failed": sum(run["failed"] for run in runs),
        "dispersion_error": max(run["dispersion_error"] for run in runs),
    }
    repeats = {
        f"{key}_spread": spread([run[key] for run in runs])
        for key in ("p50_ms", "p99_ms", "max_ms", "timer_floor_p99_ms")
    }
    shape = {
        "rate_rps": args.rate,
        "seconds": args.seconds,
        "requests_per_repeat": count,
        "seeds": list(range(args.repeats)),
    }
    if args.write:
        write_table("replay_accuracy", table(runs, figures, shape, context))
    emit(
        "replay_accuracy",
        {key: round(value, 4) for key, value in figures.items()},
        **repeats,
        **shape,
        **context,
    )


def timer_floor_ms(gap_s: float = 0.01, count: int = 300) -> float:
    """p99 of how late a bare sleep wakes up: what no sender on this machine can beat at this moment."""

    async def sleep() -> list[float]:
        loop = asyncio.get_running_loop()
        late = []
        begun = loop.time()
        for number in range(1, count + 1):
            due = begun + number * gap_s
            await asyncio.sleep(due - loop.time())
            late.append((loop.time() - due) * 1e3)
        return late

    return float(np.quantile(asyncio.run(sleep()), 0.99))


def measure(trace: Trace, url: str, seed: int) -> dict[str, float]:
    """One repeat."""
    floor_ms = timer_floor_ms()
    options = ReplayOptions(prompt_seed=seed)
    result = replay(trace, url, slo=Slo(1.0, 0.1), mode="poisson", seed=seed, options=options)
    summary = summarise(result)
    error = summary.send_error
    run = {
        **{f"{name}_ms": (getattr(error, name) or 0.0) * 1e3 for name in ("p50", "p99", "max")},
        "timer_floor_p99_ms": floor_ms,
        "failed": float(summary.n_failed),
        "dispersion_error": dispersion_error(result.meta["burstiness_intended"], summary),
        "ttft_p99_ms": (summary.ttft.p99 or 0.0) * 1e3,
    }
    print(f"seed {seed}: " + ", ".join(f"{key} {value:.3f}" for key, value in run.items()), file=sys.stderr)
    return run


def dispersion_error(intended: dict[str, float | None], summary: Summary) -> float:
    """Largest relative difference of the index of dispersion of what was sent, over the windows that fit."""
    sent = summary.burstiness_sent or {}
    pairs = [(intended[key], sent.get(key)) for key in (f"dispersion_{window:g}s" for window in WINDOWS_S)]
    return max((abs(b / a - 1.0) for a, b in pairs if a and b is not None), default=0.0)


def table(
    runs: list[dict[str, float]],
    figures: dict[str, float],
    shape: dict[str, object],
    context: dict[str, object],
) -> str:
    """The page in docs/benchmarks."""
    lines = [
        "# Replay accuracy",
        "",
        "Caveats first: the dummy server shares the machine's cores with the replayer, and so does whatever else runs there",
        f"(load average before the run: {context['load_before']} on {context['cores']} cores). Loopback only; no TLS.",
        "",
        f"Poisson arrivals at {shape['rate_rps']:g} requests a second for {shape['seconds']:g} s, 512-token prompts, 16 tokens each.",
        "Send-time error = handed to the socket − intended time. The worst repeat counts.",
        "",
        "| seed | send error p50 (ms) | p99 (ms) | max (ms) | bare sleep p99 (ms) | failed | dispersion error |",
        "|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {seed} | {run['p50_ms']:.2f} | {run['p99_ms']:.2f} | {run['max_ms']:.2f} | {run['timer_floor_p99_ms']:.2f} | {run['failed']:.0f} | {run['dispersion_error']:.1%} |"
            for seed, run in enumerate(runs)
        ),
        "",
        f"**send_error_p99_ms = {figures['send_error_p99_ms']:.2f}** (target ≤ {TARGET_MS:g}). Dispersion error: largest relative difference",
        "between the index of dispersion (1, 10, 60 s, where they fit) of what was sent and of what was intended. Bare sleep: how late",
        "an event loop that does nothing else wakes up just before each repeat; on a busy machine it sets the floor.",
        "",
        f"Command: `{context['command']}` at commit {context['commit']};"
        f" Python {context['python']}, numpy {context['packages']['numpy']}, {context['cpu']}.",  # type: ignore[index]
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
