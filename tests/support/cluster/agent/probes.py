"""Startup, readiness and liveness probes of one container: httpGet, tcpSocket, exec.

`watch` runs for one life of a container; it reports through two callbacks and asks for a restart by returning. Knows nothing of pods
but the address to ask.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx

from support.cluster.agent.api import Json

Exec = Callable[
    [Sequence[str], float], Awaitable[tuple[int, str]]
]  # (argv, timeout in s) → (exit status, output)


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask."""

    ip: str
    ports: dict[str, int]  # named ports of the container
    run: Exec

    def port(self, value: int | str) -> int:
        """A number, or the number behind a name."""
        return self.ports[value] if isinstance(value, str) and not value.isdigit() else int(value)


async def ask(probe: Json, target: Target) -> str | None:
    """One attempt → None for success, else what went wrong."""
    timeout_s = float(probe.get("timeoutSeconds", 1))
    try:
        async with asyncio.timeout(timeout_s):
            if "httpGet" in probe:
                return await _http(probe["httpGet"], target, timeout_s)
            if "tcpSocket" in probe:
                _, writer = await asyncio.open_connection(target.ip, target.port(probe["tcpSocket"]["port"]))
                writer.close()
                return None
            if "exec" in probe:
                status, output = await target.run(probe["exec"]["command"], timeout_s)
                return None if status == 0 else f"exit status {status}: {output.strip()}"
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except (OSError, httpx.HTTPError) as error:
        return repr(error)
    return f"this node agent knows no probe of kind {sorted(probe)}"


async def _http(wanted: Json, target: Target, timeout_s: float) -> str | None:
    scheme = wanted.get("scheme", "HTTP").lower()
    url = (
        f"{scheme}://{wanted.get('host') or target.ip}:{target.port(wanted['port'])}{wanted.get('path', '/')}"
    )
    headers = {"User-Agent": "kube-probe/1.37", "Connection": "close"}
    headers |= {item["name"]: item["value"] for item in wanted.get("httpHeaders", [])}
    async with httpx.AsyncClient(verify=False, trust_env=False, timeout=timeout_s) as client:
        answer = await client.get(url, headers=headers)
    if 200 <= answer.status_code < 400:
        return None
    return f"HTTP probe failed with statuscode: {answer.status_code}"


async def verdict(probe: Json, target: Target, report: Callable[[str], None]) -> bool:
    """Ask until success or failure is certain (`successThreshold`, `failureThreshold`); `report` hears every failure."""
    await asyncio.sleep(float(probe.get("initialDelaySeconds", 0)))
    return await _next_verdict(probe, target, report)


async def _next_verdict(probe: Json, target: Target, report: Callable[[str], None]) -> bool:
    good = bad = 0
    while True:
        problem = await ask(probe, target)
        if problem is None:
            good, bad = good + 1, 0
        else:
            good, bad = 0, bad + 1
            report(problem)
        if good >= int(probe.get("successThreshold", 1)):
            return True
        if bad >= int(probe.get("failureThreshold", 3)):
            return False
        await asyncio.sleep(float(probe.get("periodSeconds", 10)))


async def watch(
    container: Json,
    target: Target,
    *,
    started: Callable[[], None],
    ready: Callable[[bool], None],
    report: Callable[[str, str], None],
) -> str:
    """Run the container's probes until one of them demands a restart → which one. Cancel it when the container ends.

    report: (kind of probe, problem).
    """
    startup = container.get("startupProbe")
    if startup is not None and not await verdict(startup, target, lambda text: report("Startup", text)):
        return "Startup"
    started()
    if "readinessProbe" not in container:
        ready(True)
    tasks = []
    if "readinessProbe" in container:
        tasks.append(asyncio.create_task(_readiness(container["readinessProbe"], target, ready, report)))
    if "livenessProbe" in container:
        tasks.append(asyncio.create_task(_liveness(container["livenessProbe"], target, report)))
    try:
        if not tasks:
            await asyncio.Event().wait()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return "Liveness"
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _readiness(
    probe: Json, target: Target, ready: Callable[[bool], None], report: Callable[[str, str], None]
) -> None:
    await asyncio.sleep(float(probe.get("initialDelaySeconds", 0)))
    while True:
        ready(await _next_verdict(probe, target, lambda text: report("Readiness", text)))
        await asyncio.sleep(float(probe.get("periodSeconds", 10)))


async def _liveness(probe: Json, target: Target, report: Callable[[str, str], None]) -> None:
    await asyncio.sleep(float(probe.get("initialDelaySeconds", 0)))
    while await _next_verdict(probe, target, lambda text: report("Liveness", text)):
        await asyncio.sleep(float(probe.get("periodSeconds", 10)))
