"""How much long prompts stall running streams: p99 ITL at the tuned budget against `prefill-first`, in one run.

Four streams decode (prefix caching off); 1,500-token prompts arrive among them at a fixed interval, the same intended times for both arms, so
the offered prefill rate is equal; the achieved one is reported and must agree. Arms alternate (A B A B …), each with a fresh
engine. The budget is tuned first, live, on one engine, with another seed: of the grid, the budget with the lowest p99 ITL
among those at which the prompts keep up with their arrivals.

`make bench NAME=interference` prints one JSON line: `itl_p99_ratio` is the ratio of the arms' medians over the repeats.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise

import httpx
import numpy as np
from engine_process import DEMO_MODEL, Served, serve
from harness import arguments, emit, provenance, spread, write_table

STREAMS = 4
PROMPT_TOKENS = 1_500
# Without prefix hits, which would make a prompt that was seen before free.
FLAGS = ("--max-num-seqs", "16", "--no-enable-prefix-caching")
GRID = (32, 64, 128, 256)


@dataclass(frozen=True)
class Arm:
    """One measured pass."""

    itl_p50_s: float
    itl_p99_s: float
    itl_max_s: float
    gaps: int
    prefill_tokens_per_s: float  # from the first arrival to the last first token
    prompt_ttft_p50_s: float
    kept_up: bool  # the last prompt had its first token within one interval after its arrival


def main() -> None:
    """Tune, measure both arms, print."""
    parser = arguments("interference", __doc__)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--prompts", type=int, default=5, help="long prompts per pass")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--load", type=float, default=0.5, help="prefill load offered, as a share of the lone prefill rate"
    )
    options = parser.parse_args()
    before = provenance(["torch"])

    with serve(options.model, FLAGS) as engine:
        lone_s = statistics.median(asyncio.run(lone_prompts(engine, seed)) for seed in (901, 902, 903))
        interval_s = lone_s / options.load
        say(f"a lone prompt takes {lone_s:.2f} s; one every {interval_s:.2f} s from here on")
        sweep: dict[int, Arm] = {}
        for budget in GRID:
            engine.set_live(max_num_batched_tokens=budget)
            sweep[budget] = asyncio.run(one_pass(engine, options.prompts, interval_s, seed=100))
            say(f"budget {budget:4d}: {line(sweep[budget])}")
    eligible = {b: arm for b, arm in sweep.items() if arm.kept_up} or sweep
    tuned = min(eligible, key=lambda b: eligible[b].itl_p99_s)
    say(f"tuned budget: {tuned}")

    arms: dict[str, list[Arm]] = {"prefill-first": [], "tuned": []}
    for repeat in range(options.repeats):
        for name in arms:
            flags = ["--prefill-first"] if name == "prefill-first" else []
            with serve(options.model, [*FLAGS, *flags]) as engine:
                engine.set_live(max_num_batched_tokens=2048 if flags else tuned)
                arm = asyncio.run(one_pass(engine, options.prompts, interval_s, seed=repeat))
            arms[name].append(arm)
            say(f"repeat {repeat} {name:14s} {line(arm)}")

    p99 = {name: [arm.itl_p99_s for arm in runs] for name, runs in arms.items()}
    rate = {name: statistics.median(arm.prefill_tokens_per_s for arm in runs) for name, runs in arms.items()}
    figures: dict[str, object] = {
        "itl_p99_ratio": round(statistics.median(p99["tuned"]) / statistics.median(p99["prefill-first"]), 4),
        "tuned_budget": tuned,
        "itl_p99_s": {name: spread(values) for name, values in p99.items()},
        "prefill_rate_ratio": round(rate["tuned"] / rate["prefill-first"], 3),
        "prefill_tokens_per_s": {name: round(value, 1) for name, value in rate.items()},
        "interval_s": round(interval_s, 3),
        "sweep_itl_p99_s": {str(b): round(arm.itl_p99_s, 4) for b, arm in sweep.items()},
        "targets": {"itl_p99_ratio": 0.25},
    }
    if options.write:
        write_table("interference", table(figures, arms, sweep, before))
    emit(
        "interference",
        figures,
        repeats=options.repeats,
        seeds=[100, *range(options.repeats)],
        provenance=before,
    )


async def lone_prompts(engine: Served, seed: int) -> float:
    """Seconds for one long prompt with nothing else running."""
    async with client() as http:
        begun = time.monotonic()
        await stream(http, engine, tokens(seed, PROMPT_TOKENS, engine), max_tokens=1)
        return time.monotonic() - begun


async def one_pass(engine: Served, prompts: int, interval_s: float, seed: int) -> Arm:
    """Streams first; once all decode, prompts at fixed intended times; gaps count from the first arrival to the last answer."""
    async with client() as http:
        times: list[list[float]] = [[] for _ in range(STREAMS)]
        decoding = [
            asyncio.create_task(
                stream(http, engine, tokens(seed * 1000 + i, 16, engine), max_tokens=100_000, times=times[i])
            )
            for i in range(STREAMS)
        ]
        while any(len(each) < 5 for each in times):
            await asyncio.sleep(0.01)
        begun = time.monotonic()
        arrivals = [begun + i * interval_s for i in range(prompts)]
        answers = await asyncio.gather(
            *(
                arrive(http, engine, at, tokens(seed * 1000 + 500 + i, PROMPT_TOKENS, engine))
                for i, at in enumerate(arrivals)
            )
        )
        end = max(answers)
        for task in decoding:
            task.cancel()
        await asyncio.gather(*decoding, return_exceptions=True)
    gaps = [b - a for each in times for a, b in pairwise(each) if b > begun and a < end]
    return Arm(
        itl_p50_s=float(np.quantile(gaps, 0.5)),
        itl_p99_s=float(np.quantile(gaps, 0.99)),
        itl_max_s=max(gaps),
        gaps=len(gaps),
        prefill_tokens_per_s=prompts * PROMPT_TOKENS / (end - begun),
        prompt_ttft_p50_s=statistics.median(
            answer - at for answer, at in zip(answers, arrivals, strict=True)
        ),
        kept_up=answers[-1] - arrivals[-1] <= interval_s,
    )


async def arrive(http: httpx.AsyncClient, engine: Served, at: float, prompt: list[int]) -> float:
    """Send at the intended time; the moment of the answer."""
    await asyncio.sleep(max(0.0, at - time.monotonic()))
    await stream(http, engine, prompt, max_tokens=1)
    return time.monotonic()


async def stream(
    http: httpx.AsyncClient,
    engine: Served,
    prompt: list[int],
    max_tokens: int,
    times: list[float] | None = None,
) -> None:
    """One streamed completion; appends the arrival time of each chunk with text."""
    info = await http.get(f"{engine.url}/v1/models")
    room = int(info.json()["data"][0]["max_model_len"]) - len(prompt) - 1
    body = {
        "model": engine.model,
        "prompt": prompt,
        "max_tokens": min(max_tokens, room),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with http.stream("POST", f"{engine.url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(
                f"the engine answered {response.status_code}: {(await response.aread()).decode()[:500]}"
            )
        async for data in response.aiter_lines():
            if data.startswith("data: {") and times is not None:
                times.append(time.monotonic())


def client() -> httpx.AsyncClient:
    """No limits and no timeouts: the client must not shape the load."""
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))


def tokens(seed: int, count: int, engine: Served) -> list[int]:
    """Seeded random token ids, clear of special ones; no two prompts share a prefix."""
    draw = random.Random(seed)
    return [draw.randrange(1_000, engine.vocab_size - 1_000) for _ in range(count)]


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def line(arm: Arm) -> str:
    """One arm in words."""
    return (
        f"ITL p50 {arm.itl_p50_s * 1e3:6.0f}  p99 {arm.itl_p99_s * 1e3:6.0f}  max {arm.itl_max_s * 1e3:6.0f} ms (n={arm.gaps})"
        f"  prompts {arm.prefill_tokens_per_s:5.0f} tokens/s, TTFT p50 {arm.prompt_ttft_p50_s:5.2f} s"
        + ("" if arm.kept_up else "  did not keep up")
    )


def table(
    figures: dict[str, object], arms: dict[str, list[Arm]], sweep: dict[int, Arm], machine: dict[str, object]
) -> str:
    """The page for docs/benchmarks."""
    rows = [
        f"| {name} | {index} | {arm.itl_p50_s * 1e3:.0f} | {arm.itl_p99_s * 1e3:.0f} | {arm.itl_max_s * 1e3:.0f} | {arm.gaps} "
        f"| {arm.prefill_tokens_per_s:.0f} | {arm.prompt_ttft_p50_s:.2f} |"
        for name, runs in arms.items()
        for index, arm in enumerate(runs)
    ]
    swept = [
        f"| {budget} | {arm.itl_p50_s * 1e3:.0f} | {arm.itl_p99_s * 1e3:.0f} | {arm.prompt_ttft_p50_s:.2f} "
        f"| {'yes' if arm.kept_up else 'no'} |"
        for budget, arm in sweep.items()
    ]
    return "\n".join(
        [
            "# Interference of long prompts with running streams",
            "",
            f"Caveats: a shared machine (load {machine['load_before']} before the run); gaps within one step are one event, so the",
            "effective sample is steps, not tokens; a pass has few prompts. Times are this machine's, the ratio is the result.",
            "",
            f"**p99 ITL at the tuned budget / prefill-first: {figures['itl_p99_ratio']}** (target ≤ 0.25), "
            f"prefill rate ratio {figures['prefill_rate_ratio']}, tuned budget {figures['tuned_budget']}.",
            "",
            f"{STREAMS} decoding streams, {PROMPT_TOKENS}-token prompts every {figures['interval_s']} s.",
            "",
            "| arm | repeat | ITL p50 ms | p99 ms | max ms | gaps | prompt tokens/s | prompt TTFT p50 s |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            "The sweep that chose the budget (seed 100, one pass each, live on one engine):",
            "",
            "| budget | ITL p50 ms | p99 ms | prompt TTFT p50 s | kept up |",
            "|---|---|---|---|---|",
            *swept,
            "",
            f"Measured by `{machine['command']}` at commit {machine['commit']} on {machine['cpu']}, {machine['cores']} cores,",
            f"Python {machine['python']}, {machine['packages']}, OMP_NUM_THREADS={machine['omp_num_threads']}.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
