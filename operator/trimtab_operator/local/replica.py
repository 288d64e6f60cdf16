"""One replica of a local service: an engine process and its probes, the local counterpart of a pod and its kubelet.

Made, restarted and ended by `service` as the plan says; by itself it only observes. Ends in order: out of the proxy,
requests finished, SIGTERM, SIGKILL. What a replica runs is fixed when it is made; a change of it is another replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import httpx

from trimtab_operator import names
from trimtab_operator.local.backends import Backend
from trimtab_operator.local.process import Addresses, EngineProcess, describe_exit
from trimtab_operator.plan import failures
from trimtab_operator.plan.loading import describe

_STARTUP_PROBE_S = 0.1
_PROBE_S = 1.0
_PROBE_TIMEOUT_S = 5.0
_PROBE_FAILURES = 2  # without an answer in a row, until no new requests are sent
_LIVENESS_FAILURES = 30  # in a row, until the process is killed: a busy machine is not a dead engine
_EXIT_GRACE_S = 5.0  # for a process that has nothing left to finish
_HEALTHY_AFTER_S = 600.0  # ready for so long: earlier restarts do not lengthen the next pause


class Phase(StrEnum):
    """Where a replica is in its life."""

    STARTING = "Starting"
    READY = "Ready"
    NOT_READY = "NotReady"
    FAILED = "Failed"
    DRAINING = "Draining"
    ENDED = "Ended"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a process ended that should have run. `reason` is one of `names`."""

    reason: str
    message: str
    log_tail: str
    at_s: float  # monotonic


