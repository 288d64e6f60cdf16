"""Measures one config: put it in force as a lease, wash out, run the workload, read the metrics of its generation.

`run` calls an `Evaluator`; `LiveEvaluator` is the one for running engines. Between start and end every snapshot is kept
and handed to the guardrails, so that a bad candidate is gone within about one interval of being seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from trimtab_engine.core.live import LiveConfig
from trimtab_tuner import guardrails
from trimtab_tuner.errors import ServerError
from trimtab_tuner.guardrails import Limits
from trimtab_tuner.lease import Lease
from trimtab_tuner.metrics import reading as readings
from trimtab_tuner.metrics.names import Names
from trimtab_tuner.metrics.reading import Block, Reading, Unknown
from trimtab_tuner.metrics.snapshot import Snapshot, Window
from trimtab_tuner.metrics.source import MetricsSource
from trimtab_tuner.pace import Pace
from trimtab_tuner.target import ServiceTarget, TargetRefused, Versioned

PREPARING_S = 0.2
Status = Literal["measured", "stopped", "unknown"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One config under one run of the workload. "stopped": a guardrail ended it; "unknown": it says nothing. `halted`: because nobody
    may try a candidate for now (a quiet time, a person's pause), so that it may as well be tried once more."""

    status: Status
    config: LiveConfig
    generation: int
    started_s: float  # Unix time
    ended_s: float
    reading: Reading | Unknown
    blocks: tuple[Block, ...]
    reason: str = ""
    client: Mapping[str, float | None] | None = None  # what the sender of the workload saw
    snapshots: tuple[Snapshot, ...] = ()
    halted: bool = False


class _Stop(NamedTuple):
    """Why a measurement ends before its workload does."""

    status: Status
    reason: str
    halted: bool = False


class Workload(Protocol):
    """What runs while a config is measured: a replayed segment, or a window of live traffic."""

    @property
    def span_s(self) -> float:
        """Time over which blocks are laid."""

    @property
    def began_s(self) -> float | None:
        """Unix time at which the current run's blocks begin; None before it is known."""

    @property
    def same_requests(self) -> bool:
        """Every run sends the same requests at the same times, so that blocks of two runs are pairs."""

    async def run(self, on_progress: Callable[[float], None]) -> Mapping[str, float | None] | None:
        """Runs to its end; reports the fraction done; returns what its sender saw, if it sent anything."""

    def pace(self, count: int) -> Sequence[Pace]:
        """Tokens and time of the last run in `count` blocks of its requests; empty where it knows no requests."""


class Evaluator(Protocol):
    """Measures configs. `config` None: the incumbent as it is, without a lease."""

    @property
    def same_requests(self) -> bool:
        """See `Workload.same_requests`."""

    async def evaluate(
        self,
        config: LiveConfig | None,
        *,
        baseline: Measurement | None,
        on_progress: Callable[[float], None],
    ) -> Measurement:
        """One measurement. Raises ServerError only when the service itself cannot be reached to begin with."""


class ObserveWorkload:
    """Live traffic as it comes."""

    same_requests = False

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self.began_s: float | None = None

    async def run(self, on_progress: Callable[[float], None]) -> None:
        """Waits until the window is over."""
        begun = time.monotonic()
        self.began_s = time.time()
        while (passed := time.monotonic() - begun) < self.span_s:
            on_progress(passed / self.span_s)
            await asyncio.sleep(min(0.5, self.span_s - passed))
        on_progress(1.0)

    def pace(self, count: int) -> Sequence[Pace]:
        """Unknown: the requests are others'. A slice as a whole has its tokens and seconds in its reading."""
        return ()


