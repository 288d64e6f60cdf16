"""A container's memory limit: what takes more is killed, as the kernel does it. Used by `container`.

There are no cgroups here, so memory is looked at ten times a second. What counts is anonymous memory, of the container's process and of
all that it started: files that it read can be read again, and no kernel kills for those.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from support.cluster.agent.api import Json
from support.cluster.agent.env import quantity

_EVERY_S = 0.1


def limit_of(container: Json) -> float | None:
    """Bytes that the container may take; None for any. Raises ConfigError."""
    given = container.get("resources", {}).get("limits", {}).get("memory")
    return None if given is None else quantity(given)


async def exceeded(pid: int, limit: float) -> None:
    """Until the process and what it started hold more than `limit` bytes."""
    while anonymous_bytes(pid) <= limit:
        await asyncio.sleep(_EVERY_S)


def anonymous_bytes(pid: int) -> int:
    """Of a process and of all that it started."""
    total, listed = 0, [pid]
    while listed:
        folder = Path("/proc", str(listed.pop()))
        with contextlib.suppress(OSError):  # it has ended meanwhile
            held = [
                line for line in (folder / "status").read_text().splitlines() if line.startswith("RssAnon:")
            ]
            total += sum(int(line.split()[1]) * 1024 for line in held)
            for children in folder.glob("task/*/children"):
                listed += map(int, children.read_text().split())
    return total
