"""What `trimtab-tuner simulate --search` does: a tuning run on the simulated server. Not a subcommand of its own.

Called by `commands/simulate.py`, which declares the flags and reads those of server, traffic and targets. The result has the form of `trimtab-tuner run`'s, so `report` takes it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import platform
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version

from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_tuner import space
from trimtab_tuner.arrivals import Mode
from trimtab_tuner.audit import Audit, plain
from trimtab_tuner.errors import InputError
from trimtab_tuner.run import RunOptions, TuningRun, result_document
from trimtab_tuner.run_view import RunView
from trimtab_tuner.simulate.cost import StepModel
from trimtab_tuner.simulate.evaluator import Traffic
from trimtab_tuner.simulate.search import LIMITS, Simulator, Standing
from trimtab_tuner.simulate.simulate import Server
from trimtab_tuner.space import Knob
from trimtab_tuner.study import Study, check_storage
from trimtab_tuner.units import parse_duration_s

from .options import allowed_loss, allowed_search, folder, load_trace


def main(args: argparse.Namespace, mode: Mode, model: StepModel, server: Server) -> int:
    """Tune. Exit status 0: a verdict was reached; 1: unknown."""
    limits = dataclasses.replace(
        LIMITS,
        min_requests=args.min_requests,
        step_share=args.step_share,
        max_throughput_loss=allowed_loss({}, args.max_throughput_loss),
    )
    if args.min_requests < 20:
        raise InputError("--min-requests", args.min_requests, "at least 20")
    if not 0 < args.step_share <= 1:
        raise InputError("--step-share", args.step_share, "a share above 0, at most 1")
    for name, value, least in (
        ("--max-trials", args.max_trials, 3),
        ("--confirm-rounds", args.confirm_rounds, 1),
        ("--blocks", args.blocks, 1),
    ):
        if value < least:
            raise InputError(name, value, f"at least {least}")
    if args.chrome_trace is not None:
        raise InputError("--chrome-trace", args.chrome_trace, "nothing together with --search")
    check_storage(args.storage)
    knobs, bounds, policies = allowed_search({}, args.parameters, args.bounds)
    highest = {name: high for name, (_, high) in bounds.items()}
    usual = Ceilings()
    ceilings = Ceilings(
        max(
            usual.max_num_batched_tokens,
            server.live.max_num_batched_tokens,
            highest.get("max_num_batched_tokens", 0),
        ),
        max(usual.max_num_seqs, server.live.max_num_seqs, highest.get("max_num_seqs", 0)),
    )

    def make_space(config: LiveConfig) -> tuple[Knob, ...]:
        return space.build(config, ceilings, knobs=knobs, bounds=bounds, tile=args.tile, policies=policies)

    make_space(server.live)  # wrong flags are said before anything is simulated
    options = RunOptions(
        max_trials=args.max_trials,
        confirm_rounds=args.confirm_rounds,
        time_limit_s=None if args.time_limit is None else parse_duration_s(args.time_limit, "--time-limit"),
        seed=args.seed,
    )
    trace = load_trace(args.trace, args)
    started = datetime.now(UTC)
    begun = time.perf_counter()
    out = folder(args.out)
    audit = Audit(out / "audit.jsonl" if out else None)
    traffic = Traffic(trace, args.replicas, args.routing, mode=mode)
    if options.confirm_rounds > 1 and not traffic.drawn:
        again = "1 with these arrivals: a second round would see the same requests at the same times again"
        raise InputError("--confirm-rounds", options.confirm_rounds, again)
    simulator = Simulator(
        server.live,
        traffic,
        model,
        server,
        limits=limits,
        num_blocks=args.blocks,
        seed=args.seed,
        audit=audit,
    )
    audit.write("workload", **simulator.facts())
    with RunView() as view:
        run = TuningRun(
            target=Standing(server.live, ceilings),
            evaluator=simulator.chooser,
            confirmer=simulator.confirmer,
            doubt=simulator.doubt,
            caveat=simulator.caveat,
            make_study=lambda found: Study(found, seed=args.seed, storage=args.storage),
            make_space=make_space,
            limits=limits,
            options=options,
            audit=audit,
            view=view,
            paused=_never,
        )
        result = asyncio.run(run.execute())
    wall_s = time.perf_counter() - begun
    meta: dict[str, object] = {
        "started": started.isoformat(timespec="milliseconds"),
        "elapsed_s": round(wall_s, 1),
        **simulator.facts(),
        "limits": limits.to_json(),
        "slo": server.live.to_json()["slo"],
        "versions": {
            "trimtab": version("trimtab"),
            "optuna": version("optuna"),
            "python": platform.python_version(),
        },
    }
    document = plain(result_document(result, meta))
    simulated = sum(trial.measurement.status != "unknown" for trial in result.trials)
    print(f"{simulated} simulations in {wall_s:.1f} s", file=sys.stderr)
    if out is not None:
        path = out / "result.json"
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        print(f"wrote {path}", file=sys.stderr)
    if args.json:
        print(json.dumps(document, allow_nan=False))
    return 1 if result.outcome == "Unknown" else 0


async def _never() -> str | None:
    return None
