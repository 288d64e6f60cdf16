"""Flags that several subcommands share: choosing, cutting and scaling a trace, latency targets, what to search. Knows no server."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab_engine.core.live import POLICIES
from trimtab_tuner import space
from trimtab_tuner import trace as traces
from trimtab_tuner.errors import InputError
from trimtab_tuner.slo import Slo
from trimtab_tuner.trace import Trace
from trimtab_tuner.units import parse_duration_s, parse_share

# What a service allows where nobody says it: the CRD's default.
MAX_THROUGHPUT_LOSS = "3%"


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Flags read by `load_trace`."""
    group = parser.add_argument_group("which requests (applied in this order)")
    group.add_argument(
        "--format", default="auto", help="auto (default), azure, burstgpt, mooncake or records"
    )
    group.add_argument(
        "--jitter-seed",
        type=int,
        metavar="N",
        help="Mooncake: spread arrivals inside their 3 s bins with this seed",
    )
    group.add_argument(
        "--slice", metavar="FROM:TO", help="only arrivals in this window, e.g. 10m:15m or 600:900 (seconds)"
    )
    group.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N requests")
    group.add_argument("--limit", type=int, metavar="N", help="at most N requests")
    group.add_argument(
        "--scale-lengths",
        type=float,
        default=1.0,
        metavar="K",
        help="divide prompt and output lengths by K, for a small model",
    )
    group.add_argument(
        "--drop-longer",
        type=int,
        metavar="TOKENS",
        help="leave out requests with more prompt + output tokens",
    )
    group.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="X",
        help="arrivals X times as fast; bursts keep their shape",
    )
    group.add_argument(
        "--duration", metavar="TIME", help="stretch or compress arrivals to span this time, e.g. 90s or 5m"
    )


def load_trace(path: str, args: argparse.Namespace) -> Trace:
    """Read and transform as the flags say. Raises InputError and TraceError."""
    # Lines are only left unread when nothing before --limit needs the rest of the file.
    early = (
        args.limit + args.skip if args.limit is not None and args.slice is None and args.limit > 0 else None
    )
    trace = traces.load(path, format=args.format, limit=early, jitter_seed=args.jitter_seed)
    if args.slice is not None:
        start, colon, end = args.slice.partition(":")
        if not colon:
            raise InputError("--slice", args.slice, "FROM:TO such as 0:60 or 10m:15m")
        trace = trace.slice_time(
            0.0 if start in ("", "0") else parse_duration_s(start, "--slice"),
            parse_duration_s(end, "--slice"),
        )
    if args.skip or (args.limit is not None and args.limit != len(trace)):
        trace = trace.slice_count(args.skip, len(trace) if args.limit is None else args.limit)
    if args.scale_lengths != 1.0:
        trace = trace.scale_lengths(args.scale_lengths)
    if args.drop_longer is not None:
        trace = trace.drop_longer(args.drop_longer)
    if args.speed != 1.0:
        trace = trace.scale_rate(args.speed)
    if args.duration is not None:
        trace = trace.scale_to_span(parse_duration_s(args.duration, "--duration"))
    return trace


def add_slo_options(parser: argparse.ArgumentParser, *, default: str = "{}") -> None:
    """Flags read by `slo`. `default` says in help where their default comes from."""
    group = parser.add_argument_group("latency targets")
    group.add_argument(
        "--slo-ttft",
        metavar="TIME",
        help=f"time to first token, from the intended send (default {default.format('1s')})",
    )
    group.add_argument(
        "--slo-itl",
        metavar="TIME",
        help=f"longest gap between two tokens of a request (default {default.format('100ms')})",
    )
    group.add_argument(
        "--slo-class",
        action="append",
        default=[],
        metavar="NAME=TTFT,ITL",
        help="other targets for one SLO class; repeatable",
    )


