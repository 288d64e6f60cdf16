"""Replay a trace without a server: the engine's scheduler, simulated time, and results in the form of a replay's.

Called by `trimtab-tuner simulate` and by benchmarks; statistics and report take the result unchanged. Reads no clock and draws
nothing but the arrivals: the same (trace, mode, seed, cost, server) gives the same result, bit for bit.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from trimtab_engine.core.live import LiveConfig, SloClass
from trimtab_engine.core.live import Slo as LiveSlo
from trimtab_engine.core.scheduler import Scheduler
from trimtab_engine.core.stats import SchedulerStats
from trimtab_engine.core.step_time import StepTimeModel
from trimtab_tuner import burstiness
from trimtab_tuner.arrivals import Mode, parse_mode, retime
from trimtab_tuner.errors import InputError
from trimtab_tuner.result import ReplayResult
from trimtab_tuner.slo import Slo
from trimtab_tuner.trace import Trace

from .cost import ScatteredCost, StepCost
from .fleet import Delays, Fleet
from .replica import Replica, StepObserver
from .stop_rule import StopRule
from .tally import Tally
from .tokens import SyntheticTokens


@dataclass(frozen=True, slots=True)
class Server:
    """One simulated engine. `name` says in results what was simulated.

    `step_time` is what the engine believes of its steps (it decides by that under some policies); None: the truth, when the
    cost of the simulation is such a model.
    """

    name: str
    live: LiveConfig
    num_blocks: int
    block_size: int = 16
    max_model_len: int = 32_768
    enable_prefix_caching: bool = True
    prefill_first: bool = False
    shed_late: bool = False
    fair_tenants: bool = False
    num_swap_blocks: int = 0  # KV blocks in CPU memory for preempted requests
    swap_block_s: float = 0.0  # seconds to copy one of them, in either direction
    delays: Delays = field(default_factory=Delays)
    step_time: StepTimeModel | None = None

    def scheduler(self, cost: StepCost) -> Scheduler:
        """The engine's scheduler as the engine would build it, except that no token ends a request."""
        scheduler = Scheduler(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            live=self.live,
            generation=0,
            enable_prefix_caching=self.enable_prefix_caching,
            prefill_first=self.prefill_first,
            shed_late=self.shed_late,
            fair_tenants=self.fair_tenants,
            num_swap_blocks=self.num_swap_blocks,
            swap_block_s=self.swap_block_s,
        )
        believed = cost if self.step_time is None else self.step_time
        if isinstance(believed, StepTimeModel):
            scheduler.use_step_time(believed)
        return scheduler


@dataclass(frozen=True, slots=True)
class Simulation:
    """What came out: the replay's form, and what only a simulator sees. Lists are in trace order."""

    result: ReplayResult
    scheduling_delays_s: list[float | None]  # first scheduled - arrival; None: never scheduled
    num_preemptions: list[int]
    stats: tuple[SchedulerStats, ...]  # per replica, at the end
    num_steps: int
    num_skipped: int  # of those, done many at a time
    busy_s: float  # simulated seconds in which steps ran, summed over replicas
    num_swapped_out: int  # KV blocks copied to CPU memory
    num_swapped_in: int  # and back; blocks that were still cached are not
    stopped: bool  # the stop rule was broken
    tallies: tuple[Tally, ...] = ()  # per replica, when asked for


