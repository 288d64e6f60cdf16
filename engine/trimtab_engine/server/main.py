"""The HTTP process: builds the app, runs both ports in one event loop, follows the engine's life, drains on a signal.

`cli` calls `run`. Order: bind both ports (a port in use is known before a model loads), start the engine process, open
the ports at once (probes see "loading"), wait for Ready, load the text side, become ready. Ends with an exit code:
0 after a drain, 1 when the engine died or hung, 2 when it refused its configuration, 128 + n when a second signal n came.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from trimtab_engine.config import EngineConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.live_state import LiveState, Versioned
from trimtab_engine.messages import Init
from trimtab_engine.model_files import resolve
from trimtab_engine.server.access import AccessMiddleware
from trimtab_engine.server.admin import create_admin_app
from trimtab_engine.server.auth import AdminAuth
from trimtab_engine.server.client import EngineClient
from trimtab_engine.server.lifecycle import Lifecycle, Phase
from trimtab_engine.server.live import LiveDoor
from trimtab_engine.server.metrics.exporter import EngineMetrics
from trimtab_engine.server.metrics.ledger import Ledger
from trimtab_engine.server.openai.errors import install_error_handlers
from trimtab_engine.server.openai.routes import build_router
from trimtab_engine.server.ops import ops_routes
from trimtab_engine.server.options import ServerOptions
from trimtab_engine.server.state import AppState
from trimtab_engine.server.text.model_text import ModelText
from trimtab_engine.server.workload import WorkloadLog

logger = logging.getLogger(__name__)

TICK_S = 0.015  # SLO deadlines are booked within 20 ms
FLUSH_S = 2.0  # for answers that are ready but not yet handed to their sockets
ENGINE_EXIT_S = 5.0
HOLD_LOOK_S = 0.25  # how late a hold is seen that is given or ended while we leave
KEEP_ALIVE_S = 75  # longer than the idle time of common proxies, so that they close first


def create_app(state: AppState) -> FastAPI:
    """The serving app: OpenAI routes and the routes for operation."""
    app = FastAPI(title="trimtab-engine", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.routes.extend(ops_routes(state))
    app.include_router(build_router(state))
    install_error_handlers(app)
    return app


def build_state(
    config: EngineConfig, options: ServerOptions, incumbent: Versioned, boot_error: str | None
) -> AppState:
    """Wire one server's parts together; nothing is started."""
    start_unix_s = time.time()
    workload = WorkloadLog(config.block_size)
    ledger = Ledger(incumbent.config.slo, incumbent.generation, workload=workload)
    metrics = EngineMetrics(ledger, options.served_model_name, start_unix_s)
    lifecycle = Lifecycle()
    client = EngineClient(
        model_name=options.served_model_name,
        lifecycle=lifecycle,
        max_queued_requests=options.max_queued_requests,
        stall_timeout_s=options.stall_timeout_s,
        on_token=ledger.engine_token,
        on_step=metrics.on_step,
    )

    def on_change(in_force: Versioned) -> None:
        ledger.set_generation(in_force.generation, in_force.config.slo)
        metrics.on_live_config(
            generation=in_force.generation,
            source=in_force.source,
            policy=in_force.config.scheduling_policy,
            budget=in_force.config.max_num_batched_tokens,
            max_num_seqs=in_force.config.max_num_seqs,
        )

    client.on_step_model = metrics.on_step_model
    readback = LiveState(incumbent, config.ceilings, boot_error).to_json(time.time() - time.monotonic())
    live = LiveDoor(client, config.ceilings, readback, start_unix_s, on_change)
    live.announce()
    return AppState(
        options=options,
        lifecycle=lifecycle,
        client=client,
        ledger=ledger,
        metrics=metrics,
        workload=workload,
        live=live,
    )


def run(config: EngineConfig, options: ServerOptions, incumbent: Versioned, boot_error: str | None) -> int:
    """Serve until stopped; the exit code. Raises ConfigError for what is wrong before anything has started."""
    auth = None
    if options.admin_public_key is not None:
        assert options.admin_audience is not None, "checked by ServerOptions"
        auth = AdminAuth(options.admin_public_key, options.admin_audience)
    with contextlib.ExitStack() as stack:
        serving = stack.enter_context(_bind("--port", options.host, options.port))
        admin = stack.enter_context(_bind("--admin-port", options.admin_host, options.admin_port))
        return asyncio.run(_Server(config, options, incumbent, boot_error, auth).serve(serving, admin))