def slo(args: argparse.Namespace, served: Slo | None = None) -> Slo:
    """Targets from the flags, else those that the server has (`served`), else 1 s and 100 ms. Raises InputError."""
    standard = Slo(1.0, 0.1) if served is None else served
    classes = dict(standard.classes)
    for text in args.slo_class:
        name, equals, targets = text.partition("=")
        ttft, comma, itl = targets.partition(",")
        if not (name and equals and comma):
            raise InputError("--slo-class", text, "NAME=TTFT,ITL such as interactive=500ms,60ms")
        classes[name] = Slo(parse_duration_s(ttft, "--slo-class"), parse_duration_s(itl, "--slo-class"))
    return Slo(
        standard.ttft_s if args.slo_ttft is None else parse_duration_s(args.slo_ttft, "--slo-ttft"),
        standard.itl_s if args.slo_itl is None else parse_duration_s(args.slo_itl, "--slo-itl"),
        classes,
    )


def add_search_options(group: argparse._ArgumentGroup, *, max_trials: int = 5) -> None:
    """Flags that say what is searched, and how far; `max_trials` is the default."""
    group.add_argument(
        "--max-trials",
        type=int,
        default=max_trials,
        metavar="N",
        help=f"measurements at most, the incumbent's and the confirmation included (default {max_trials})",
    )
    group.add_argument("--time-limit", metavar="TIME", help="begin nothing that would end later than this")
    group.add_argument(
        "--parameters",
        metavar="KNOBS",
        help=f"separated by commas: {', '.join(space.WHY)} (default: what the service allows, else the first two)",
    )
    group.add_argument(
        "--bounds",
        action="append",
        default=[],
        metavar="KNOB=LOW:HIGH",
        help="bounds of a knob within the ceilings; repeatable",
    )
    group.add_argument("--tile", type=int, default=16, help="budgets are multiples of this (default 16)")
    group.add_argument("--storage", help="Optuna journal file or database URL, to go on with a study later")
    group.add_argument(
        "--confirm-rounds",
        type=int,
        default=1,
        metavar="N",
        help="replays: further rounds while inconclusive, two measurements each (default 1)",
    )


def allowed_loss(status: Mapping[str, Any], flag: str | None) -> float:
    """The share of tokens a second that a promotion may cost: the flag's, else what the service's owner wrote, else the default."""
    if flag is not None:
        return parse_share(flag, "--max-throughput-loss")
    said = ((status.get("tuning") or {}).get("limits") or {}).get("maxThroughputLoss", MAX_THROUGHPUT_LOSS)
    return parse_share(str(said), "/status: tuning.limits.maxThroughputLoss")


def allowed_search(
    status: Mapping[str, Any], parameters: str | None, bound_texts: list[str]
) -> tuple[tuple[str, ...], dict[str, tuple[int, int]], tuple[str, ...]]:
    """Knobs, bounds and policies: flags first, then what the operator says the service's owner allows, then defaults."""
    tuning = status.get("tuning") or {}
    allowed = {p["name"]: p for p in tuning.get("parameters", ()) if p.get("name") in space.WHY}
    knobs = tuple(filter(None, (k.strip() for k in (parameters or "").split(","))))
    knobs = knobs or tuple(name for name in space.WHY if name in allowed) or space.DEFAULT_KNOBS
    bounds = {
        name: (int(p["min"]), int(p["max"]))
        for name, p in allowed.items()
        if name in knobs and p.get("min") is not None and p.get("max") is not None
    }
    bounds.update(_bounds(bound_texts))
    choices = (allowed.get("scheduling_policy") or {}).get("choices")
    return knobs, bounds, tuple(choices) if choices else POLICIES


def _bounds(texts: list[str]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for text in texts:
        name, _, between = text.partition("=")
        low, _, high = between.partition(":")
        if not (low.isdigit() and high.isdigit()):
            raise InputError("--bounds", text, "KNOB=LOW:HIGH such as max_num_batched_tokens=64:2048")
        found[name] = (int(low), int(high))
    return found


def folder(out: str | None) -> Path | None:
    """`--out` as a folder, made if it is not there. Raises InputError."""
    if out is None:
        return None
    path = Path(out)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("--out", out, f"a folder that can be made ({error.strerror})") from None
    return path