class LiveEvaluator:
    """An `Evaluator` on a running service."""

    def __init__(
        self,
        target: ServiceTarget,
        source: MetricsSource,
        workload: Workload,
        *,
        names: Names,
        limits: Limits,
        lease_s: float = 30.0,
        washout_s: float = 30.0,
        num_blocks: int = 12,
        min_requests: int | None = None,
        wait_until_idle: bool = False,
        paused: Callable[[], Awaitable[str | None]] | None = None,
        halted: Callable[[], Awaitable[str | None]] | None = None,
        lost: Callable[[], Awaitable[str | None]] | None = None,
        canary: bool = False,
    ) -> None:
        """`wait_until_idle`: the workload is all the traffic there is, so wash-out ends when nothing runs or waits.

        `paused`: why no candidate may be in force now; `halted`: the same, of what is no fault of the measurement's (default: all of it).

        `lost`: asked before a guardrail's stop is booked on the candidate: which engine died, whose requests then fail before anything
        else says so. Such a measurement says nothing. It may take its time, so leave it out where engines serve others meanwhile.

        `canary`: only some targets try a candidate, so those alone are read, and two runs never have the same requests.

        `min_requests`: below that a reading is Unknown (default: what `limits` asks for a verdict).
        """
        self._target = target
        self._source = source
        self._workload = workload
        self._names = names
        self._limits = limits
        self._lease_s = lease_s
        self._washout_s = washout_s
        self._num_blocks = num_blocks
        self._min_requests = limits.min_requests if min_requests is None else min_requests
        self._wait_until_idle = wait_until_idle
        self._paused = paused
        self._halted = halted or paused
        self._lost = lost
        self._canary = canary
        self.max_age_s = max(10.0, 4 * source.interval_s)

    @property
    def same_requests(self) -> bool:
        """See `Workload.same_requests`."""
        return self._workload.same_requests and not self._canary

    async def evaluate(
        self,
        config: LiveConfig | None,
        *,
        baseline: Measurement | None,
        on_progress: Callable[[float], None],
    ) -> Measurement:
        """One measurement; the incumbent is back in force when it returns or raises."""
        incumbent = (await self._target.read()).incumbent
        if config is None or config == incumbent.config:
            return await self._measure(incumbent.config, incumbent.generation, None, None, on_progress)
        try:
            measured = await self._try(config, incumbent, baseline, on_progress)
        except TargetRefused:
            if (why := await self._held()) is None:
                raise
            now = time.time()
            nothing = Unknown(why)
            return Measurement(
                "unknown", config, incumbent.generation, now, now, nothing, (), why, halted=True
            )
        # What ends a candidate ends its lease and its numbers too, and those may have been noticed first.
        if measured.status == "unknown" and not measured.halted and await self._held():
            measured = dataclasses.replace(measured, halted=True)
        return measured

    async def _held(self) -> str | None:
        """Why no candidate may be tried now, through no fault of the measurement's, or None."""
        return None if self._halted is None else await self._halted()

    async def _try(
        self,
        config: LiveConfig,
        incumbent: Versioned,
        baseline: Measurement | None,
        on_progress: Callable[[float], None],
    ) -> Measurement:
        async with Lease(self._target, lease_s=self._lease_s) as lease:
            generation = incumbent.generation
            moves = guardrails.path(incumbent.config, config, self._limits)
            for index, move in enumerate(moves):
                generation = await lease.move(move)
                if index < len(moves) - 1:
                    # Each move is watched on its own before the next one is made.
                    step = await self._watch(self._washout_s, move, generation, lease, baseline)
                    if step is not None:
                        return step
            return await self._measure(config, generation, lease, baseline, on_progress)

    async def _watch(
        self, seconds: float, config: LiveConfig, generation: int, lease: Lease, baseline: Measurement | None
    ) -> Measurement | None:
        snapshots = [await self._source.snapshot(not_before_s=time.time())]
        began = time.time()
        while time.time() - began < seconds:
            await asyncio.sleep(min(self._source.interval_s, seconds))
            snapshots.append(await self._source.snapshot())
            if stop := await self._stop(snapshots, config, generation, lease, baseline, ()):
                unknown = Unknown(f"stopped on the way there: {stop.reason}")
                return Measurement(
                    stop.status,
                    config,
                    generation,
                    began,
                    time.time(),
                    unknown,
                    (),
                    stop.reason,
                    None,
                    tuple(snapshots),
                    stop.halted,
                )
        return None

    async def _measure(
        self,
        config: LiveConfig,
        generation: int,
        lease: Lease | None,
        baseline: Measurement | None,
        on_progress: Callable[[float], None],
    ) -> Measurement:
        await self._wash_out()
        first = await self._first_sample()
        began = time.time()
        if first.failures:
            reason = "no metrics to begin with: " + "; ".join(f"{t}: {why}" for t, why in first.failures)
            return Measurement(
                "unknown", config, generation, began, began, Unknown(reason), (), reason, None, (first,)
            )
        kept = [first]
        work = asyncio.create_task(self._workload.run(on_progress))
        stop: _Stop | None = None
        client: Mapping[str, float | None] | None = None
        try:
            while stop is None and not work.done():
                # Until the workload's clock begins, samples come quickly: the last one before it is the start.
                begun = self._workload.began_s is not None
                pause_s = self._source.interval_s if begun else min(PREPARING_S, self._source.interval_s)
                await asyncio.wait({work}, timeout=pause_s)
                snapshot = await self._source.snapshot()
                if not snapshot.failures:
                    kept.append(snapshot)
                elif time.time() - kept[-1].taken_s > self.max_age_s:
                    causes = "; ".join(f"{t}: {why}" for t, why in snapshot.failures)
                    stop = _Stop("unknown", f"no metrics for {self.max_age_s:g} s ({causes})")
                if stop is None and not work.done():
                    edges = self._edges(until=snapshot.taken_s)
                    stop = await self._stop(kept, config, generation, lease, baseline, edges)
            if stop is None:
                client = await work
        except ServerError as error:
            stop = _Stop("unknown", f"the workload failed: {error}")
        finally:
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError, ServerError):
                    await work
        last = await self._source.snapshot(not_before_s=time.time())
        kept.append(last)
        window = Window(kept)
        if self._workload.began_s is not None:
            window = window.since(
                self._workload.began_s
            )  # without the requests that only prepared the workload
        if self._canary and lease is not None:
            window = window.only(readings.running(window, self._names, generation))
        if lease is not None and lease.lost and stop is None:
            stop = _Stop("unknown", lease.lost)
        reading = readings.read(
            window,
            names=self._names,
            generation=generation,
            min_requests=self._min_requests,
            max_age_s=self.max_age_s,
        )
        if isinstance(reading, Unknown):
            if stop is None:
                stop = _Stop("unknown", reading.reason)
            elif stop.status == "stopped" and (last.failures or window.restarts()):
                # That an engine went down with the candidate is part of why it was stopped.
                stop = stop._replace(reason=f"{stop.reason}; {reading.reason}")
        status, reason, halted = stop or ("measured", "", False)
        blocks = readings.blocks(window, self._names, generation, self._edges())
        if status == "measured" and blocks and (pace := self._workload.pace(len(blocks))):
            blocks = tuple(dataclasses.replace(b, tokens=p.tokens, seconds=p.seconds)
                           for b, p in zip(blocks, pace, strict=True))  # fmt: skip
        return Measurement(
            status,
            config,
            generation,
            began,
            last.taken_s,
            reading,
            blocks,
            reason,
            client,
            window.snapshots,
            halted,
        )

    async def _first_sample(self) -> Snapshot:
        for _ in range(3):
            snapshot = await self._source.snapshot(not_before_s=time.time())
            if not snapshot.failures:
                break
            await asyncio.sleep(self._source.interval_s)
        return snapshot

    def _edges(self, until: float | None = None) -> tuple[float, ...]:
        began = self._workload.began_s
        if began is None:
            return ()
        # A block without a sample inside would lend its verdicts to its neighbour.
        num_blocks = max(1, min(self._num_blocks, int(self._workload.span_s / (2 * self._source.interval_s))))
        width = self._workload.span_s / num_blocks
        edges = [began + index * width for index in range(num_blocks + 1)]
        return tuple(edge for edge in edges if until is None or edge <= until)

    async def _stop(
        self,
        snapshots: Sequence[Snapshot],
        config: LiveConfig,
        generation: int,
        lease: Lease | None,
        baseline: Measurement | None,
        edges: Sequence[float],
    ) -> _Stop | None:
        if lease is None:
            return None  # the incumbent stays whatever it does
        if self._paused is not None and (why := await self._paused()):
            return _Stop("unknown", why, halted=await self._held() is not None)
        if lease.lost:
            return _Stop("unknown", lease.lost)
        if len(snapshots) < 2:
            return None
        window = Window(snapshots)
        if self._canary:
            window = window.only(readings.running(window, self._names, generation))
        now = readings.read(
            window, names=self._names, generation=generation, min_requests=0, max_age_s=self.max_age_s
        )
        if isinstance(now, Unknown):
            return _Stop("unknown", now.reason)
        paired = baseline is not None and self.same_requests
        usual = baseline.reading if baseline is not None and isinstance(baseline.reading, Reading) else None
        blocks: tuple[Block, ...] = ()
        if paired and len(edges) > 1:
            # Only whole blocks: what came after the last edge belongs to a block that is still open.
            blocks = readings.blocks(window.until(edges[-1]), self._names, generation, edges)
        reason = guardrails.must_stop(
            now,
            baseline=usual,
            slo=config.slo,
            limits=self._limits,
            incumbent_blocks=baseline.blocks if baseline is not None and paired else (),
            candidate_blocks=blocks,
        )
        if reason is None:
            return None
        lost = None if self._lost is None else await self._lost()
        return _Stop("unknown", lost) if lost else _Stop("stopped", reason)

    async def _wash_out(self) -> None:
        """Drops what the change before still influences: a fixed time, or until an own workload has drained."""
        if not self._wait_until_idle:
            await asyncio.sleep(self._washout_s)
            return
        give_up = time.monotonic() + self._washout_s
        while time.monotonic() < give_up:
            snapshot = await self._source.snapshot(not_before_s=time.time())
            if not snapshot.samples:
                return  # the first sample of the measurement will say so
            open_requests = [
                sum(sample.series.get(name, {}).values())
                for sample in snapshot.samples
                for name in (self._names.running, self._names.waiting)
            ]
            if open_requests and not any(open_requests):
                return
            await asyncio.sleep(0.2)
