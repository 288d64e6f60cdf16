"""Replay a trace on a simulated server: the engine's own scheduler, step times from a model, no server and no waiting.

  trimtab-tuner simulate --preset a100-80gb/mistral-7b --trace TRACE.csv --mode poisson --budget 512 --out b512.json
  trimtab-tuner simulate --cost step_model.json --num-blocks 2000 --trace examples/traces/mixed_bursty.jsonl --policy priority
  trimtab-tuner report before=b2048.json after=b512.json --out report.html
  trimtab-tuner simulate --cost step_model.json --num-blocks 2000 --trace recorded.jsonl --budget 2048 --search --out tuned

Step times come from an engine's own fit (--cost, the JSON of /admin/step-model) or from a data-sheet estimate (--preset). Results
have the form of a replay's, so tables and reports work on both. --chrome-trace shows every step in ui.perfetto.dev.
With --search the server's flags are where a tuning run starts: it tries other configs on the trace and recommends what it
could confirm, as `trimtab-tuner run` does on a running service.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from trimtab_engine.core.live import POLICIES, Ceilings, LiveConfig
from trimtab_engine.errors import ConfigError
from trimtab_tuner.arrivals import parse_mode
from trimtab_tuner.errors import InputError
from trimtab_tuner.simulate.cost import StepModel, load_step_model
from trimtab_tuner.simulate.fleet import ROUTINGS
from trimtab_tuner.simulate.presets import NAMES, preset
from trimtab_tuner.simulate.simulate import Server, live_slo, simulate
from trimtab_tuner.simulate.trace_export import ChromeTrace
from trimtab_tuner.slo import Slo
from trimtab_tuner.stats import summarise
from trimtab_tuner.tables import summary_table
from trimtab_tuner.units import parse_duration_s

from .options import (
    MAX_THROUGHPUT_LOSS,
    add_search_options,
    add_slo_options,
    add_trace_options,
    load_trace,
    slo,
)

_LIVE = LiveConfig()
# With --cost alone the length of requests is bounded by the KV pool only.
_NO_MODEL_LIMIT = 1 << 20
_FLAGS = {
    "config.max_num_batched_tokens": "--budget",
    "config.max_num_seqs": "--max-num-seqs",
    "config.scheduling_policy": "--policy",
    "config.long_prefill_token_threshold": "--long-prefill-token-threshold",
    "config.priority_aging_s": "--priority-aging",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags."""
    parser.add_argument(
        "--trace", required=True, metavar="FILE", help="what to send: see `trimtab-tuner trace --help`"
    )
    parser.add_argument(
        "--mode",
        default="recorded",
        help="arrivals: recorded (default), uniform, poisson or gamma:CV; same mean rate",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of drawn arrivals (default 0)")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write samples and summary here (JSON; .json.gz); with --search a folder for result.json and audit.jsonl",
    )
    parser.add_argument(
        "--chrome-trace", metavar="FILE", help="write every step for chrome://tracing or ui.perfetto.dev"
    )
    add_slo_options(parser)
    add_trace_options(parser)
    times = parser.add_argument_group("how long a step takes (exactly one)")
    times.add_argument(
        "--cost", metavar="FILE", help="step-time model of an engine, as /admin/step-model gives it"
    )
    times.add_argument("--preset", metavar="NAME", help=f"data-sheet estimate: {', '.join(NAMES)}")
    server = parser.add_argument_group("the simulated server")
    server.add_argument(
        "--budget",
        type=int,
        default=_LIVE.max_num_batched_tokens,
        metavar="TOKENS",
        help=f"max_num_batched_tokens (default {_LIVE.max_num_batched_tokens})",
    )
    server.add_argument(
        "--max-num-seqs", type=int, default=_LIVE.max_num_seqs, help=f"default {_LIVE.max_num_seqs}"
    )
    server.add_argument(
        "--policy",
        default=_LIVE.scheduling_policy,
        help=f"{', '.join(POLICIES)} (default {_LIVE.scheduling_policy})",
    )
    server.add_argument(
        "--long-prefill-token-threshold",
        type=int,
        default=0,
        metavar="TOKENS",
        help="tokens a step for one prompt (default 0: no limit)",
    )
    server.add_argument(
        "--priority-aging",
        type=float,
        default=_LIVE.priority_aging_s,
        metavar="SECONDS",
        help="waiting worth one priority level",
    )
    server.add_argument(
        "--swap-blocks",
        type=int,
        default=0,
        metavar="N",
        help="KV blocks in CPU memory for preempted requests (default 0: they are computed again)",
    )
    server.add_argument(
        "--swap-block-time",
        metavar="TIME",
        help="to copy one block there or back, e.g. 80us (default: the preset's link; needed with --cost)",
    )
    server.add_argument(
        "--shed-late",
        action="store_true",
        help="under sla-aware: refuse what can no longer have its first token in time",
    )
    server.add_argument(
        "--fair-tenants", action="store_true", help="admit by tenants' shares; the trace names them"
    )
    server.add_argument("--prefill-first", action="store_true", help="the baseline without chunked prefill")
    server.add_argument("--no-enable-prefix-caching", action="store_true", help="compute every prompt whole")
    server.add_argument("--num-blocks", type=int, help="usable KV blocks (default: the preset's)")
    server.add_argument("--block-size", type=int, default=16, help="tokens a KV block (default 16)")
    server.add_argument("--max-model-len", type=int, help="longest request (default: the preset's)")
    server.add_argument("--replicas", type=int, default=1, help="servers behind one address (default 1)")
    server.add_argument(
        "--routing", default="least-loaded", help=f"{' or '.join(ROUTINGS)} (default least-loaded)"
    )
    tuning = parser.add_argument_group("the search (with --search; the server's flags are the incumbent)")
    tuning.add_argument("--search", action="store_true", help="tune: try other configs on the same requests")
    add_search_options(tuning, max_trials=20)
    tuning.add_argument(
        "--min-requests",
        type=int,
        default=40,
        metavar="N",
        help="judged in each arm before a verdict; the trace needs twice as many (default 40)",
    )
    tuning.add_argument(
        "--step-share",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of the ITL target that a full step may take (default 0.9)",
    )
    tuning.add_argument(
        "--max-throughput-loss",
        metavar="SHARE",
        help=f"recommend nothing that costs more of the tokens a second, such as 3%% (default {MAX_THROUGHPUT_LOSS}%)",
    )
    tuning.add_argument("--blocks", type=int, default=12, metavar="N", help="time blocks (default 12)")
    tuning.add_argument("--json", action="store_true", help="print the result document to stdout")
    parser.set_defaults(search_options=tuple(tuning._group_actions))


