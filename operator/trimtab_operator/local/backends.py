"""Which replica takes the next request: least outstanding, and a bounded wait while none is ready.

Filled level-based by the reconciler, asked by `proxy`. Lives on one event loop, holds no socket and no process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Backend:
    """One replica's serving address. `outstanding` counts requests from choice to the last byte."""

    name: str
    host: str
    port: int
    outstanding: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()


class NoBackend(Exception):
    """No replica became ready within the time a request is held, or too many requests are held already."""


class Backends:
    """The replicas that take new requests now. One that was removed finishes what it has."""

    def __init__(self, hold_s: float = 30.0, max_held: int = 1024) -> None:
        self.hold_s = hold_s
        self.max_held = max_held
        self.expected = True  # whether the service wants any replica at all
        self._ready: dict[str, Backend] = {}
        self._turn = 0  # equal loads take turns
        self._held = 0
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def ready(self) -> list[Backend]:
        """Replicas that new requests go to."""
        return list(self._ready.values())

    @property
    def num_held(self) -> int:
        """Requests waiting for a replica."""
        return self._held

    def set(self, backends: Iterable[Backend]) -> None:
        """Replace the ready set; requests that were held get their turn."""
        self._ready = {backend.name: backend for backend in backends}
        self._wake()

    def remove(self, backend: Backend) -> None:
        """Take one out at once (its process ended), if it is the one in the set."""
        if self._ready.get(backend.name) is backend:
            del self._ready[backend.name]

    def close(self) -> None:
        """No replica will come any more: held requests are refused now."""
        self._closed = True
        self._ready = {}
        self._wake()

    def choose(self, excluded: Collection[Backend] = ()) -> Backend | None:
        """The least loaded replica, counted as busy from now on; None when there is none."""
        candidates = [backend for backend in self._ready.values() if backend not in excluded]
        if not candidates:
            return None
        self._turn += 1
        start = self._turn % len(candidates)
        rotated = candidates[start:] + candidates[:start]
        best = min(rotated, key=lambda backend: backend.outstanding)
        best.outstanding += 1
        best.idle.clear()
        return best

    async def acquire(self, deadline: float, excluded: Collection[Backend] = ()) -> Backend:
        """As `choose`, but waits until the loop's time `deadline`; raises NoBackend."""
        if (chosen := self.choose(excluded)) is not None:
            return chosen
        if not self.expected:
            raise NoBackend("the service is scaled to zero replicas")
        if self._held >= self.max_held:
            raise NoBackend(f"{self._held} requests are waiting for a replica already")
        self._held += 1
        try:
            async with asyncio.timeout_at(deadline):
                while not self._closed:
                    await self._changed.wait()
                    if (chosen := self.choose(excluded)) is not None:
                        return chosen
        except TimeoutError:
            pass
        finally:
            self._held -= 1
        raise NoBackend("the service is stopping" if self._closed else "no replica is ready")

    def release(self, backend: Backend) -> None:
        """The request that `choose` counted has ended."""
        backend.outstanding -= 1
        if backend.outstanding == 0:
            backend.idle.set()

    def _wake(self) -> None:
        # A fresh event for the next wait: those who wait on the old one all wake, and wait anew when they got nothing.
        self._changed.set()
        self._changed = asyncio.Event()
