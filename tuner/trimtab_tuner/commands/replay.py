"""Send a trace's requests to an OpenAI-compatible server and measure every token.

  trimtab-tuner replay --url http://127.0.0.1:8000 --trace examples/traces/mixed_bursty.jsonl --mode recorded --out bursty.json
  trimtab-tuner replay --url http://127.0.0.1:8000 --trace examples/traces/mixed_bursty.jsonl --mode uniform  --out uniform.json
  trimtab-tuner report uniform=uniform.json bursty=bursty.json --out report.html

Requests go out when the trace says, answered or not (open loop), and latency counts from that intended moment. The modes
send the same requests in the same order and differ in timing alone: compare uniform with recorded and you see what
bursts cost. Prompts are token ids of exactly the recorded length with fresh contents; outputs are exactly as long too.
Ctrl-C stops and keeps what was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from rich.console import Console

from trimtab_tuner.arrivals import parse_mode
from trimtab_tuner.errors import InputError
from trimtab_tuner.progress import ProgressDisplay
from trimtab_tuner.replay import ReplayOptions, replay
from trimtab_tuner.server import api_headers, served_slo
from trimtab_tuner.stats import summarise
from trimtab_tuner.tables import summary_table
from trimtab_tuner.units import parse_duration_s
from trimtab_tuner.wire import Endpoint

from .options import add_slo_options, add_trace_options, load_trace, slo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags."""
    parser.add_argument(
        "--url", required=True, help="server address, e.g. http://127.0.0.1:8000 (with or without /v1)"
    )
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
        "--out", metavar="FILE", help="write raw samples and summary here (JSON; .json.gz to compress)"
    )
    add_slo_options(parser, default="what a Trimtab server has in force, else {}")
    add_trace_options(parser)
    group = parser.add_argument_group("how to ask")
    group.add_argument("--model", help="model name (default: the first that the server offers)")
    group.add_argument("--api-key-env", metavar="VAR", help="environment variable that holds the API key")
    group.add_argument(
        "--prompts",
        choices=("tokens", "text"),
        default="tokens",
        help="token ids of exact length (default), or words, for servers that take only text",
    )
    group.add_argument(
        "--prompt-seed",
        type=int,
        metavar="N",
        help="seed of prompt contents (default: fresh, so that no cache knows them)",
    )
    group.add_argument(
        "--token-ids",
        metavar="LO:HI",
        help="draw token ids from this range (default: from the server's /tokenize)",
    )
    group.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="N unmeasured requests first, one after another"
    )
    group.add_argument(
        "--drain-timeout",
        metavar="TIME",
        help="give up on answers this long after the last arrival (default: wait for all)",
    )
    group.add_argument("--ignore-classes", action="store_true", help="do not send the trace's SLO classes")
    group.add_argument(
        "--extra-body", metavar="JSON", help="merged into every request, e.g. '{\"priority\": 1}'"
    )


def main(args: argparse.Namespace) -> int:
    """Replay, print the table, write the file."""
    mode = parse_mode(args.mode)
    slo(args)  # wrong flags are said before the server is asked
    options = _options(args)
    trace = load_trace(args.trace, args)
    if args.out is not None and not Path(args.out).resolve().parent.is_dir():
        raise InputError("--out", args.out, "a file in a folder that exists")
    served = asyncio.run(served_slo(Endpoint.parse(args.url), api_headers(options.api_key)))
    targets = slo(args, served)
    with ProgressDisplay(f"replay {mode}") as display:
        result = replay(
            trace, args.url, slo=targets, mode=mode, seed=args.seed, options=options, observer=display
        )
    summary = summarise(result)
    Console().print(summary_table({str(mode): summary}))
    if args.out is not None:
        result.save(args.out, summary.to_json())
        print(f"wrote {args.out}", file=sys.stderr)
    if result.meta["interrupted"]:
        return 130
    return 1 if summary.n_failed else 0


def _options(args: argparse.Namespace) -> ReplayOptions:
    key = None
    if args.api_key_env is not None:
        key = os.environ.get(args.api_key_env)
        if not key:
            raise InputError(
                "--api-key-env", args.api_key_env, "the name of an environment variable that is set"
            )
    ids = None
    if args.token_ids is not None:
        low, _, high = args.token_ids.partition(":")
        if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
            raise InputError("--token-ids", args.token_ids, "LO:HI with 0 ≤ LO < HI, HI not included")
        ids = (int(low), int(high))
    if args.warmup < 0:
        raise InputError("--warmup", args.warmup, "a whole number ≥ 0")
    try:
        extra = json.loads(args.extra_body) if args.extra_body else {}
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise InputError("--extra-body", args.extra_body, "a JSON object")
    drain_s = None if args.drain_timeout is None else parse_duration_s(args.drain_timeout, "--drain-timeout")
    return ReplayOptions(
        model=args.model,
        api_key=key,
        prompt_kind=args.prompts,
        prompt_seed=args.prompt_seed,
        token_id_range=ids,
        warmup_requests=args.warmup,
        drain_timeout_s=drain_s,
        send_classes=not args.ignore_classes,
        extra_body=extra,
    )
