"""Open-loop replay of a trace against an OpenAI-compatible server, keeping the time of every token.

Open loop: each request is sent when the trace says, whether or not earlier ones were answered, and its latency counts from
that *intended* moment, so a slow server (or a late send) cannot hide its queue. Called by `trimtab-tuner replay`, by the
study and by benchmarks. Computes no percentile and knows no Prometheus.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import platform
import resource
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any

from . import burstiness
from .arrivals import Mode, parse_mode, retime
from .errors import InputError, ServerError
from .exchange import RequestFactory, Sender
from .progress import Counters, Observer
from .prompts import PromptKind, PromptMaker
from .result import ReplayResult, RequestResult
from .server import ServerInfo, api_headers, inspect, live_config
from .slo import Slo
from .trace import Trace
from .wire import Endpoint

# Connections are opened this long before their request is due, so that the send itself is one write.
_CONNECT_AHEAD_S = 0.25
# Time from the end of preparations to the first arrival.
_START_DELAY_S = 0.5
_UPDATE_EVERY_S = 0.5
_POLL_STOP_S = 0.05


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to talk to the server.

    `prompt_seed` None draws fresh contents (recorded in the result), so that no prefix cache knows them. `warmup_requests`
    are sent one after another before the clock starts and are not measured. `drain_timeout_s` bounds the wait for answers
    after the last arrival; None waits for all. `extra_body` is merged into every request.
    """

    model: str | None = None
    api_key: str | None = None
    prompt_kind: PromptKind = "tokens"
    prompt_seed: int | None = None
    token_id_range: tuple[int, int] | None = None
    warmup_requests: int = 0
    drain_timeout_s: float | None = None
    send_classes: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)


def replay(
    trace: Trace,
    url: str,
    *,
    slo: Slo,
    mode: Mode | str = "recorded",
    seed: int = 0,
    options: ReplayOptions | None = None,
    observer: Observer | None = None,
    stop: threading.Event | None = None,
) -> ReplayResult:
    """Replay and return what was measured; blocks. See `replay_async`.

    In the main thread, Ctrl-C ends the measurement and keeps what there is (`meta["interrupted"]`); a second one raises
    KeyboardInterrupt.
    """
    stop = threading.Event() if stop is None else stop
    with _interrupt_sets(stop), _quiet_collector():
        return asyncio.run(
            replay_async(
                trace, url, slo=slo, mode=mode, seed=seed, options=options, observer=observer, stop=stop
            )
        )


async def replay_async(
    trace: Trace,
    url: str,
    *,
    slo: Slo,
    mode: Mode | str = "recorded",
    seed: int = 0,
    options: ReplayOptions | None = None,
    observer: Observer | None = None,
    stop: threading.Event | None = None,
) -> ReplayResult:
    """Replay in the running event loop, which should have little else to do (its delays become send-time errors).

    Raises InputError (mode, model, a request longer than the model takes) and ServerError (unreachable, refuses the first
    request) before anything is measured. Afterwards nothing raises: a request that goes wrong is a failed request.
    """
    options = ReplayOptions() if options is None else options
    endpoint = Endpoint.parse(url)
    mode = parse_mode(mode) if isinstance(mode, str) else mode
    timed = retime(trace, mode, seed)
    headers = api_headers(options.api_key)
    info = await inspect(endpoint, headers, options.model, options.token_id_range)
    _check_lengths(timed, info)
    prompt_seed = int.from_bytes(os.urandom(4), "big") if options.prompt_seed is None else options.prompt_seed
    prompts = PromptMaker.for_trace(timed, options.prompt_kind, info.token_ids, prompt_seed)
    factory = RequestFactory(endpoint, headers, info.model, prompts, options.send_classes, options.extra_body)
    continuous_usage = await factory.settle()
    before = await live_config(endpoint, headers)
    for number in range(options.warmup_requests):
        await Sender(endpoint, factory).warm_up(timed.requests[number % len(timed)], number)
    _allow_many_sockets()
    run = _Run(timed, Sender(endpoint, factory), observer, stop or threading.Event(), options.drain_timeout_s)
    requests = await run.measure()
    after = await live_config(endpoint, headers)
    sent = [request.sent_s for request in requests if request.sent_s is not None]
    meta = {
        "url": endpoint.url,
        "trace": trace.source,
        "trace_format": trace.format,
        "trace_hash": timed.hash,
        "lengths_hash": timed.lengths_hash,
        "trace_changes": list(timed.changes),
        "mode": str(mode),
        "seed": seed,
        "prompt_kind": options.prompt_kind,
        "prompt_seed": prompt_seed,
        "token_ids_from": info.token_ids_from,
        "continuous_usage": continuous_usage,
        "n": len(timed),
        "span_s": round(timed.span_s, 6),
        "started": run.started.isoformat(timespec="milliseconds"),
        "started_unix": run.started.timestamp(),  # zero of all times in `requests`
        "elapsed_s": round(run.elapsed_s, 3),
        "interrupted": run.interrupted,
        "warmup_requests": options.warmup_requests,
        "model": info.model,
        "max_model_len": info.max_model_len,
        "server_version": info.version,
        "live_config": before,
        "live_config_after": after,
        "burstiness_intended": burstiness.describe([request.arrival_s for request in timed.requests]),
        "burstiness_sent": burstiness.describe(sent) if sent else None,
        "versions": {"trimtab": version("trimtab"), "python": platform.python_version()},
    }
    return ReplayResult(meta, slo, tuple(requests))


