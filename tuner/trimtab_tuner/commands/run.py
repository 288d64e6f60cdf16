"""Tune a running service: try candidates live as leases, decide by violated requests, recommend or apply the best.

  trimtab-tuner run --control http://127.0.0.1:8080 --trace mixed.jsonl --mode recorded --max-trials 5 --out tuned --apply
  trimtab-tuner run --control http://127.0.0.1:8080 --observe 60s --prometheus http://prometheus:9090 --selector 'job="chat"'

`--control` is an operator's control port or a bare engine's admin port. With `--trace` the same requests are replayed for every
config, on a service that has no other traffic; with `--observe` the live traffic is measured, in small guarded moves. A
candidate is a lease that the engine itself ends: whatever becomes of this command, the incumbent comes back. What could
be chance keeps the incumbent. Writes result.json, audit.jsonl, raw samples and raw replays to --out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from trimtab_engine.core.live import LiveConfig
from trimtab_tuner import guardrails, space
from trimtab_tuner.audit import Audit, plain
from trimtab_tuner.errors import InputError, ServerError
from trimtab_tuner.evaluate import LiveEvaluator, ObserveWorkload
from trimtab_tuner.guardrails import Limits
from trimtab_tuner.metrics.names import RUNTIMES, Names
from trimtab_tuner.metrics.promapi import Prometheus
from trimtab_tuner.metrics.scrape import Scraper
from trimtab_tuner.metrics.source import MetricsSource
from trimtab_tuner.replay import ReplayOptions
from trimtab_tuner.run import RunOptions, RunResult, TuningRun, result_document
from trimtab_tuner.run_view import RunView
from trimtab_tuner.samples import SampleFiles
from trimtab_tuner.study import Study, check_storage
from trimtab_tuner.target import Readback, Target
from trimtab_tuner.units import parse_duration_s
from trimtab_tuner.workload import ReplayWorkload

from .options import (
    MAX_THROUGHPUT_LOSS,
    add_search_options,
    add_trace_options,
    allowed_loss,
    allowed_search,
    folder,
    load_trace,
)

TOKEN_VARIABLE = "TRIMTAB_ADMIN_TOKEN"
# A replay is paired request by request, so fewer decide than in live traffic.
MIN_REQUESTS_REPLAY = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags."""
    parser.add_argument(
        "--control", required=True, metavar="URL", help="an operator's control port or an engine's admin port"
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"bearer token for --control (or environment variable {TOKEN_VARIABLE})",
    )
    work = parser.add_argument_group("what to measure with (one of the two)")
    work.add_argument("--trace", metavar="FILE", help="replay this trace for every config")
    work.add_argument("--observe", metavar="TIME", help="observe live traffic for this long per config")
    work.add_argument(
        "--mode", default="recorded", help="arrivals of the replay: recorded, uniform, poisson or gamma:CV"
    )
    work.add_argument(
        "--url", help="serving address for the replay (default: the one that the control port names)"
    )
    work.add_argument("--model", help="model name for the replay (default: the first that the server offers)")
    work.add_argument("--api-key-env", metavar="VAR", help="environment variable that holds the API key")
    add_trace_options(parser)
    read = parser.add_argument_group(
        "where to read metrics (default: scrape the targets that --control names)"
    )
    read.add_argument(
        "--metrics", action="append", default=[], metavar="URL", help="scrape this /metrics; repeatable"
    )
    read.add_argument("--prometheus", metavar="URL", help="query this Prometheus instead of scraping")
    read.add_argument("--selector", default="", help="label matchers of the service in Prometheus")
    read.add_argument("--interval", metavar="TIME", help="between samples (default 1s; with Prometheus 15s)")
    read.add_argument(
        "--runtime", choices=sorted(RUNTIMES), default="trimtab", help="whose metric names (default trimtab)"
    )
    search = parser.add_argument_group("the search")
    add_search_options(search)
    search.add_argument("--seed", type=int, default=0, help="of the search and of drawn arrivals (default 0)")
    search.add_argument(
        "--pairs",
        type=int,
        default=8,
        metavar="N",
        help="observing: pairs of slices to confirm with (default 8)",
    )
    guard = parser.add_argument_group("guardrails")
    guard.add_argument(
        "--min-requests",
        type=int,
        metavar="N",
        help=f"judged in each arm before a verdict (default {MIN_REQUESTS_REPLAY} in a replay, 300 observing)",
    )
    guard.add_argument(
        "--max-factor",
        type=float,
        metavar="X",
        help="of one knob in one move (default 2 observing, no limit in a replay)",
    )
    guard.add_argument(
        "--error-budget",
        type=float,
        metavar="SHARE",
        help="explore only with this share of error budget left (default 0.2 observing, 0 in a replay)",
    )
    guard.add_argument("--cooldown", type=int, metavar="N", help="windows after a rollback (default 3 or 0)")
    guard.add_argument(
        "--step-share",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of the ITL target that a full step may take (default 0.9)",
    )
    guard.add_argument(
        "--max-throughput-loss",
        metavar="SHARE",
        help=f"promote nothing that costs more of the tokens a second, such as 3%% (default: what the service allows, else {MAX_THROUGHPUT_LOSS}%)",
    )
    guard.add_argument("--washout", metavar="TIME", help="dropped after each change (default 30s)")
    guard.add_argument("--lease", default="30s", metavar="TIME", help="of a candidate, renewed (default 30s)")
    guard.add_argument(
        "--blocks", type=int, default=12, metavar="N", help="time blocks of a replay (default 12)"
    )
    guard.add_argument("--pause-file", metavar="FILE", help="while this file exists nothing is tried")
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--apply", action="store_true", help="promote a confirmed candidate")
    end.add_argument(
        "--recommend", action="store_true", help="only report a confirmed candidate (this is the default)"
    )
    parser.add_argument("--json", action="store_true", help="print the result document to stdout")
    parser.add_argument("--out", metavar="DIR", help="folder for result.json, audit.jsonl and raw replays")