def main(args: argparse.Namespace) -> int:
    """Simulate, print the table, write the files."""
    mode, targets = parse_mode(args.mode), slo(args)
    model, server = _server(args, targets)
    if args.search:
        from . import search  # which loads optuna

        return search.main(args, mode, model, server)
    for option in args.search_options:
        if getattr(args, option.dest) != option.default:
            raise InputError(option.option_strings[0], None, "only together with --search")
    trace = load_trace(args.trace, args)
    for flag, path in (("--out", args.out), ("--chrome-trace", args.chrome_trace)):
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise InputError(flag, path, "a file in a folder that exists")
    chrome = ChromeTrace() if args.chrome_trace is not None else None
    begun = time.perf_counter()
    simulation = simulate(
        trace,
        model.model,
        server,
        slo=targets,
        mode=mode,
        seed=args.seed,
        replicas=args.replicas,
        routing=args.routing,
        observer=chrome,
        meta={"step_time": model.model.to_json()},
    )
    wall_s = max(time.perf_counter() - begun, 1e-9)
    result = simulation.result
    summary = summarise(result)
    Console().print(summary_table({f"{mode}, simulated": summary}))
    simulated_s = result.meta["elapsed_s"]
    print(
        f"{simulation.num_steps:,} steps over {simulated_s:,.1f} simulated seconds in {wall_s:.1f} s "
        f"({simulated_s / wall_s:,.0f} times real time)",
        file=sys.stderr,
    )
    memory = result.meta["memory"]
    if memory["preemptions_recompute"] or memory["preemptions_swap"]:
        print(
            f"preempted: {memory['preemptions_recompute']:,} computed again ({memory['recomputed_tokens']:,} tokens), "
            f"{memory['preemptions_swap']:,} swapped ({memory['blocks_swapped_out']:,} blocks out, "
            f"{memory['blocks_swapped_in']:,} back, {memory['copying_s']:.2f} s of copying)",
            file=sys.stderr,
        )
    if args.out is not None:
        result.save(args.out, summary.to_json())
        print(f"wrote {args.out}", file=sys.stderr)
    if chrome is not None:
        chrome.save(args.chrome_trace)
        print(f"wrote {args.chrome_trace}", file=sys.stderr)
    return 1 if summary.n_failed else 0