class Replica:
    """See the module. `on_change` is called, on the event loop, whenever `phase` or `loading` has changed. Times are monotonic."""

    def __init__(
        self,
        name: str,
        template_hash: str,
        command: Sequence[str],
        folder: Path,
        client: httpx.AsyncClient,
        on_change: Callable[[Replica], None],
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self.template_hash = template_hash
        self.command = list(command)
        self.folder = folder
        self.environment = environment
        self.phase = Phase.STARTING
        self.created_s = time.monotonic()
        self.started_s = self.created_s
        self.ready_since_s: float | None = None
        self.was_ready = False
        self.restarts = 0
        self.recent_restarts = 0  # without a long healthy time between: what the back-off counts
        self.failure: Failure | None = None  # of the last end; kept until it is ready again
        self.loading: str | None = None  # how far it is with downloading its model
        self.no_memory_since_s: float | None = None  # it found no room on the device
        self.process: EngineProcess | None = None
        self.addresses: Addresses | None = None
        self.backend: Backend | None = None
        self._client = client
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._killed_for: str | None = None
        self._leaving = False
        self._restarting = False

    def start(self) -> None:
        """Start the process; returns at once."""
        self.started_s = time.monotonic()
        self._killed_for = None
        self._enter(Phase.STARTING)
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"replica {self.name}")

    async def restart(self) -> None:
        """Start the process again, after it ended or in place of one that does not get through its start."""
        if self._restarting:
            return
        self._restarting = True
        if self.process is not None and self.process.running:
            self._killed_for = "did not get ready in time and was killed"
            self.process.kill()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._restarting = False
        if not self._leaving:
            self.restarts += 1
            self.recent_restarts += 1
            self.start()

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self.process.pid if self.process is not None and self.process.running else None

    @property
    def reachable(self) -> bool:
        """Whether its ports are known and it is meant to stay."""
        return self.addresses is not None and self.phase in (Phase.READY, Phase.NOT_READY)

    def leave(self) -> None:
        """No new requests from now on; `end` does the rest."""
        self._leaving = True
        if self.phase is not Phase.ENDED:
            self._enter(Phase.DRAINING)

    async def end(self, drain_timeout_s: float) -> None:
        """Requests under way finish within `drain_timeout_s`, then SIGTERM, at last SIGKILL."""
        self.leave()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain_timeout_s
        if self.backend is not None and self.pid is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self.backend.idle.wait()
        process = self.process
        if process is not None and process.running:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(max(deadline, loop.time() + _EXIT_GRACE_S)):
                    await process.wait()
            process.kill()
            await process.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._enter(Phase.ENDED)

    def kill(self) -> None:
        """End the process now; for the operator's own hurried end."""
        self._leaving = True
        if self.process is not None:
            self.process.kill()

    async def _run(self) -> None:
        try:
            self.process = await EngineProcess.start(self.command, self.folder, self.environment)
        except OSError as error:
            self._failed(f"cannot be started: {error}", "", names.ENGINE_CRASHED)
            return
        status = await self._until_exit(self.process)
        if not self._leaving:
            why = self._killed_for or f"ended with {describe_exit(status)}"
            tail = self.process.log_tail()
            # One that we killed gave up nothing: it counts as ended by a signal.
            judged = status if self._killed_for is None else -1
            self._failed(why, tail, failures.reason(judged, tail, self.was_ready))

    async def _until_exit(self, process: EngineProcess) -> int:
        probes = asyncio.create_task(self._probe(process))
        try:
            return await process.wait()
        finally:
            self.backend = None
            self.addresses = None
            probes.cancel()
            await asyncio.gather(probes, return_exceptions=True)

    async def _probe(self, process: EngineProcess) -> None:
        """Startup probe, then readiness and liveness, until the process ends. The plan judges how long a start may take."""
        self.addresses = await process.addresses()
        while not await self._is_loaded():
            await asyncio.sleep(_STARTUP_PROBE_S)
        self.backend = Backend(self.name, "127.0.0.1", self.addresses.port)
        self.was_ready = True
        self.ready_since_s = time.monotonic()
        self.failure = self.no_memory_since_s = None
        self._enter_unless_leaving(Phase.READY)
        not_ready = not_alive = 0
        while True:
            await asyncio.sleep(_PROBE_S)
            status = await self._ask("/ready")
            not_ready = 0 if status == 200 else not_ready + 1
            # One that says so itself is believed; silence may be a busy machine.
            refused = status not in (200, None)
            gone = refused or not_ready >= _PROBE_FAILURES
            self._enter_unless_leaving(Phase.NOT_READY if gone else Phase.READY)
            not_alive = 0 if not_ready == 0 or await self._ask("/health") == 200 else not_alive + 1
            if not_alive >= _LIVENESS_FAILURES:
                self._killed_for = "made no progress and was killed"
                process.kill()
                return

    async def _is_loaded(self) -> bool:
        """Ask `/ready`: its status alone decides; what it says until then tells how far a download is."""
        assert self.addresses is not None
        try:
            answer = await self._client.get(f"{self.addresses.url}/ready", timeout=_PROBE_TIMEOUT_S)
        except httpx.HTTPError:
            return False
        text = None
        if answer.status_code != 200:
            with contextlib.suppress(ValueError):
                text = describe(answer.json())
        if text != self.loading:
            self.loading = text
            if text is not None:
                self._on_change(self)
        return answer.status_code == 200

    async def _ask(self, path: str) -> int | None:
        """The status that it answers; None when it does not answer."""
        assert self.addresses is not None
        try:
            answer = await self._client.get(self.addresses.url + path, timeout=_PROBE_TIMEOUT_S)
        except httpx.HTTPError:
            return None
        return answer.status_code

    def _failed(self, why: str, tail: str, reason: str) -> None:
        self.loading = None
        now = time.monotonic()
        if self.ready_since_s is not None and now - self.ready_since_s >= _HEALTHY_AFTER_S:
            self.recent_restarts = 0
        self.ready_since_s = None
        if reason == names.INSUFFICIENT_GPU:
            self.no_memory_since_s = self.no_memory_since_s or now
        lines = tail.strip().splitlines()
        self.failure = Failure(reason, f"{why}: {lines[-1].strip()}" if lines else why, tail, now)
        self._enter(Phase.FAILED)

    def _enter_unless_leaving(self, phase: Phase) -> None:
        if not self._leaving:
            self._enter(phase)

    def _enter(self, phase: Phase) -> None:
        if phase is not self.phase or phase is Phase.STARTING:
            self.phase = phase
            self._on_change(self)