def main(args: argparse.Namespace) -> int:
    """Tune. Exit status 0: a verdict was reached (kept or changed); 1: unknown or paused; 130: stopped."""
    limits, options = limits_of(args), options_of(args)
    check_storage(args.storage)
    out = folder(args.out)
    with RunView() as view:
        result, meta = asyncio.run(_with_signals(_run(args, limits, options, out, view)))
    document = plain(result_document(result, meta))
    if out is not None:
        path = out / "result.json"
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        print(f"wrote {path}", file=sys.stderr)
    if args.json:
        print(json.dumps(document, allow_nan=False))
    return 1 if result.outcome in ("Unknown", "Paused") else 0


def limits_of(args: argparse.Namespace) -> Limits:
    """Guardrails: strict on live traffic, loose where a replay on an idle service hurts nobody."""
    replaying = args.trace is not None
    factor = args.max_factor if args.max_factor is not None else (None if replaying else 2.0)
    if factor is not None and factor <= 1:
        raise InputError("--max-factor", factor, "a number above 1")
    share = args.error_budget if args.error_budget is not None else (0.0 if replaying else 0.2)
    if not 0 <= share < 1:
        raise InputError("--error-budget", share, "a share from 0 to below 1")
    if not 0 < args.step_share <= 1:
        raise InputError("--step-share", args.step_share, "a share above 0, at most 1")
    minimum = args.min_requests or (MIN_REQUESTS_REPLAY if replaying else 300)
    if minimum < 20:
        raise InputError("--min-requests", minimum, "at least 20")
    return Limits(
        step_share=args.step_share,
        max_factor=factor,
        cooldown_windows=args.cooldown if args.cooldown is not None else (0 if replaying else 3),
        min_requests=minimum,
        error_budget_left=share,
    )


def options_of(args: argparse.Namespace) -> RunOptions:
    """How far to search."""
    if args.max_trials < 3:
        raise InputError("--max-trials", args.max_trials, "at least 3: incumbent, candidate, confirmation")
    if (args.trace is None) == (args.observe is None):
        raise InputError("--trace/--observe", args.trace, "exactly one of the two is needed")
    for name, value in (
        ("--confirm-rounds", args.confirm_rounds),
        ("--pairs", args.pairs),
        ("--blocks", args.blocks),
    ):
        if value < 1:
            raise InputError(name, value, "at least 1")
    return RunOptions(
        max_trials=args.max_trials,
        confirm_rounds=args.confirm_rounds,
        pairs=args.pairs,
        apply=args.apply,
        time_limit_s=None if args.time_limit is None else parse_duration_s(args.time_limit, "--time-limit"),
        seed=args.seed,
    )