def simulate(
    trace: Trace,
    cost: StepCost,
    server: Server,
    *,
    slo: Slo,
    mode: Mode | str = "recorded",
    seed: int = 0,
    replicas: int = 1,
    routing: str = "least-loaded",
    placement: Sequence[int] | None = None,
    tally_from_s: float | None = None,
    on_progress: Callable[[float], None] | None = None,
    observer: StepObserver | None = None,
    stop_rule: StopRule | None = None,
    skip_ahead: bool = True,
    meta: Mapping[str, Any] | None = None,
) -> Simulation:
    """Simulate until every request has ended. Raises InputError for a wrong mode, routing or number of replicas.

    `placement` names the replica of each request, instead of a routing. `tally_from_s`: count the steps that begin from then on.
    `on_progress` gets the share of requests that have arrived, at every event; what it raises ends the simulation and comes out here.
    A request that can never run is a failed request of the result, as it would be for a server. `skip_ahead` changes how
    long this takes, never what comes out.
    """
    if replicas < 1:
        raise InputError("--replicas", replicas, "at least 1")
    if placement is not None:
        assert len(placement) == len(trace), "a replica for each request"
        assert all(0 <= at < replicas for at in placement), "one of the replicas"
    mode = parse_mode(mode) if isinstance(mode, str) else mode
    timed = retime(trace, mode, seed)
    tokens = SyntheticTokens(timed)
    # A cost that draws is asked once a step, in order; looking ahead would draw twice.
    skip_ahead = skip_ahead and not isinstance(cost, ScatteredCost)
    engines = [
        Replica(
            number,
            server.scheduler(cost),
            cost,
            tokens,
            skip_ahead=skip_ahead,
            observer=observer,
            stop_rule=stop_rule,
            swap_block_s=server.swap_block_s,
            tally=None if tally_from_s is None else Tally(tally_from_s),
        )
        for number in range(replicas)
    ]
    fleet = Fleet(timed, tokens, engines, routing, server.delays, stop_rule, placement, on_progress)
    fleet.run()
    fleet.settle()
    ends = tuple(engine.scheduler.stats for engine in engines)
    swapped_out = sum(engine.num_swapped_out for engine in engines)
    swapped_in = sum(engine.num_swapped_in for engine in engines)
    live_config = {"generation": 0, "source": "Spec", **server.live.to_json()}
    about: dict[str, Any] = {
        "url": f"simulated:{server.name}",
        "trace": trace.source,
        "trace_format": trace.format,
        "trace_hash": timed.hash,
        "lengths_hash": timed.lengths_hash,
        "trace_changes": list(timed.changes),
        "mode": str(mode),
        "seed": seed,
        "n": len(timed),
        "span_s": round(timed.span_s, 6),
        "started": None,
        "elapsed_s": round(max(fleet.now, 0.0), 3),
        "interrupted": fleet.stopped,
        "simulated": True,
        "replicas": replicas,
        "routing": routing if placement is None else "as recorded",
        "prefill_first": server.prefill_first,
        "shed_late": server.shed_late,
        "fair_tenants": server.fair_tenants,
        "num_swap_blocks": server.num_swap_blocks,
        "swap_block_s": server.swap_block_s,
        "memory": {
            "preemptions_recompute": sum(stats.preemptions_recompute for stats in ends),
            "preemptions_swap": sum(stats.preemptions_swap for stats in ends),
            "recomputed_tokens": sum(stats.recomputed_tokens for stats in ends),
            "blocks_swapped_out": swapped_out,
            "blocks_swapped_in": swapped_in,
            "copying_s": round(server.swap_block_s * (swapped_out + swapped_in), 6),
        },
        "num_blocks": server.num_blocks,
        "model": server.name,
        "max_model_len": server.max_model_len,
        "live_config": live_config,
        "live_config_after": live_config,
        "burstiness_intended": burstiness.describe([request.arrival_s for request in timed.requests]),
        "burstiness_sent": burstiness.describe([request.arrival_s for request in timed.requests]),
        "versions": {"trimtab": version("trimtab"), "python": platform.python_version()},
    }
    return Simulation(
        result=ReplayResult(about | dict(meta or {}), slo, tuple(fleet.results)),
        scheduling_delays_s=[
            None if request.first_scheduled_s is None else request.first_scheduled_s - request.arrival_s
            for request in fleet.requests
        ],
        num_preemptions=[request.num_preemptions for request in fleet.requests],
        stats=ends,
        num_steps=sum(engine.num_steps for engine in engines),
        num_skipped=sum(engine.num_skipped for engine in engines),
        busy_s=sum(engine.busy_s for engine in engines),
        num_swapped_out=swapped_out,
        num_swapped_in=swapped_in,
        stopped=fleet.stopped,
        tallies=tuple(engine.tally for engine in engines if engine.tally is not None),
    )


def live_slo(slo: Slo) -> LiveSlo:
    """The tuner's targets as the engine takes them: the general ones as class `default`."""
    classes = [SloClass("default", slo.ttft_s, slo.itl_s)]
    classes += [
        SloClass(name, each.ttft_s, each.itl_s) for name, each in slo.classes.items() if name != "default"
    ]
    if (default := slo.classes.get("default")) is not None:
        classes[0] = SloClass("default", default.ttft_s, default.itl_s)
    return LiveSlo("default", tuple(classes))
