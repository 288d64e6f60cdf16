"""Measures configs without an engine: an `Evaluator` that simulates the same traffic under each, and what a run on it means.

Called by `search.py`, in place of `evaluate.LiveEvaluator`. Requests are judged in time blocks that hold the same requests under every
config. A simulation repeats exactly, so measuring a config twice would tell nothing: what could be luck here is the *traffic*. The
evaluators of a run therefore see different requests of it: candidates are chosen on the earlier ones, and the best is confirmed on
the later ones, which played no part in choosing it. The e-value of that comparison bounds how often a run over traffic under
which two configs are alike would call one of them better. It says nothing of how far the simulator is from an engine: that is the
step-time model's error, which `search.py` states beside it and puts to a test of its own.

Reads no clock; times are seconds since the first arrival.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from trimtab_engine.core.live import LiveConfig
from trimtab_tuner import guardrails
from trimtab_tuner.arrivals import Mode, retime
from trimtab_tuner.evaluate import Measurement
from trimtab_tuner.guardrails import Limits
from trimtab_tuner.metrics.reading import Reading, Unknown
from trimtab_tuner.trace import Trace
from trimtab_tuner.workload import client_slo

from . import measured
from .cost import StepCost
from .simulate import Server, simulate

PROGRESS_STEP = 0.02


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests, and the replicas that get them: by `routing`, or by `placement` as recorded (one number a request).

    Arrivals are the trace's own, or drawn anew for every round by `mode` and seed.
    """

    trace: Trace
    replicas: int = 1
    routing: str = "least-loaded"
    placement: tuple[int, ...] | None = None
    mode: Mode = dataclasses.field(default_factory=lambda: Mode("recorded"))

    @property
    def drawn(self) -> bool:
        """Whether another seed means other arrivals."""
        return self.mode.name in ("poisson", "gamma")

    def first(self, count: int) -> Traffic:
        """The first `count` requests."""
        if count == len(self.trace):
            return self
        placement = None if self.placement is None else self.placement[:count]
        return dataclasses.replace(self, trace=self.trace.slice_count(0, count), placement=placement)


class _Ended(Exception):
    """The measurement was cancelled."""


class SimulatedEvaluator:
    """An `Evaluator`. Results are kept: a config is simulated once for each seed."""

    same_requests = True

    def __init__(
        self,
        incumbent: LiveConfig,
        traffic: Traffic,
        cost: StepCost,
        server: Server,
        *,
        limits: Limits,
        first_judged: int = 0,
        num_blocks: int = 12,
        seed: int = 0,
        seed_each_time: bool = False,
    ) -> None:
        """Requests before number `first_judged` are simulated, so that the others meet a busy server, and not judged.

        `seed_each_time`: the n-th measurement of a config draws its arrivals with seed + n, so that further rounds see others.
        """
        self._incumbent = incumbent
        self._traffic = traffic
        self._cost = cost
        self._server = server
        self._limits = limits
        self._first_judged = first_judged
        self._num_blocks = num_blocks
        self._seed = seed
        self._seed_each_time = seed_each_time
        self._asked: Counter[LiveConfig] = Counter()
        self._known: dict[tuple[LiveConfig, int], Measurement] = {}
        self.num_simulated = 0

    async def evaluate(
        self,
        config: LiveConfig | None,
        *,
        baseline: Measurement | None,
        on_progress: Callable[[float], None],
    ) -> Measurement:
        """One measurement, in a thread of its own. `baseline` is not needed: the incumbent's is at hand."""
        chosen = self._incumbent if config is None else config
        seed = self._seed + (self._asked[chosen] if self._seed_each_time else 0)
        self._asked[chosen] += 1
        ended = threading.Event()
        work = asyncio.create_task(asyncio.to_thread(self.measure, chosen, seed, on_progress, ended))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            ended.set()
            await asyncio.wait({work})
            raise

    def measure(
        self,
        config: LiveConfig,
        seed: int,
        on_progress: Callable[[float], None] = lambda _: None,
        ended: threading.Event | None = None,
    ) -> Measurement:
        """What a config does to the requests. A candidate that a guardrail would have ended is "stopped", as it would be live."""
        found = self._known.get((config, seed))
        if found is not None:
            return found
        found = self._simulate(config, seed, on_progress, ended)
        if config != self._incumbent and found.status == "measured" and isinstance(found.reading, Reading):
            usual = self.measure(self._incumbent, seed, ended=ended)
            reason = guardrails.must_stop(
                found.reading,
                baseline=usual.reading if isinstance(usual.reading, Reading) else None,
                slo=config.slo,
                limits=self._limits,
                incumbent_blocks=usual.blocks,
                candidate_blocks=found.blocks,
            )
            if reason is not None:
                found = dataclasses.replace(found, status="stopped", reason=reason)
        self._known[config, seed] = found
        return found

    def _simulate(
        self,
        config: LiveConfig,
        seed: int,
        on_progress: Callable[[float], None],
        ended: threading.Event | None,
    ) -> Measurement:
        traffic = self._traffic
        trace = retime(traffic.trace, traffic.mode, seed)
        from_s = trace.requests[self._first_judged].arrival_s
        shown = 0.0

        def progress(done: float) -> None:
            nonlocal shown
            if ended is not None and ended.is_set():
                raise _Ended
            if done - shown >= PROGRESS_STEP or done >= 1.0:
                shown = done
                on_progress(done)

        self.num_simulated += 1
        simulation = simulate(
            trace,
            self._cost,
            dataclasses.replace(self._server, live=config),
            slo=client_slo(config.slo),
            replicas=traffic.replicas,
            routing=traffic.routing,
            placement=traffic.placement,
            tally_from_s=from_s,
            on_progress=progress,
        )
        judged = measured.verdicts(simulation, config.slo, self._first_judged)
        reading: Reading | Unknown = measured.reading(simulation, judged, from_s)
        assert isinstance(reading, Reading), "numbers may be too few to count, never missing"
        end_s = reading.end_s
        needed = self._limits.min_requests
        if len(judged) < needed:
            reading = Unknown(f"only {len(judged)} requests were judged, at least {needed} are needed")
        return Measurement(
            "measured" if isinstance(reading, Reading) else "unknown",
            config,
            0,  # no engine gave it a number
            from_s,
            end_s,
            reading,
            measured.blocks(
                judged,
                from_s,
                trace.requests[-1].arrival_s,
                self._num_blocks,
                [simulation.result.requests[each.index] for each in judged],
            ),
            "" if isinstance(reading, Reading) else reading.reason,
        )