class _Run:
    """One measurement: the driver that sends on time, and the bookkeeping around it."""

    def __init__(
        self,
        trace: Trace,
        sender: Sender,
        observer: Observer | None,
        stop: threading.Event,
        drain_timeout_s: float | None,
    ) -> None:
        self._trace = trace
        self._sender = sender
        self._observer = observer
        self._stop = stop
        self._drain_timeout_s = drain_timeout_s
        self._results: list[RequestResult] = []
        self._loop = asyncio.get_running_loop()
        self._zero = 0.0
        self.started = datetime.now(UTC)
        self.interrupted = False
        self.elapsed_s = 0.0

    async def measure(self) -> list[RequestResult]:
        """Send everything, wait for the answers, return results in trace order (those that were due)."""
        first = self._sender.factory.start_building(self._trace)
        await first
        self._zero = self._loop.time() + _START_DELAY_S
        self.started = datetime.now(UTC) + timedelta(seconds=_START_DELAY_S)
        pending: set[asyncio.Task[None]] = set()
        helpers = [asyncio.create_task(self._report_progress())]
        driver = asyncio.create_task(self._drive(pending))
        try:
            await self._until_stopped(driver)
            answers = asyncio.create_task(_finish(pending))
            helpers.append(answers)
            last_due = self._zero + self._trace.span_s
            await self._until_stopped(
                answers, last_due + (math.inf if self._drain_timeout_s is None else self._drain_timeout_s)
            )
            self.interrupted = self._stop.is_set()
        finally:
            self._sender.factory.stop_building()
            self.elapsed_s = self._loop.time() - self._zero
            left: Any = "cancelled" if self._stop.is_set() else "timeout"
            for each in [driver, *helpers, *pending]:
                each.cancel()
            await asyncio.gather(driver, *helpers, *pending, return_exceptions=True)
        for result in self._results:
            if result.finish_s is None:
                result.status = left
                result.finish_s = self.elapsed_s
                if left == "timeout":
                    result.error = f"no complete answer {self._drain_timeout_s:g} s after the last arrival"
        if self._observer is not None:
            self._observer.update(self._counters())
        now = self.elapsed_s
        return [result for result in self._results if result.sent_s is not None or result.intended_s <= now]

    async def _drive(self, pending: set[asyncio.Task[None]]) -> None:
        for index, request in enumerate(self._trace.requests):
            message = await self._sender.factory.next_message()
            due = self._zero + request.arrival_s
            wait = due - _CONNECT_AHEAD_S - self._loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            result = RequestResult(
                index=index,
                intended_s=request.arrival_s,
                asked_prompt_tokens=request.prompt_tokens,
                asked_output_tokens=request.output_tokens,
                slo_class=request.slo_class,
            )
            self._results.append(result)
            pending.add(asyncio.create_task(self._sender.run(result, message, due, self._zero)))

    async def _until_stopped(self, work: asyncio.Future[Any], end: float = math.inf) -> None:
        while not work.done() and not self._stop.is_set() and self._loop.time() < end:
            await asyncio.wait([work], timeout=_POLL_STOP_S)
        if work.done() and not work.cancelled():
            work.result()

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(_UPDATE_EVERY_S)
            if self._observer is not None:
                self._observer.update(self._counters())

    def _counters(self) -> Counters:
        done = [result for result in self._results if result.finish_s is not None]
        failed = sum(result.status != "ok" for result in done)
        return Counters(
            total=len(self._trace),
            sent=sum(result.sent_s is not None for result in self._results),
            finished=len(done) - failed,
            failed=failed,
            tokens=sum(len(result.token_times_s) for result in self._results),
            elapsed_s=max(0.0, self._loop.time() - self._zero),
            planned_s=self._trace.span_s,
        )


async def _finish(tasks: set[asyncio.Task[None]]) -> None:
    """Wait for all and raise what any raised (a bug: failures of requests are results, not exceptions)."""
    if tasks:
        done, _ = await asyncio.wait(tasks)
        for task in done:
            task.result()


def _check_lengths(trace: Trace, info: ServerInfo) -> None:
    limit = info.max_model_len
    if limit is None:
        return
    lengths = [request.prompt_tokens + request.output_tokens for request in trace.requests]
    too_long = [length for length in lengths if length > limit]
    if too_long:
        raise InputError(
            trace.source,
            f"{len(too_long)} of {len(lengths)} requests with up to {max(too_long):,} tokens",
            f"at most {limit:,} prompt + output tokens, which is what {info.model} takes; shorten them with --scale-lengths "
            f"{math.ceil(max(too_long) / limit)} or leave them out with --drop-longer {limit}",
        )


def _allow_many_sockets() -> None:
    """Raise this process's soft limit of open files to its hard limit: an overloaded server holds many streams open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """No cyclic collection while sending: a full collection stops the loop for tens of milliseconds."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _interrupt_sets(stop: threading.Event) -> Iterator[None]:
    """In the main thread, the first SIGINT sets `stop` and the second raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_interrupt(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    # asyncio.run leaves a handler that is not Python's default one alone.
    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


__all__ = ["ReplayOptions", "ServerError", "replay", "replay_async"]