async def _run(
    args: argparse.Namespace, limits: Limits, options: RunOptions, out: Path | None, view: RunView
) -> tuple[RunResult, Mapping[str, object]]:
    names = RUNTIMES[args.runtime]
    started = datetime.now(UTC)
    # No limit on connections and none kept: a target that restarts must not leave a dead one behind.
    async with httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0)) as client:
        target = Target(client, args.control, _token(args.token_file))
        readback = await target.read()
        status = await target.status()
        limits = dataclasses.replace(
            limits, max_throughput_loss=allowed_loss(status, args.max_throughput_loss)
        )
        source = await _source(args, client, target, names)
        workload = _workload(args, readback, status, out)
        lease_s = parse_duration_s(args.lease, "--lease")
        if not 3 <= lease_s <= 120:
            raise InputError("--lease", args.lease, "3s to 120s")

        async def paused() -> str | None:
            exists = args.pause_file is not None and Path(args.pause_file).exists()
            return guardrails.paused(await target.status(), pause_file=exists)

        knobs, bounds, policies = allowed_search(status, args.parameters, args.bounds)

        def make_space(config: LiveConfig) -> tuple[space.Knob, ...]:
            return space.build(
                config, readback.ceilings, knobs=knobs, bounds=bounds, tile=args.tile, policies=policies
            )

        evaluator = LiveEvaluator(
            target,
            source,
            workload,
            names=names,
            limits=limits,
            lease_s=lease_s,
            washout_s=parse_duration_s(args.washout or "30s", "--washout"),
            num_blocks=args.blocks,
            min_requests=limits.min_requests if args.trace else 1,
            wait_until_idle=args.trace is not None,
            paused=paused,
        )
        audit = Audit(out / "audit.jsonl" if out else None)
        audit.write("workload", **_facts(args, workload))
        run = TuningRun(
            target=target,
            evaluator=evaluator,
            make_study=lambda found: Study(found, seed=args.seed, storage=args.storage),
            make_space=make_space,
            limits=limits,
            options=options,
            audit=audit,
            keep=SampleFiles(out, names).keep if out else lambda _: None,
            view=view,
            paused=paused,
        )
        make_space(readback.incumbent.config)  # wrong flags are said before anything is measured
        result = await run.execute()
    meta: dict[str, object] = {
        "control": target.url,
        "started": started.isoformat(timespec="milliseconds"),
        "elapsed_s": round(time.time() - started.timestamp(), 1),
        **_facts(args, workload),
        "metrics": "prometheus" if args.prometheus else "scrape",
        "runtime": args.runtime,
        "limits": limits.to_json(),
        "slo": result.before.to_json()["slo"],
        "versions": {
            "trimtab": version("trimtab"),
            "optuna": version("optuna"),
            "python": platform.python_version(),
        },
        "cores": os.cpu_count(),
    }
    return result, meta


def _facts(args: argparse.Namespace, workload: ReplayWorkload | ObserveWorkload) -> dict[str, object]:
    """What every trial is measured with, and the seed."""
    replay = workload if isinstance(workload, ReplayWorkload) else None
    return {
        "seed": args.seed,
        "mode": args.mode if replay else "observe",
        "trace": args.trace,
        "trace_hash": replay.trace_hash if replay else None,
        "requests_per_trial": replay.num_requests if replay else None,
        "span_s": workload.span_s,
    }


async def _source(
    args: argparse.Namespace, client: httpx.AsyncClient, target: Target, names: Names
) -> MetricsSource:
    if args.prometheus:
        if args.metrics:
            raise InputError("--metrics", args.metrics, "nothing together with --prometheus")
        interval_s = parse_duration_s(args.interval or "15s", "--interval")
        return Prometheus(client, args.prometheus, names, selector=args.selector, interval_s=interval_s)
    targets = tuple(args.metrics) or target.metrics_targets
    return Scraper(client, targets, names, interval_s=parse_duration_s(args.interval or "1s", "--interval"))


def _workload(
    args: argparse.Namespace, readback: Readback, status: Mapping[str, Any], out: Path | None
) -> ReplayWorkload | ObserveWorkload:
    if args.observe is not None:
        return ObserveWorkload(parse_duration_s(args.observe, "--observe"))
    url = args.url or status.get("url") or status.get("proxy_url")
    if not url:
        raise InputError("--url", args.url, "the serving address; this control port does not name one")
    key = None
    if args.api_key_env is not None and not (key := os.environ.get(args.api_key_env)):
        raise InputError("--api-key-env", args.api_key_env, "the name of an environment variable that is set")
    trace = load_trace(args.trace, args)
    return ReplayWorkload(
        trace,
        str(url),
        slo=readback.incumbent.config.slo,
        mode=args.mode,
        seed=args.seed,
        options=ReplayOptions(model=args.model, api_key=key),
        out_dir=out,
    )


def _token(path: str | None) -> str | None:
    if path is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise InputError("--token-file", path, f"a readable file ({error.strerror})") from None


async def _with_signals(
    work: Any,
) -> tuple[RunResult, Mapping[str, object]]:
    """Runs `work`; SIGTERM ends it as Ctrl-C does, so that a stopped job reverts before it exits."""
    task = asyncio.ensure_future(work)
    with contextlib.suppress(NotImplementedError, RuntimeError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        found: tuple[RunResult, Mapping[str, object]] = await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except httpx.HTTPError as error:
        raise ServerError(f"{type(error).__name__}: {error}") from None
    return found