class _Server:
    """One run of the HTTP process."""

    def __init__(
        self,
        config: EngineConfig,
        options: ServerOptions,
        incumbent: Versioned,
        boot_error: str | None,
        auth: AdminAuth | None,
    ) -> None:
        self._config = config
        self._options = options
        self._incumbent = incumbent
        self._boot_error = boot_error
        self._auth = auth
        self._stop = asyncio.Event()  # the first signal
        self._forced: int | None = None  # the second signal
        self._forced_event = asyncio.Event()
        self._url = ""
        self.state = build_state(config, options, incumbent, boot_error)

    async def serve(self, serving: socket.socket, admin: socket.socket) -> int:
        """Run to the end; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        state = self.state
        servers = [
            _uvicorn(AccessMiddleware(create_app(state), state)),
            _uvicorn(create_admin_app(state, self._auth)),
        ]
        await state.client.start(
            Init(
                engine=self._config.to_json(),
                live=self._incumbent.config.to_json(),
                generation=self._incumbent.generation,
                source=self._incumbent.source,
                boot_error=self._boot_error,
            ),
            self._options.log_format,
        )
        tasks = [
            asyncio.create_task(coroutine, name=name)
            for name, coroutine in self._background(servers, serving, admin)
        ]
        try:
            self._announce(serving, admin)
            return await self._until_end(tasks, servers)
        finally:
            state.client.kill()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _background(
        self, servers: list[uvicorn.Server], serving: socket.socket, admin: socket.socket
    ) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        yield "serving", servers[0].serve(sockets=[serving])
        yield "admin", servers[1].serve(sockets=[admin])
        yield "ready", self._become_ready()
        yield "tick", self._tick()
        if self._options.live_config is not None:
            yield "live", self.state.live.watch(self._options.live_config)

    async def _until_end(self, tasks: list[asyncio.Task[None]], servers: list[uvicorn.Server]) -> int:
        state = self.state
        ends = [asyncio.create_task(self._stop.wait()), asyncio.create_task(state.client.dead.wait())]
        ready = next(task for task in tasks if task.get_name() == "ready")
        watched: set[asyncio.Task[Any]] = {*ends, *tasks}
        while True:
            done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done - set(ends):
                if task is not ready or task.exception() is not None:
                    task.result()  # raises what went wrong
                    raise RuntimeError(f"the {task.get_name()} task ended by itself")
            if done & set(ends):
                break
        code = await (self._after_death() if state.client.dead.is_set() else self._drain())
        ended_by = state.client.fatal
        for server in servers:
            server.should_exit = True
            server.force_exit = self._forced is not None
        for task in ends:
            task.cancel()
        await asyncio.wait([t for t in tasks if t.get_name() in ("serving", "admin")], timeout=FLUSH_S)
        if state.lifecycle.phase is Phase.DEAD:
            print(f"trimtab-engine: {state.lifecycle.reason}", file=sys.stderr, flush=True)
            return 2 if ended_by is not None and ended_by.kind == "config" else code
        state.lifecycle.advance(Phase.STOPPED)
        return code

    async def _become_ready(self) -> None:
        state = self.state
        await state.client.ready.wait()
        info = state.client.info
        state.lifecycle.progress("text", 0.0)
        cache_dir = None if self._config.cache_dir is None else Path(self._config.cache_dir).expanduser()
        # In a thread: a big vocabulary takes a second, and the probes must be answered meanwhile.
        state.model_files = await asyncio.to_thread(resolve, info.model_path, cache_dir)
        state.text = await asyncio.to_thread(ModelText.load, state.model_files)
        state.metrics.on_ready(info.num_blocks, info.block_size)
        # Code and vocabulary live as long as the process: the collector need not walk them between two tokens.
        gc.collect()
        gc.freeze()
        if state.lifecycle.advance(Phase.READY):
            logger.info(
                "ready",
                extra={
                    "url": self._url,
                    "model": info.model_name,
                    "device": info.device,
                    "max_model_len": info.max_model_len,
                    "num_blocks": info.num_blocks,
                    "load_s": round(info.load_s, 2),
                },
            )

    async def _tick(self) -> None:
        while True:
            self.state.ledger.tick()
            busy = self.state.ledger.num_open or self.state.num_http_requests
            await asyncio.sleep(TICK_S if busy else 0.05)

    async def _drain(self) -> int:
        """Two phases: leaving, then refusing until what runs is finished. A second signal cuts both short."""
        state, options = self.state, self._options
        state.lifecycle.leave()
        if state.lifecycle.loaded:
            await self._leave()
            state.lifecycle.advance(Phase.REFUSING)
            logger.info("draining", extra={"open": state.client.num_open, "limit_s": options.drain_timeout_s})
            await self._finish(options.drain_timeout_s)
            if state.client.num_open:
                logger.warning("drain limit passed", extra={"aborted": state.client.num_open})
                why = (
                    "a second signal" if self._forced else f"the drain limit of {options.drain_timeout_s:g} s"
                )
                state.client.fail_open(f"the server stopped: {why} ended this request")
                if not self._forced:
                    await self._finish(FLUSH_S)
            await self._linger()
        if state.lifecycle.phase is Phase.DEAD:
            return 1
        stall = state.client.progress.stall(time.monotonic())
        if stall is not None and not self._forced:
            # Ended by a liveness probe, most likely: whoever looks for the reason finds it in the last line, and no "0".
            state.lifecycle.advance(Phase.DEAD, stall)
            state.client.kill()
            return 1
        await state.client.stop(0.0 if self._forced or not state.lifecycle.loaded else ENGINE_EXIT_S)
        return 128 + self._forced if self._forced else 0

    async def _leave(self) -> None:
        """Serve on for the leaving time, and before it for as long as the operator holds us; not when that could serve nobody."""
        state = self.state
        while (left_s := state.lifecycle.leaves_for_s(self._options.leaving_time_s)) > 0:
            if self._forced_event.is_set() or state.client.dead.is_set():
                return
            if state.lifecycle.held and state.client.progress.stall(time.monotonic()) is not None:
                return
            await self._pause(min(left_s, HOLD_LOOK_S))

    async def _linger(self) -> None:
        """Stay a moment with nothing to do but refuse."""
        while (left_s := self.state.lifecycle.lingers_for_s(self._options.leaving_time_s)) > 0:
            if self._forced_event.is_set() or self.state.client.dead.is_set():
                return
            await self._pause(min(left_s, HOLD_LOOK_S))

    async def _after_death(self) -> int:
        logger.error("engine died", extra={"reason": self.state.lifecycle.reason})
        deadline_s = time.monotonic() + FLUSH_S
        while self.state.num_http_requests and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        return 1

    async def _finish(self, limit_s: float) -> None:
        """Wait until nothing is open, neither in the engine nor in HTTP; at most `limit_s`, or a second signal."""
        deadline_s = time.monotonic() + limit_s
        state = self.state
        while (state.client.num_open or state.num_http_requests) and time.monotonic() < deadline_s:
            if self._forced_event.is_set() or state.client.dead.is_set():
                return
            await asyncio.sleep(0.01)

    async def _pause(self, duration_s: float) -> None:
        if duration_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._forced_event.wait(), duration_s)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._forced = number
            self._forced_event.set()
        self._stop.set()

    def _announce(self, serving: socket.socket, admin: socket.socket) -> None:
        port, admin_port = serving.getsockname()[1], admin.getsockname()[1]
        self._url = f"http://{_in_url(self._options.host)}:{port}/v1"
        logger.info(
            "listening",
            extra={
                "url": self._url,
                "admin_url": f"http://{_in_url(self._options.admin_host)}:{admin_port}",
            },
        )
        path = self._options.port_file
        if path is not None:
            body = json.dumps({"port": port, "admin_port": admin_port, "pid": os.getpid()})
            try:
                temporary = path.with_name(f".{path.name}.{os.getpid()}")
                temporary.write_text(body + "\n")
                temporary.replace(path)  # whoever polls for the file never reads half of it
            except OSError as error:
                temporary.unlink(missing_ok=True)
                allowed = f"a file that can be written ({error.strerror})"
                raise ConfigError("--port-file", str(path), allowed) from error


class _UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers: two servers share the loop, and a drain is ours to run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _uvicorn(app: ASGIApp) -> uvicorn.Server:
    return _UvicornServer(
        uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            ws="none",
        )
    )


def _bind(flag: str, host: str, port: int) -> socket.socket:
    """A listening socket; ConfigError naming the flag when that is not possible."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(flag, port, f"a port that is free on {host} ({reason})") from error


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
