"""The life of one container: start, probes, memory limit, restarts with back-off, preStop, SIGTERM, grace, SIGKILL.

A `pod` owns several; each `run` is a task of its own, and `stop` ends it from outside. State goes to `status.ContainerState`, and
`changed` is called after every change of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.cluster.agent import memory, probes
from support.cluster.agent.api import Json
from support.cluster.agent.env import ConfigError
from support.cluster.agent.events import Events
from support.cluster.agent.images import ImageNotFound
from support.cluster.agent.node import now
from support.cluster.agent.process import ContainerProcess
from support.cluster.agent.status import ContainerState, Policy

BACKOFF_MAX_S = 300.0
CLEAN_RUN_S = 600.0  # after so long a run, back-off starts anew
_CONFIG_RETRY_S = 1.0
_KILLED = 128 + signal.SIGKILL

Start = Callable[[Json, Path], Awaitable[ContainerProcess]]  # (container, log file)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a container needs of its pod."""

    ip: str
    logs: Path  # one folder per container below it
    start: Start
    changed: Callable[[], None]
    events: Events
    backoff_s: float  # of the second restart; the first is immediate
    grace_s: float  # the pod's terminationGracePeriodSeconds


class Container:
    """One container of a pod. `run` once, `stop` at any time."""

    def __init__(
        self, container: Json, policy: Policy, surroundings: Surroundings, restarts: int = 0
    ) -> None:
        """policy: when to start it again; restarts: counted before this agent knew it."""
        self.spec = container
        self.state = ContainerState(container["name"], container["image"], restarts=restarts)
        self._policy = policy
        self._around = surroundings
        self._stopping = asyncio.Event()
        self._process: ContainerProcess | None = None
        self._ended = asyncio.Event()
        self._memory_limit: float | None = None
        self._out_of_memory = False
        self.started = asyncio.Event()

    def log_path(self, *, previous: bool = False) -> Path:
        """Where this run (or the one before) writes."""
        return self._around.logs / self.state.name / f"{self.state.restarts - previous}.log"

    async def run(self) -> None:
        """Keep it running as the policy says; returns when it is not to run any more."""
        delay_s = 0.0
        while not self._stopping.is_set():
            begun = time.monotonic()
            if await self._start():
                await self._live()
                if self._stopping.is_set() or not self._wants_restart():
                    return
                if time.monotonic() - begun > CLEAN_RUN_S:
                    delay_s = 0.0
                await self._back_off(delay_s)
                delay_s = min(max(2 * delay_s, self._around.backoff_s), BACKOFF_MAX_S)
                self.state.restarts += 1

    async def stop(self, deadline: Callable[[], float], *, hook: bool = True) -> None:
        """preStop, SIGTERM, and SIGKILL when `deadline()` (monotonic; it may move closer) has come."""
        self._stopping.set()
        process = self._process
        if process is None:
            return
        self._around.events.record("Killing", f"Stopping container {self.state.name}")
        ending = asyncio.create_task(self._ask_to_end(process, hook))
        while not self._ended.is_set() and time.monotonic() < deadline():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._ended.wait()
        process.kill()
        ending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ending
        await self._ended.wait()

    async def _ask_to_end(self, process: ContainerProcess, hook: bool) -> None:
        wanted = self.spec.get("lifecycle", {}).get("preStop") if hook else None
        if wanted is not None:
            problem = await self._hook(wanted, process)
            if problem is not None:
                self._around.events.record("FailedPreStopHook", problem, warning=True)
        process.terminate()

    async def _hook(self, hook: Json, process: ContainerProcess) -> str | None:
        if "sleep" in hook:
            await asyncio.sleep(float(hook["sleep"]["seconds"]))
            return None
        return await probes.ask({**hook, "timeoutSeconds": self._around.grace_s}, self._target(process))

    def _target(self, process: ContainerProcess) -> probes.Target:
        ports = {p["name"]: int(p["containerPort"]) for p in self.spec.get("ports", []) if "name" in p}
        return probes.Target(self._around.ip, ports, process.run)

    async def _start(self) -> bool:
        """Start the process; False after a wait when the image or the configuration is not there."""
        try:
            self._memory_limit = memory.limit_of(self.spec)
            self._process = await self._around.start(self.spec, self.log_path())
        except ImageNotFound as error:
            self._wait_state("ErrImagePull", str(error))
            self._around.events.record("Failed", str(error), warning=True)
            await self._pause(min(self._around.backoff_s, 1.0))
            self._wait_state("ImagePullBackOff", f'Back-off pulling image "{self.spec["image"]}": {error}')
            await self._pause(self._around.backoff_s)
            return False
        except ConfigError as error:
            self._wait_state("CreateContainerConfigError", str(error))
            self._around.events.record("Failed", f"Error: {error}", warning=True)
            await self._pause(_CONFIG_RETRY_S)
            return False
        if self._stopping.is_set():
            self._process.kill()  # `stop` came while it was being started, and saw no process
        self._ended.clear()
        self.state.waiting, self.state.terminated = None, None
        self.state.running = {"startedAt": now()}
        self.state.process = f"process://{self._process.pid}"
        self._around.events.record("Started", f"Started container {self.state.name}")
        self._around.changed()
        return True

    async def _live(self) -> None:
        """From start to end of one process, probes and memory limit included."""
        process = self._process
        assert process is not None, "only a started container lives"
        begun = self.state.running or {}
        self._out_of_memory = False
        watching = [asyncio.create_task(watch(process)) for watch in (self._probe, self._bound_memory)]
        try:
            code, number = await process.wait()
        finally:
            for task in watching:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        process.kill()  # what is left of its group
        fall_back = self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError" and code != 0
        self.state.running = None
        self.state.ready = self.state.started = False
        self.started.clear()
        self.state.terminated = {
            "exitCode": code,
            "reason": self._why(process, code),
            "startedAt": begun.get("startedAt"),
            "finishedAt": now(),
            "containerID": self.state.process,
            "message": process.message(self.log_path(), fall_back_to_log=fall_back),
        }
        if number is not None:
            self.state.terminated["signal"] = number
        self._process = None
        self._ended.set()
        self._around.changed()

    def _why(self, process: ContainerProcess, code: int) -> str:
        """The reason of its end, as a container runtime puts it."""
        if self._out_of_memory and code == _KILLED:
            return "OOMKilled"
        return "StartError" if process.start_failure else "Error" if code else "Completed"

    async def _bound_memory(self, process: ContainerProcess) -> None:
        if self._memory_limit is not None:
            await memory.exceeded(process.pid, self._memory_limit)
            self._out_of_memory = True
            process.kill()

    async def _probe(self, process: ContainerProcess) -> None:
        """Probes of this life; a failed startup or liveness probe ends the process, with preStop and grace."""

        def started() -> None:
            self.state.started = True
            self.started.set()
            self._around.changed()

        def ready(value: bool) -> None:
            if self.state.ready != value:
                self.state.ready = value
                self._around.changed()

        def report(kind: str, problem: str) -> None:
            self._around.events.record("Unhealthy", f"{kind} probe failed: {problem}", warning=True)

        kind = await probes.watch(
            self.spec, self._target(process), started=started, ready=ready, report=report
        )
        self._around.events.record(
            "Killing", f"Container {self.state.name} failed {kind.lower()} probe, will be restarted"
        )
        probe = self.spec[f"{kind.lower()}Probe"]
        grace_s = float(probe.get("terminationGracePeriodSeconds", self._around.grace_s))
        try:
            async with asyncio.timeout(grace_s):
                await self._ask_to_end(process, hook=True)
                await self._ended.wait()
        except TimeoutError:
            process.kill()

    def _wants_restart(self) -> bool:
        return self._policy == "Always" or (self._policy == "OnFailure" and not self.state.succeeded)

    async def _back_off(self, delay_s: float) -> None:
        self.state.last, self.state.terminated = self.state.terminated, None
        message = f"back-off {delay_s:g}s restarting failed container={self.state.name}"
        self._wait_state("CrashLoopBackOff", message)
        if delay_s > 0:
            self._around.events.record("BackOff", message, warning=True)
            await self._pause(delay_s)
        if self._stopping.is_set():
            self.state.terminated, self.state.waiting = self.state.last, None

    def _wait_state(self, reason: str, message: str) -> None:
        self.state.waiting = {"reason": reason, "message": message}
        self._around.changed()

    async def _pause(self, seconds: float) -> None:
        """Sleep, unless the container is to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()


async def stop_all(containers: Sequence[Container], deadline: Callable[[], float]) -> None:
    """Stop several at once."""
    await asyncio.gather(*(container.stop(deadline) for container in containers))
