"""`trimtab-operator local`: serve one InferenceService from a file on this machine, until told to stop.

Called by the command line (`cli`), which parses the options that `add_arguments` declares. Brings the parts up in the
order in which they can fail (file, state folder, ports, engines) and takes them down in the reverse one; whatever
happens, no engine outlives this process. Exit codes: 0 stopped on request, 1 an error of ours, 2 wrong input.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import httpx
import uvicorn

from trimtab_operator import support
from trimtab_operator.api import InferenceService
from trimtab_operator.errors import OperatorError
from trimtab_operator.local import spec_file
from trimtab_operator.local.backends import Backends
from trimtab_operator.local.contract import RuntimeContract
from trimtab_operator.local.control import create_control_app
from trimtab_operator.local.proxy import Proxy
from trimtab_operator.local.service import LocalService
from trimtab_operator.local.state_dir import StateDir, StateDirInUse, replace_file
from trimtab_operator.local.view import View, condition
from trimtab_operator.local.watch import FileWatch

_HOST = "127.0.0.1"
_VIEW_S = 1.0
_SWITCH_INTERVAL_S = 0.001  # the longest that the proxy waits for another thread's Python (default 0.005)


class StartError(Exception):
    """The service cannot be started; the message says what to change."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `local`, but for the file, which other commands take too."""
    parser.add_argument(
        "--port", type=_port, help="of the service on this machine (spec.service.port); 0 takes a free one"
    )
    parser.add_argument(
        "--control-port",
        type=_port,
        default=8080,
        help="of status, live config and tuning (%(default)s); 0 takes a free one",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="live config, logs (~/.local/state/trimtab/NAMESPACE/NAME)",
    )
    parser.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help='gets {"url", "control_url", "pid"} once the service is Ready',
    )
    parser.add_argument(
        "--plain", action="store_true", help="log lines in place of the live panel, as when not on a terminal"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    watch = FileWatch(arguments.filename)
    try:
        service = spec_file.load(watch.read().decode(), str(arguments.filename))
    except OSError as error:
        return _fail(f"{arguments.filename}: cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        return _fail(f"{arguments.filename}: is not UTF-8 at byte {error.start}")
    except OperatorError as error:
        return _fail(str(error))
    for finding in support.later(service, "local"):
        print(f"trimtab-operator: {finding}", file=sys.stderr)
    folder = (arguments.state_dir or _default_state_dir(service)).absolute()
    try:
        state = StateDir(folder)
    except StateDirInUse as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"--state-dir: {folder} cannot be used: {error.strerror}")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with contextlib.closing(state):
        try:
            return asyncio.run(_Local(arguments, watch, service, state).serve())
        except StartError as error:
            return _fail(str(error))


class _Local:
    """The running parts, from start to end."""

    def __init__(
        self, arguments: argparse.Namespace, watch: FileWatch, service: InferenceService, state: StateDir
    ) -> None:
        self._arguments = arguments
        self._watch = watch
        self._loaded = service
        self._state = state
        self._signals = 0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._view = View(sys.stdout, plain=arguments.plain)

    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        self._write_ready_file(None)
        backends = Backends()
        proxy = Proxy(backends)
        wanted = self._loaded.spec.service.port if self._arguments.port is None else self._arguments.port
        try:
            await proxy.start(_HOST, wanted)
        except OSError as error:
            raise StartError(_port_message("--port", wanted, error)) from error
        try:
            control_socket = _bind(self._arguments.control_port)
        except OSError as error:
            await proxy.close()
            raise StartError(_port_message("--control-port", self._arguments.control_port, error)) from error
        url = f"http://{_HOST}:{proxy.port}"
        control_url = f"http://{_HOST}:{control_socket.getsockname()[1]}"
        # No proxy settings from the environment: everything here is on the loopback.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(trust_env=False, limits=limits) as client:
            service = LocalService(self._loaded, self._watch, self._state, backends, client, url, control_url)
            service.events.listener = self._view.event
            control = _ControlServer(
                uvicorn.Config(
                    create_control_app(RuntimeContract(service)),
                    log_config=None,
                    access_log=False,
                    lifespan="off",
                    timeout_graceful_shutdown=1,
                )
            )
            tasks = [
                asyncio.create_task(service.run(), name="service"),
                asyncio.create_task(control.serve(sockets=[control_socket]), name="control port"),
                asyncio.create_task(self._show(service), name="view"),
            ]
            stop = asyncio.create_task(self._stop.wait())
            self._view.start()
            try:
                await asyncio.wait([*tasks, stop], return_when=asyncio.FIRST_COMPLETED)
                await self._end(service, proxy)
            finally:
                service.kill()
                await proxy.close()
                control.should_exit = True
                for task in (*tasks[::2], stop):
                    task.cancel()
                results = await asyncio.gather(*tasks, stop, return_exceptions=True)
                self._view.stop(f"service {self._loaded.name} has stopped; no engine is left")
                self._write_ready_file(None)
        for failure in results:
            if isinstance(failure, BaseException) and not isinstance(failure, asyncio.CancelledError):
                raise failure
        return 0

    async def _end(self, service: LocalService, proxy: Proxy) -> None:
        """Finish what runs, bounded by the drain time and by a second signal; then the engines."""
        proxy.refuse_new()
        proxy.backends.close()
        drain = asyncio.create_task(self._drain(service, proxy))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait([drain, hurry], return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, hurry):
            task.cancel()
        results = await asyncio.gather(drain, hurry, return_exceptions=True)
        if isinstance(results[0], BaseException) and not isinstance(results[0], asyncio.CancelledError):
            raise results[0]

    async def _drain(self, service: LocalService, proxy: Proxy) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + service.drain_timeout_s
        if proxy.num_open:
            service.events.normal(
                "Draining", f"{proxy.num_open} requests finish first; Ctrl-C again stops them now"
            )
        while proxy.num_open and loop.time() < deadline:
            await asyncio.sleep(0.05)
        await service.stop()

    async def _show(self, service: LocalService) -> None:
        announced = False
        while True:
            status = service.status()
            # In a thread, since a picture takes tens of milliseconds of work and tokens must not wait for it.
            await asyncio.to_thread(self._view.status, status)
            ready = condition(status, "Ready")
            if not announced and ready is not None and ready["status"] == "True":
                announced = True
                self._write_ready_file(
                    {"url": status["url"], "control_url": status["controlUrl"], "pid": os.getpid()}
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_VIEW_S):
                    await service.changed.wait()
            service.changed.clear()

    def _write_ready_file(self, content: dict[str, object] | None) -> None:
        """Write the ready file, or take it away: it must not outlive what it tells of."""
        path: Path | None = self._arguments.ready_file
        if path is None:
            return
        if content is None:
            path.unlink(missing_ok=True)
        else:
            replace_file(path, json.dumps(content))

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            self._hurry.set()


class _ControlServer(uvicorn.Server):
    """uvicorn without its signal handlers: signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Never installed."""


def _bind(port: int) -> socket.socket:
    bound = socket.socket()
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((_HOST, port))
        bound.listen(128)
    except OSError:
        bound.close()
        raise
    return bound


def _port_message(option: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{option}: {port} is in use on {_HOST}; stop what listens there, or choose another (0 takes a free one)"
    return f"{option}: {port} cannot be bound on {_HOST}: {error.strerror}"


def _port(text: str) -> int:
    if not text.isdigit() or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a port from 0 (any free one) to 65535")
    return int(text)


def _default_state_dir(service: InferenceService) -> Path:
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base / "trimtab" / service.namespace / service.name


def _fail(message: str) -> int:
    print(f"trimtab-operator: {message}", file=sys.stderr)
    return 2
