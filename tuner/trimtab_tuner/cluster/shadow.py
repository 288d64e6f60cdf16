"""Shadow runs in a cluster: recorded requests, or a trace, replayed to engines that are added for the length of the run.

Called by `evaluators`. The operator makes these engines and puts candidates in force there alone, so nobody's request meets one: moves
may be large, and each change is measured as soon as the one before has drained. Recorded traffic is that of as many of the
service's engines as there are added ones, so that each of those gets what one of these got.

Nothing is measured while one of them is missing: the others would have its share of the load. What was under way then says nothing,
and the next measurement waits until the operator has all of them ready again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable

from trimtab_engine.core.live import LiveConfig
from trimtab_tuner import trace as traces
from trimtab_tuner.cluster import live, metrics, pods
from trimtab_tuner.cluster.kube import Unavailable
from trimtab_tuner.cluster.metrics import PodFinder
from trimtab_tuner.cluster.plan import Engines, Plan, Work
from trimtab_tuner.cluster.records import Records
from trimtab_tuner.errors import InputError
from trimtab_tuner.evaluate import Evaluator, LiveEvaluator, Measurement
from trimtab_tuner.guardrails import Limits
from trimtab_tuner.metrics.names import TRIMTAB
from trimtab_tuner.recorded import EngineRecords, merge
from trimtab_tuner.replay import ReplayOptions
from trimtab_tuner.simulate.search import Unmeasured
from trimtab_tuner.trace import Trace
from trimtab_tuner.workload import ReplayWorkload

LEAST_REQUESTS = live.MIN_REQUESTS_TRACE
#: Incumbent, candidate, confirmation; and one to spare.
REPLAYS = 4
#: Of a replay's length, for its last answers, a wash-out and the change itself.
BETWEEN_SHARE = 0.25
LOOK_AGAIN_S = 1.0
#: An engine's death shows in its failed requests at once, and in its pod after two probes, 2 s apart (`plan/manifests`), and some delay.
LOSS_SHOWS_S = 8.0
LIMITS = Limits(
    max_factor=None, cooldown_windows=0, min_requests=LEAST_REQUESTS, error_budget_left=0.0
)  # as for any replay to engines that serve nobody


class Readiness:
    """Whether all of a run's engines stand behind their Service now."""

    def __init__(
        self,
        find: PodFinder,
        replicas: int,
        paused: Callable[[], Awaitable[str | None]],
        say: Callable[[str, str], None],
        loss_shows_s: float = LOSS_SHOWS_S,
    ) -> None:
        """`paused` raises when the run is over; `say` gets a line for the log; `loss_shows_s`: how long `lost` looks."""
        self._find = find
        self._replicas = replicas
        self._paused = paused
        self._say = say
        self._loss_shows_s = loss_shows_s
        self.waited_s = 0.0

    async def lacking(self) -> str | None:
        """How many there are, when some are missing."""
        try:
            ready = len(await self._find())
        except Unavailable:
            ready = 0  # never seen yet: an answer that was had stands while the API server is away
        return metrics.too_few(ready, self._replicas)

    async def wait(self) -> None:
        """Until all are ready. The operator says meanwhile what they lack, and ends a run at its time limit; that raises RunOver."""
        began_s, said = time.monotonic(), False
        while (why := await self.lacking()) is not None:
            if not said:
                self._say("engines", f"waiting: {why}")
                said = True
            await self._paused()
            await asyncio.sleep(LOOK_AGAIN_S)
        if said:
            self.waited_s += time.monotonic() - began_s

    async def lost(self) -> str | None:
        """What is missing, if that shows within the time that the death of an engine takes to show."""
        began_s = time.monotonic()
        while (why := await self.lacking()) is None and time.monotonic() - began_s < self._loss_shows_s:
            await asyncio.sleep(LOOK_AGAIN_S / 2)
        return why

    async def forbidden(self) -> str | None:
        """Why a candidate that is measured has to go."""
        return await self._paused() or await self.lacking()


