"""`make demo`: one service, real traffic, before and after tuning, on this machine and without a cluster.

Starts the service of `examples/chat.yaml` with `trimtab-operator local`, replays the shipped segment evenly spaced and as it
came (bursty), lets `trimtab-tuner run` retune the running engine, replays again, and writes the report. Nothing restarts in
between. The segment is sized from this machine's own step times (its span, and its lengths where the longest span would not
do), and targets that no config could meet here are widened: the demo shall show scheduling, not a drowned machine.
Ctrl-C, or the end of this process by any means, ends the service as well.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from trimtab_tuner import plots
from trimtab_tuner import trace as traces
from trimtab_tuner.errors import TunerError
from trimtab_tuner.progress import ProgressDisplay
from trimtab_tuner.replay import ReplayOptions, replay
from trimtab_tuner.result import ReplayResult
from trimtab_tuner.slo import Slo
from trimtab_tuner.stats import Summary, summarise
from trimtab_tuner.tables import summary_table
from trimtab_tuner.trace import Trace

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
# Share of the engine's time that the segment shall take: busy enough to queue in bursts, far from overload.
LOAD = 0.65
# Seconds of one replay: at least, usually at most, at most. Seven of them, or nine, stay under twelve minutes.
SPAN_S = (30.0, 45.0, 60.0)
# Of the segment's lengths at most; beyond it too few gaps between tokens are left to speak of their p99.
MAX_DIVISOR = 3.0
# A target below these multiples could not be met by any config: of a decode step, and of the longest prompt alone.
ITL_STEPS, TTFT_PROMPTS = 5.0, 1.5
# The incumbent, one candidate, its confirmation, and a second look at both.
MIN_TRIALS = 5

console = Console(highlight=False)
console.width = max(console.width, 100)


@dataclass(frozen=True)
class Service:
    """Where the running service is, and the file that it follows."""

    url: str
    control_url: str
    file: Path


@dataclass(frozen=True)
class StepTimes:
    """What this machine does, measured on the idle service."""

    prefill_tokens_per_s: float
    decode_step_s: float


def main() -> int:
    """Run the demo; the exit code is 0 when every request of every replay was answered."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--service", default=str(ROOT / "examples" / "chat.yaml"))
    parser.add_argument("--trace", default=str(ROOT / "examples" / "traces" / "mixed_bursty.jsonl"))
    parser.add_argument("--out", default="out/demo", help="results and report (default out/demo)")
    parser.add_argument(
        "--max-trials", type=int, default=5, metavar="N", help="replays while tuning, at most (default 5)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.max_trials < MIN_TRIALS:
        parser.error(f"--max-trials: {options.max_trials} is not allowed; a whole number ≥ {MIN_TRIALS}")
    try:
        segment = traces.load(options.trace)
    except TunerError as error:
        parser.error(str(error))
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    console.print(
        f"[bold]Trimtab demo[/] · SmolLM2-135M-Instruct on {os.cpu_count()} CPU cores · about 10 minutes, "
        "Ctrl-C stops everything"
    )
    try:
        with running_service(Path(options.service), out) as service:
            code = demonstrate(service, segment, out, options.max_trials, options.seed)
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running")
        return 130
    console.print(f"  took            {(time.monotonic() - began) / 60:.1f} minutes")
    return code


def demonstrate(service: Service, segment: Trace, out: Path, max_trials: int, seed: int) -> int:
    """Replay, tune, replay, report."""
    times = measure_steps(service)
    trace = sized(segment, times)
    given = targets_in_force(service)
    targets = fitting_targets(given, trace, times)
    if targets != given:
        follow_targets(service, targets)
    path = out / "segment.jsonl"
    traces.save(trace, path)
    divided = "".join(f" ({change})" for change in trace.changes if change.startswith("lengths"))
    longest = max(request.prompt_tokens for request in trace.requests)
    console.print(
        f"  this machine    {times.prefill_tokens_per_s:,.0f} prompt tokens/s, a decode step {times.decode_step_s * 1e3:.0f} ms"
        f" → {len(trace)} requests{divided}, the longest {longest:,} tokens, over {trace.span_s:.0f} s; targets: first token {targets.ttft_s:g} s, "
        f"gaps {targets.itl_s * 1e3:.0f} ms"
    )
    results: dict[str, ReplayResult] = {}
    for name, mode in (("uniform, before", "uniform"), ("bursty, before", "recorded")):
        results[name] = measure(service, trace, targets, name, mode, out, seed)
    tuned = run_tool(
        *(
            "trimtab-tuner",
            "run",
            "--control",
            service.control_url,
            "--trace",
            str(path),
            "--mode",
            "recorded",
        ),
        # Two of the trials are kept for a second look at both, should the first confirmation be inconclusive.
        *(
            "--max-trials",
            str(max_trials - 2),
            "--confirm-rounds",
            "2",
            "--seed",
            str(seed),
            "--out",
            str(out / "tuned"),
            "--apply",
        ),
    )
    if tuned not in (0, 1):
        raise SystemExit(f"trimtab-tuner run ended with exit code {tuned}")
    for name, mode in (("uniform, after", "uniform"), ("bursty, after", "recorded")):
        results[name] = measure(service, trace, targets, name, mode, out, seed)
    summaries = {name.replace(", ", "\n"): summarise(result) for name, result in results.items()}
    console.print()
    console.print(summary_table(summaries, title="[bold]the same requests in the same order[/]"))
    console.print(f"  {live_config_line(service)}")
    draw_figure(results, out / "figure.svg")
    report = out / "report.html"
    files = [f"{name.replace(', ', ' ')}={out / file_name(name)}" for name in results]
    run_tool(
        "trimtab-tuner",
        "report",
        *files,
        "--run",
        str(out / "tuned" / "result.json"),
        "--out",
        str(report),
        quiet=True,
    )
    console.print(f"  report          {report}")
    return exit_code(summaries)


def draw_figure(results: dict[str, ReplayResult], path: Path) -> None:
    """Time to first token and gaps of the bursty replays, before and after: the figure of the README."""
    bursty = {name: result for name, result in results.items() if name.startswith("bursty")}
    figure = plots.distributions(bursty, dict(zip(bursty, ("#d1495b", "#2a9d8f"), strict=True)))
    path.write_text(plots.to_svg(figure))


def exit_code(summaries: dict[str, Summary]) -> int:
    """0 when nothing failed: slow is a result, lost is a defect."""
    return 1 if any(summary.n_failed for summary in summaries.values()) else 0


@contextlib.contextmanager
def running_service(file: Path, out: Path) -> Iterator[Service]:
    """`trimtab-operator local` for the length of the block. The kernel ends it should this process die."""
    shutil.rmtree(
        out / "state", ignore_errors=True
    )  # else the service would begin with an earlier demo's recommendation
    followed = out / "chat.yaml"
    shutil.copyfile(file, followed)
    ready_file = out / "service.json"
    ready_file.unlink(missing_ok=True)
    log_path = out / "service.log"
    began = time.monotonic()
    with log_path.open("wb") as log:
        operator = subprocess.Popen(
            [
                str(BIN / "trimtab-operator"),
                *("local", "-f", str(followed), "--port", "0", "--control-port", "0", "--plain"),
                *("--state-dir", str(out / "state"), "--ready-file", str(ready_file)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    try:
        with console.status("  service chat    starting (the first start on a machine converts the model)"):
            while not ready_file.exists():
                if operator.poll() is not None:
                    raise SystemExit(f"the service did not start:\n{log_path.read_text()[-3000:]}")
                time.sleep(0.05)
        where = json.loads(ready_file.read_text())
        service = Service(where["url"].removesuffix("/v1"), where["control_url"], followed)
        console.print(
            f"  service chat    Ready in {time.monotonic() - began:.1f} s · {service.url}/v1 · {live_config_line(service)}"
        )
        yield service
    finally:
        operator.send_signal(signal.SIGTERM)
        try:
            operator.wait(30)
        except subprocess.TimeoutExpired:
            operator.kill()


def _die_with_parent() -> None:
    """In the child, between fork and exec: SIGTERM when the parent's thread ends (PR_SET_PDEATHSIG = 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def measure_steps(service: Service) -> StepTimes:
    """Prompt rate and decode step from a few lone requests: what the segment's speed is sized by."""
    with httpx.Client(base_url=service.url, timeout=300) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        prefill, decode = [], []
        for number in range(3):
            prompt = [1000 + (number * 7919 + i * 31) % 40_000 for i in range(512)]
            times = stream_times(http, model, prompt, max_tokens=12)
            prefill.append(512 / times[1])
            decode.append((times[-1] - times[1]) / (len(times) - 2))
    return StepTimes(statistics.median(prefill), statistics.median(decode))


def stream_times(http: httpx.Client, model: str, prompt: list[int], max_tokens: int) -> list[float]:
    """Seconds after the send: 0, then each chunk that carried a token."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    began = time.monotonic()
    times = [0.0]
    with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.read() if answer.status_code != 200 else None
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic() - began)
    return times


def sized(segment: Trace, times: StepTimes) -> Trace:
    """The segment, spread so that it takes LOAD of the engine's time, and with shorter requests where that takes too long.

    Prompts cost their tokens at the prompt rate; outputs cost a decode step each, shared by about two streams.
    """
    prompt_s = sum(request.prompt_tokens for request in segment.requests) / times.prefill_tokens_per_s
    output_s = sum(request.output_tokens for request in segment.requests) * times.decode_step_s / 2
    needed_s = (prompt_s + output_s) / LOAD
    least, usual, most = SPAN_S
    divisor = min(MAX_DIVISOR, round(needed_s / usual + 0.05, 1))
    if divisor > 1:
        segment = segment.scale_lengths(divisor)
        needed_s /= divisor
    return segment.scale_to_span(min(max(needed_s, least), most))


def targets_in_force(service: Service) -> Slo:
    """Targets of the service's default class, as the engine has them."""
    config = httpx.get(f"{service.control_url}/admin/live-config", timeout=30).json()["in_force"]["config"]
    default = next(c for c in config["slo"]["classes"] if c["name"] == config["slo"]["default_class"])
    return Slo(ttft_s=default["ttft_s"], itl_s=default["itl_s"])


def fitting_targets(given: Slo, trace: Trace, times: StepTimes) -> Slo:
    """The service's targets, or wider ones where this machine could meet them under no config."""
    longest_s = max(request.prompt_tokens for request in trace.requests) / times.prefill_tokens_per_s
    return Slo(
        ttft_s=max(given.ttft_s, round(2 * TTFT_PROMPTS * longest_s) / 2),
        itl_s=max(given.itl_s, round(ITL_STEPS * times.decode_step_s * 20) / 20),
    )


def follow_targets(service: Service, targets: Slo) -> None:
    """Edit the service's file, as a person would, and wait until the running engine has the targets."""
    text = service.file.read_text()
    text = re.sub(r"(?m)^    ttft: .*$", f"    ttft: {targets.ttft_s * 1000:.0f}ms", text)
    text = re.sub(r"(?m)^    itl: .*$", f"    itl: {targets.itl_s * 1000:.0f}ms", text)
    service.file.write_text(text)
    for _ in range(300):
        if targets_in_force(service) == targets:
            return
        time.sleep(0.1)
    raise SystemExit(f"the edit of {service.file} did not reach the engine within 30 s")


def measure(
    service: Service, trace: Trace, targets: Slo, name: str, mode: str, out: Path, seed: int
) -> ReplayResult:
    """One replay with its bar; raw samples go to a file."""
    with ProgressDisplay(f"  replay {name:17s}") as display:
        result = replay(
            trace,
            service.url,
            slo=targets,
            mode=mode,
            seed=seed,
            options=ReplayOptions(prompt_seed=seed + len(name)),
            observer=display,
        )
    if result.meta["interrupted"]:
        raise KeyboardInterrupt
    result.save(out / file_name(name), summarise(result).to_json())
    return result


def file_name(name: str) -> str:
    """Result file of one replay."""
    return name.replace(", ", "-") + ".json"


def live_config_line(service: Service) -> str:
    """The live config in force, in words."""
    force = httpx.get(f"{service.control_url}/admin/live-config", timeout=30).json()["in_force"]
    config = force["config"]
    return (
        f"{config['max_num_batched_tokens']:,} tokens a step · {config['scheduling_policy']} · "
        f"generation {force['generation']} ({force['source']})"
    )


def run_tool(*command: str, quiet: bool = False) -> int:
    """One of our own commands on this terminal; Ctrl-C reaches it and us. `quiet` shows only what failed."""
    done = subprocess.run([str(BIN / command[0]), *command[1:]], capture_output=quiet, text=True, check=False)
    if quiet and done.returncode:
        print(done.stderr, file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