def _server(args: argparse.Namespace, targets: Slo) -> tuple[StepModel, Server]:
    if (args.cost is None) == (args.preset is None):
        raise InputError("--cost/--preset", args.preset, "exactly one of the two")
    num_blocks, max_model_len, block_size = args.num_blocks, args.max_model_len, args.block_size
    if args.preset is not None:
        known = preset(args.preset)
        model, name = StepModel(known.model, f"the data sheet of {known.name}", fitted=False), known.name
        num_blocks = (
            known.num_blocks * known.block_size // max(1, block_size) if num_blocks is None else num_blocks
        )
        max_model_len = known.max_model_len if max_model_len is None else max_model_len
    else:
        model, name = load_step_model(args.cost), args.cost
        if num_blocks is None:
            raise InputError(
                "--num-blocks", None, "how many KV blocks that server has (it is in /admin/info)"
            )
        max_model_len = _NO_MODEL_LIMIT if max_model_len is None else max_model_len
    for flag, value in (
        ("--num-blocks", num_blocks),
        ("--block-size", block_size),
        ("--max-model-len", max_model_len),
        ("--budget", args.budget),
        ("--max-num-seqs", args.max_num_seqs),
    ):
        if value < 1:
            raise InputError(flag, value, "a whole number of at least 1")
    if args.swap_blocks < 0:
        raise InputError("--swap-blocks", args.swap_blocks, "a whole number of at least 0")
    live = LiveConfig(
        max_num_batched_tokens=args.budget,
        max_num_seqs=args.max_num_seqs,
        scheduling_policy=args.policy,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        priority_aging_s=args.priority_aging,
        slo=live_slo(targets),
    )
    largest = Ceilings(max(args.budget, args.max_num_seqs, 1), max(args.max_num_seqs, 1))
    try:
        live = LiveConfig.from_json(live.to_json(), largest)
    except ConfigError as error:
        raise InputError(_FLAGS.get(error.path, error.path), error.value, error.allowed) from None
    server = Server(
        name,
        live,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        enable_prefix_caching=not args.no_enable_prefix_caching,
        prefill_first=args.prefill_first,
        shed_late=args.shed_late,
        fair_tenants=args.fair_tenants,
        num_swap_blocks=args.swap_blocks,
        swap_block_s=_swap_block_s(args, block_size),
    )
    return model, server


def _swap_block_s(args: argparse.Namespace, block_size: int) -> float:
    """Seconds a copied block takes."""
    if args.swap_block_time is not None:
        return parse_duration_s(args.swap_block_time, "--swap-block-time")
    if args.swap_blocks == 0:
        return 0.0
    if args.preset is None:
        raise InputError("--swap-block-time", None, "how long that server takes to copy a block, e.g. 80us")
    known = preset(args.preset)
    return known.swap_block_s * block_size / known.block_size
