"""The one address of a local service: a streaming reverse proxy over the ready replicas.

Started by `main`; asks `backends` which replica takes a request. Built from two asyncio protocols that hand bytes to each
other inside the event-loop callback that read them, so a token waits for no task switch. One upstream connection per
request: a refused connection is then known to have carried nothing, and closing it is how a client's disconnect reaches
the engine. What is promised:

- a request is sent to one replica, once. Only when its connection was refused, or the replica refused it since it is on its way
  out (503 with `x-trimtab-phase`), does it go to another;
- a replica that says in an answer that it is on its way out gets no further requests, whatever its next probe will say;
- while no replica is ready, new requests are held, at most `Backends.hold_s` seconds, then answered 503 with Retry-After;
- a replica's death in mid-stream ends the stream with an error frame (event streams) or a cut connection (others);
- a client that goes away takes its upstream connection with it at once.

Knows nothing of the engine's API beyond OpenAI's error body, the probe paths and that header.
"""

from __future__ import annotations

import asyncio

from trimtab_operator.local import http1
from trimtab_operator.local.backends import Backends
from trimtab_operator.local.exchange import MAX_BUFFERED_BYTES, Exchange, error_response


class Proxy:
    """Listens on one address. `start` binds; `refuse_new` and `close` end it."""

    def __init__(self, backends: Backends) -> None:
        self.backends = backends
        self.connections: set[_Client] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.stopping = False
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Bind and serve; OSError when the address is taken. Port 0 takes a free one, see `port`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Client(self), host, port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def num_open(self) -> int:
        """Requests between their first byte and their last answered byte."""
        return sum(connection.exchange is not None for connection in self.connections)

    def refuse_new(self) -> None:
        """Stop listening and close idle connections; requests under way go on, the next one on a connection does not."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close_if_idle()

    async def close(self) -> None:
        """Cut whatever is left."""
        self.refuse_new()
        for connection in list(self.connections):
            connection.abort()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class _Client(asyncio.Protocol):
    """One client connection: reads request heads, one exchange at a time."""

    transport: asyncio.Transport

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.exchange: Exchange | None = None
        self.address = b""
        self.write_paused = False
        self._buffer = bytearray()
        self._reading = True
        self._searched = 0

    @property
    def backends(self) -> Backends:
        """Who may take requests."""
        return self.proxy.backends

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """What is cancelled when the proxy ends."""
        return self.proxy.tasks

    @property
    def stopping(self) -> bool:
        """Whether the request under way is the last."""
        return self.proxy.stopping

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]).encode() if peer else b"unknown"
        self.proxy.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.proxy.connections.discard(self)
        if self.exchange is not None:
            self.exchange.client_gone()

    def eof_received(self) -> bool:
        # A client that closes its sending side has left, as far as HTTP clients go: free its replica now.
        return False

    def pause_writing(self) -> None:
        self.write_paused = True
        if self.exchange is not None:
            self.exchange.pause_upstream()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self.exchange is not None:
            self.exchange.resume_upstream()

    def data_received(self, data: bytes) -> None:
        if self.exchange is not None and not self.exchange.request.body.done:
            self._feed_body(data)
        else:
            self._buffer += data
            self._next_request()

    def _next_request(self) -> None:
        """Start the exchange that the buffer holds the head of, if none is open."""
        if self.exchange is not None:
            # Pipelined early: it waits its turn, and its sender waits for room.
            self.set_reading(len(self._buffer) < MAX_BUFFERED_BYTES)
            return
        while self._buffer[:2] == b"\r\n":  # RFC 9112, 2.2: tolerated between requests
            del self._buffer[:2]
        end = self._buffer.find(b"\r\n\r\n", max(0, self._searched - 3))
        if end < 0:
            self._searched = len(self._buffer)
            if len(self._buffer) > http1.MAX_HEAD_BYTES:
                self._refuse(http1.ProtocolError("the request head is too long", status=431))
            return
        head, rest = bytes(self._buffer[:end]), bytes(self._buffer[end + 4 :])
        self._buffer.clear()
        self._searched = 0
        try:
            if end > http1.MAX_HEAD_BYTES:
                raise http1.ProtocolError("the request head is too long", status=431)
            request = http1.parse_request(head)
        except http1.ProtocolError as error:
            self._refuse(error)
            return
        self.exchange = Exchange(self, request)
        self.exchange.start()
        if rest or not request.body.done:
            self._feed_body(rest)

    def _feed_body(self, data: bytes) -> None:
        assert self.exchange is not None
        body = self.exchange.request.body
        try:
            taken, _ = body.feed(data) if not body.done else (0, 0)
        except http1.ProtocolError as error:
            answered = self.exchange.answered
            self.exchange.client_gone()
            if answered:
                self.transport.abort()
            else:
                self._refuse(error)
            return
        if taken:
            self.exchange.send(data[:taken])
        if taken < len(data):
            self._buffer += data[taken:]

    def _refuse(self, error: http1.ProtocolError) -> None:
        self.transport.write(error_response(error.status, str(error), "invalid_request_error", close=True))
        self.transport.close()

    def exchange_done(self, keep_alive: bool) -> None:
        """The answer's last byte was written."""
        self.exchange = None
        if not keep_alive or self.proxy.stopping:
            self.transport.close()
            return
        self.set_reading(True)
        if self._buffer:
            self._next_request()

    def set_reading(self, wanted: bool) -> None:
        """Flow control of the client's sending side."""
        if wanted != self._reading and not self.transport.is_closing():
            self._reading = wanted
            (self.transport.resume_reading if wanted else self.transport.pause_reading)()

    def close_if_idle(self) -> None:
        """Close, when no request is under way."""
        if self.exchange is None:
            self.transport.close()

    def abort(self) -> None:
        """Cut the connection."""
        self.transport.abort()
