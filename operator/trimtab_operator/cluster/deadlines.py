"""Ends exchanges whose time is over, whatever they wait for: a socket's own timeout begins anew with each piece that comes, so a server
that drips its headers could hold a thread for hours. Used by `engines`; one thread watches all. Knows nothing of what is said.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

#: What httpx tells of a request under way: the event's name, and what belongs to it.
Trace = Callable[[str, Mapping[str, Any]], None]
_CONNECTED = ("connection.connect_tcp.complete", "connection.connect_unix_socket.complete")


class Deadlines:
    """See the module. Thread-safe. Its thread begins with the first exchange and ends with `close`."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._open: dict[int, tuple[float, socket.socket]] = {}  # end (monotonic), by exchange
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[Trace]:
        """The exchange inside has so long; its connection, made inside, is cut then. Give the trace to httpx as an extension."""
        number, end_s = next(self._numbers), time.monotonic() + seconds

        def trace(event: str, info: Mapping[str, Any]) -> None:
            if event in _CONNECTED:
                self._watch(number, end_s, info["return_value"].get_extra_info("socket"))

        try:
            yield trace
        finally:
            with self._condition:
                self._open.pop(number, None)

    def _watch(self, number: int, end_s: float, connection: socket.socket) -> None:
        with self._condition:
            self._open[number] = end_s, connection
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="deadlines", daemon=True)
                self._thread.start()
            self._condition.notify()

    def _run(self) -> None:
        with self._condition:
            while not self._closed:
                now = time.monotonic()
                for number in [number for number, (end_s, _) in self._open.items() if end_s <= now]:
                    _, connection = self._open.pop(number)
                    with contextlib.suppress(OSError):  # closed already
                        connection.shutdown(socket.SHUT_RDWR)
                ends = [end_s for end_s, _ in self._open.values()]
                self._condition.wait(min(ends) - now if ends else None)

    def close(self) -> None:
        """End the thread."""
        with self._condition:
            self._closed = True
            self._condition.notify()
