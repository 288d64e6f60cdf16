"""Look at, convert and make request traces.

  trimtab-tuner trace info FILE              rate, burstiness, lengths, prefix sharing
  trimtab-tuner trace convert FILE OUT       cut, scale or retime a trace, written as own records (JSONL)
  trimtab-tuner trace synth OUT              make a small mixed bursty segment

A trace says when requests arrive and how long they are, never what they say. Formats: Azure LLM 2023 and 2024 (CSV),
BurstGPT (CSV), Mooncake (JSONL), own workload records (JSONL: arrival_s, prompt_tokens, output_tokens, slo_class).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from trimtab_tuner import arrivals, burstiness, synthesise
from trimtab_tuner import trace as traces
from trimtab_tuner.trace import Trace

from .options import add_trace_options, load_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the three actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    info = actions.add_parser("info", help="rate, burstiness, lengths and prefix sharing of a trace")
    info.add_argument("trace", metavar="FILE", help="trace file, plain or .gz")
    add_trace_options(info)
    convert = actions.add_parser("convert", help="cut, scale or retime a trace and write own records")
    convert.add_argument("trace", metavar="FILE", help="trace file, plain or .gz")
    convert.add_argument("out", metavar="OUT", help="file to write (JSONL)")
    convert.add_argument(
        "--mode", default="recorded", help="recorded (default), uniform, poisson or gamma:CV"
    )
    convert.add_argument("--seed", type=int, default=0, help="seed of drawn arrivals (default 0)")
    add_trace_options(convert)
    synth = actions.add_parser(
        "synth", help="make a small mixed bursty segment: short chats, a few long documents"
    )
    synth.add_argument("out", metavar="OUT", help="file to write (JSONL)")
    shape = synthesise.Shape()
    synth.add_argument(
        "--requests", type=int, default=shape.requests, help=f"how many (default {shape.requests})"
    )
    synth.add_argument(
        "--duration", default=f"{shape.span_s:g}s", help=f"span of the arrivals (default {shape.span_s:g}s)"
    )
    synth.add_argument(
        "--cv", type=float, default=shape.cv, help=f"CV of the gaps between arrivals (default {shape.cv:g})"
    )
    synth.add_argument(
        "--long-share",
        type=float,
        default=shape.long_share,
        help=f"share of long prompts (default {shape.long_share:g})",
    )
    synth.add_argument(
        "--long-tokens",
        type=int,
        default=shape.long_prompt_tokens,
        help=f"length of long prompts (default {shape.long_prompt_tokens})",
    )
    synth.add_argument("--seed", type=int, default=shape.seed, help=f"seed (default {shape.seed})")


def main(args: argparse.Namespace) -> int:
    """Run the chosen action."""
    console = Console()
    if args.action == "synth":
        span_s = synthesise.parse_duration_s(args.duration, "--duration")
        shape = synthesise.Shape(
            args.requests, span_s, args.cv, args.long_share, args.long_tokens, seed=args.seed
        )
        trace = synthesise.synthesise(shape)
    else:
        trace = load_trace(args.trace, args)
    if args.action == "convert":
        trace = arrivals.retime(trace, args.mode, args.seed)
    if args.action != "info":
        traces.save(trace, Path(args.out))
        console.print(f"wrote {args.out}")
        trace = traces.load(args.out)  # what is described is what was written
    console.print(describe(trace))
    return 0


def describe(trace: Trace) -> Table:
    """What a person wants to know of a trace before replaying it."""
    table = Table(title=f"{trace.source} ({trace.format})", title_justify="left", show_header=False, box=None)
    at = [request.arrival_s for request in trace.requests]
    shape = burstiness.describe(at)
    table.add_row("requests", f"{len(trace):,} over {trace.span_s:,.1f} s, {trace.rate_rps:.3g} a second")
    table.add_row(
        "gaps between arrivals", f"CV {_number(shape['cv'])}  (0 evenly spaced, 1 Poisson, above 1 bursts)"
    )
    windows = ", ".join(f"{w:g} s {_number(shape[f'dispersion_{w:g}s'])}" for w in burstiness.WINDOWS_S)
    table.add_row("index of dispersion", f"{windows}  (Poisson: 1)")
    for name, lengths in (
        ("prompt tokens", [request.prompt_tokens for request in trace.requests]),
        ("output tokens", [request.output_tokens for request in trace.requests]),
    ):
        p50, p90, p99 = np.quantile(lengths, (0.5, 0.9, 0.99))
        table.add_row(
            name,
            f"p50 {p50:,.0f}  p90 {p90:,.0f}  p99 {p99:,.0f}  max {max(lengths):,}  total {sum(lengths):,}",
        )
    shared = _reusable_prompt_share(trace)
    if shared is not None:
        table.add_row(
            "reusable prefixes",
            f"{shared:.1%} of prompt tokens, with an unbounded cache of {trace.prefix_block_tokens}-token blocks",
        )
    classes = sorted({request.slo_class for request in trace.requests})
    table.add_row("classes", ", ".join(classes))
    table.add_row("hash", f"{trace.hash}  (lengths and order alone: {trace.lengths_hash})")
    for change in trace.changes:
        table.add_row("changed", change)
    return table


def _reusable_prompt_share(trace: Trace) -> float | None:
    block = trace.prefix_block_tokens
    if block is None:
        return None
    seen: set[tuple[int | str, ...]] = set()
    reused = total = 0
    for request in trace.requests:
        total += request.prompt_tokens
        ids = request.prefix_block_ids or ()
        chain_known = True
        for position, block_id in enumerate(ids):
            # Ids of hash chains are unique to their position, so (id,) stands for the whole prefix up to it.
            chain_known = chain_known and (block_id,) in seen
            if chain_known:
                reused += max(0, min(block, request.prompt_tokens - position * block))
        seen.update((block_id,) for block_id in ids)
    return reused / total


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
