"""Carries connections between two places, byte for byte: into the namespace by a Unix socket, whose path is seen on both sides.

`BreakableRelay` is a TCP address in front of another one, whose connections a test may cut, freeze or refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_CHUNK_BYTES = 65536


def carry_to(connect: Callable[[], Awaitable[Streams]]) -> Callable[..., Awaitable[None]]:
    """A connection handler for asyncio's servers that carries every connection to what `connect` opens."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await connect()
        except OSError:
            writer.close()
            return
        # Ctrl-C cancels what is open (a `kubectl get -w`, say); asyncio prints a traceback for a handler that ends so.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    return handle


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class BreakableRelay:
    """A loopback port that leads to `host:port`, until the block ends. Runs in a thread; call it from any other one."""

    def __init__(self, host: str, port: int) -> None:
        self._far = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._refuses = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._copies: set[asyncio.Task[None]] = set()
        self.port = 0
        self.accepted = 0  # connections so far

    def __enter__(self) -> BreakableRelay:
        self._thread.start()
        self.port = self._do(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def cut(self) -> None:
        """End every connection that there is, at both sides, at once; new ones are carried."""
        self._do(self._cut())

    def freeze(self) -> None:
        """Carry nothing more over the connections that there are, and let them stand open; new ones are carried.

        So it is when something in between has forgotten them: both sides believe that the other one has nothing to say.
        """
        self._do(self._freeze())

    def refuse(self) -> None:
        """Cut, and close every new connection at once, until `carry`."""
        self._refuses = True
        self.cut()

    def carry(self) -> None:
        """Carry new connections again."""
        self._refuses = False

    def _do(self, work: Coroutine[None, None, int]) -> int:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _close(self) -> int:
        self._server.close()
        await self._freeze()
        return await self._cut()

    async def _freeze(self) -> int:
        for task in self._copies:
            task.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)
        self._copies.clear()
        return 0

    async def _cut(self) -> int:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        return 0

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._refuses:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._far)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        for task in (
            asyncio.create_task(_copy(reader, far_writer)),
            asyncio.create_task(_copy(far_reader, writer)),
        ):
            self._copies.add(task)
            task.add_done_callback(self._copies.discard)