class OnceReady:
    """An `Evaluator` that begins each measurement once all engines are there."""

    def __init__(self, evaluator: Evaluator, readiness: Readiness) -> None:
        self._evaluator = evaluator
        self._readiness = readiness

    @property
    def same_requests(self) -> bool:
        """See `Evaluator`."""
        return self._evaluator.same_requests

    async def evaluate(
        self,
        config: LiveConfig | None,
        *,
        baseline: Measurement | None,
        on_progress: Callable[[float], None],
    ) -> Measurement:
        """See `Evaluator`."""
        await self._readiness.wait()
        return await self._evaluator.evaluate(config, baseline=baseline, on_progress=on_progress)


async def make(work: Work) -> Plan:
    """The plan of a Shadow run, once its engines are ready."""
    engines = work.engines
    if engines is None:
        raise InputError(
            "--engines", None, "address and number of the run's own engines, which the operator makes"
        )
    began_s = time.monotonic()
    # First: read tokens do not live long, and engines may take their time.
    trace = await _recorded(work, engines) if work.trace is None else traces.load(work.trace)
    if isinstance(trace, str):
        return Plan(Unmeasured(work.incumbent, trace), LIMITS, live.options(work))
    find = PodFinder(work.kube, work.namespace, f"{work.run.name}-shadow")
    readiness = Readiness(find, engines.replicas, work.paused, work.say)
    await readiness.wait()
    work = dataclasses.replace(work, time_left_s=work.time_left_s - (time.monotonic() - began_s))
    workload = ReplayWorkload(
        trace, engines.url, slo=work.incumbent.slo, options=ReplayOptions(api_key=work.api_key)
    )
    interval_s = min(live.LAST_INTERVAL_S, max(live.FIRST_INTERVAL_S, workload.span_s / live.SAMPLES_A_SLICE))
    evaluator = LiveEvaluator(
        work.target,
        metrics.scraping(work.client, find, interval_s, wanted=engines.replicas),
        workload,
        names=TRIMTAB,
        limits=LIMITS,
        lease_s=live.LEASE_S,
        washout_s=live.WASHOUT_S,
        min_requests=LEAST_REQUESTS,
        wait_until_idle=True,
        paused=readiness.forbidden,
        halted=work.paused,  # an engine that is lost is no halt
        lost=readiness.lost,
    )
    facts = {"workload": trace.source, "requests": workload.num_requests, "span_s": round(workload.span_s, 1),
             "trace_hash": workload.trace_hash, "engines": engines.replicas}  # fmt: skip
    return Plan(
        OnceReady(evaluator, readiness),
        LIMITS,
        live.options(work),
        facts=facts,
        waited_s=lambda: readiness.waited_s,
    )


async def _recorded(work: Work, engines: Engines) -> Trace | str:
    """The newest recorded requests of as many engines of the service as there are added ones; a text says why there is no trace."""
    found = await pods.find(work.kube, work.namespace, work.service.name)
    records, told = Records(work.client, work.tokens), list[EngineRecords]()
    for pod in records.readable(found):
        answer = await records.ask(pod)
        if answer.records:
            told.append(EngineRecords(pod.name, answer.records, answer.block_size, answer.dropped))
        if len(told) == engines.replicas:
            break
    merged = merge(work.service.name, told)
    part = None if merged is None else newest(merged.trace, work.service.window_s, work.time_left_s)
    count = 0 if part is None else len(part)
    if part is None or count < LEAST_REQUESTS:
        return (
            f"engines of {work.service.name} have recorded {count} requests that a replay has time for; at least {LEAST_REQUESTS} "
            "are needed: send it more traffic, raise spec.timeLimit, or give a trace"
        )
    return part


def newest(trace: Trace, window_s: float, time_left_s: float) -> Trace:
    """The last `window_s` of the recording, or less, so that `REPLAYS` fit into `time_left_s`; more where that holds too few requests."""
    fits_s = max(1.0, time_left_s / REPLAYS / (1 + BETWEEN_SHARE))
    part = _last(trace, min(window_s, fits_s))
    return _last(trace, fits_s) if len(part) < LEAST_REQUESTS else part


def _last(trace: Trace, span_s: float) -> Trace:
    if trace.span_s <= span_s:
        return trace
    return trace.slice_time(trace.span_s - span_s, trace.span_s + 1.0)
