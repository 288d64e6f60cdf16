"""One request through the proxy: the replica that takes it, the way there, and the answer's way back.

Made by `proxy` for each request that it has read the head of. The promises are in `proxy`'s text. Knows nothing of how the client's
connection is read; it sees it as a `Client`.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Protocol

from trimtab_operator.local import http1
from trimtab_operator.local.backends import Backend, Backends, NoBackend

_PROBES = frozenset({b"/health", b"/ready", b"/ping"})  # never held: they ask about now
_PHASE = b"x-trimtab-phase"  # only engines on their way out send it
#: Of a request, while its replica is not connected, not fast enough, or has not answered.
MAX_BUFFERED_BYTES = 1_048_576
_CONNECT_TIMEOUT_S = 5.0
_RETRY_AFTER_S = 1


class Client(Protocol):
    """The connection that a request came on."""

    transport: asyncio.Transport
    address: bytes
    write_paused: bool

    @property
    def backends(self) -> Backends:
        """Who may take the request."""

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """What is cancelled when the proxy ends."""

    @property
    def stopping(self) -> bool:
        """Whether this request is the connection's last."""

    def set_reading(self, wanted: bool) -> None:
        """Flow control of the client's sending side."""

    def exchange_done(self, keep_alive: bool) -> None:
        """The answer's last byte was written."""

    def abort(self) -> None:
        """Cut the connection."""


class Exchange:
    """One request and its answer: from the head's arrival to the last byte or the first broken connection."""

    def __init__(self, client: Client, request: http1.RequestHead) -> None:
        self.client = client
        self.request = request
        self.backend: Backend | None = None
        self._upstream: _Upstream | None = None
        self._pending = bytearray()  # request bytes while there is no connection yet
        self._sent: bytearray | None = (
            None  # request bytes that another replica would need; None: too many, or answered
        )
        self._refused: list[Backend] = []  # not asked again
        self._deadline = 0.0
        self._task: asyncio.Task[None] | None = None
        self.answered = False  # a response byte was written to the client
        self._over = False
        self._response: http1.ResponseHead | None = None
        self._frames = b""  # of an event stream: the incomplete last chunk

    # From the client

    def start(self) -> None:
        """Find a replica and connect to it."""
        self._pending += self._request_bytes()
        probe = self.request.target.split(b"?", 1)[0] in _PROBES
        hold_s = 0.0 if probe else self.client.backends.hold_s
        self._deadline = asyncio.get_running_loop().time() + hold_s
        self._begin()

    def send(self, data: bytes) -> None:
        """Request body bytes."""
        if self._over:
            return
        if self._upstream is not None:
            self._upstream.transport.write(data)
            if self._sent is not None:
                self._sent += data
                if len(self._sent) > MAX_BUFFERED_BYTES:
                    self._sent = None
        else:
            self._pending += data
            self.client.set_reading(len(self._pending) < MAX_BUFFERED_BYTES)

    def client_gone(self) -> None:
        """The client left: nothing of it may stay at the replica."""
        self._end()

    def pause_upstream(self) -> None:
        """The client reads more slowly than the replica writes."""
        if self._upstream is not None:
            self._upstream.transport.pause_reading()

    def resume_upstream(self) -> None:
        """The client caught up."""
        if self._upstream is not None and not self._upstream.transport.is_closing():
            self._upstream.transport.resume_reading()

    # To the replica

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._connect())
        self.client.tasks.add(self._task)
        self._task.add_done_callback(self.client.tasks.discard)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        backends = self.client.backends
        while True:
            try:
                chosen = await backends.acquire(self._deadline, self._refused)
            except NoBackend as error:
                self._fail(503, f"{error}; retry", "service_unavailable")
                return
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    _, upstream = await loop.create_connection(
                        lambda: _Upstream(self), chosen.host, chosen.port
                    )
            except (OSError, TimeoutError):
                # Nothing was sent, so another replica may have it; this one is not asked again.
                backends.release(chosen)
                self._refused.append(chosen)
                continue
            except asyncio.CancelledError:
                backends.release(chosen)
                raise
            break
        self.backend = chosen
        if self._over:
            upstream.transport.abort()
            self._release()
            return
        self._upstream = upstream
        upstream.transport.write(bytes(self._pending))
        self._sent = self._pending if len(self._pending) <= MAX_BUFFERED_BYTES else None
        self._pending = bytearray()
        self.client.set_reading(True)
        if self.client.write_paused:
            self.pause_upstream()

    def _go_elsewhere(self) -> None:
        """The replica has refused the request: begin anew with another one."""
        assert self._upstream is not None
        assert self._sent is not None
        assert self.backend is not None
        self._refused.append(self.backend)
        self._pending, self._sent = self._sent, None
        upstream, self._upstream = self._upstream, None
        upstream.drop()
        self._release()
        self._begin()

    def _request_bytes(self) -> bytes:
        request = self.request
        headers = [pair for pair in http1.end_to_end(request.headers) if pair[0] != b"x-forwarded-for"]
        route = [value for name, value in request.headers if name == b"x-forwarded-for"]
        headers.append((b"x-forwarded-for", b", ".join([*route, self.client.address])))
        if not any(name == b"x-forwarded-proto" for name, _ in headers):
            headers.append((b"x-forwarded-proto", b"http"))
        if not any(name == b"x-request-id" for name, _ in headers):
            headers.append((b"x-request-id", uuid.uuid4().hex.encode()))
        headers.append((b"connection", b"close"))
        return http1.render(b"%b %b HTTP/%b" % (request.method, request.target, request.version), headers)

    # From the replica

    def response_head(self, response: http1.ResponseHead) -> None:
        """The replica answered; interim answers (1xx) pass too."""
        client, version = self.client, self.request.version
        first_line = b"HTTP/1.1 %d %b" % (response.status, response.reason)
        headers = http1.end_to_end(response.headers)
        if response.status < 200:
            if version == b"1.1":
                client.transport.write(http1.render(first_line, headers))
            return
        if any(name == _PHASE for name, _ in response.headers) and self.backend is not None:
            client.backends.remove(self.backend)
            if response.status == 503 and self._sent is not None:
                self._go_elsewhere()
                return
        self._sent = None
        self._response = response
        self.answered = True
        if not self._keep_alive():
            headers.append((b"connection", b"close"))
        elif version == b"1.0":
            headers.append((b"connection", b"keep-alive"))
        if self.backend is not None:
            headers.append((b"x-trimtab-replica", self.backend.name.encode()))
        client.transport.write(http1.render(first_line, headers))
        if response.body.done:
            self._finish()

    def response_body(self, data: bytes) -> None:
        """Body bytes, framing included. Of an event stream only whole chunks pass, so an error frame always fits in."""
        response = self._response
        assert response is not None
        taken, boundary = response.body.feed(data)
        if self._is_event_stream():
            self.client.transport.write(self._frames + data[:boundary])
            self._frames = data[boundary:taken]
        else:
            self.client.transport.write(data[:taken])
        if response.body.done:
            self._finish()

    def upstream_lost(self, reason: str) -> None:
        """The replica's connection ended; an error unless the answer was complete."""
        if self._over:
            return
        response = self._response
        if response is None:
            self._fail(
                502, f"the replica {reason} before it answered; the request was not repeated", "server_error"
            )
        elif response.body.length is None and not response.body.chunked:
            self._finish()  # framed by the close itself
        elif self._is_event_stream():
            message = f"the replica {reason} in mid-stream; the answer is incomplete"
            frame = b"data: " + json.dumps(_error_body(message, "server_error")).encode() + b"\n\n"
            self.client.transport.write(http1.chunk(frame) + b"0\r\n\r\n")
            self._finish(keep_alive=False)
        else:
            self._end()
            self.client.abort()  # a short body must not look whole

    # Ends

    def _is_event_stream(self) -> bool:
        response = self._response
        return (
            response is not None
            and response.body.chunked
            and any(
                name == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in response.headers
            )
        )

    def _keep_alive(self) -> bool:
        response = self._response
        framed = response is None or response.body.length is not None or response.body.chunked
        return self.request.keep_alive and self.request.body.done and framed and not self.client.stopping

    def _fail(self, status: int, message: str, kind: str) -> None:
        """Answer for the replica; only while nothing was answered yet."""
        assert not self.answered
        keep_alive = self._keep_alive()
        self.client.transport.write(error_response(status, message, kind, close=not keep_alive))
        self._finish(keep_alive)

    def _finish(self, keep_alive: bool | None = None) -> None:
        keep_alive = self._keep_alive() if keep_alive is None else keep_alive
        self._end()
        self.client.exchange_done(keep_alive)

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        self._pending.clear()
        if self._upstream is not None:
            self._upstream.transport.abort()
        elif self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._release()

    def _release(self) -> None:
        if self.backend is not None:
            self.client.backends.release(self.backend)
            self.backend = None


class _Upstream(asyncio.Protocol):
    """The connection to one replica for one exchange."""

    transport: asyncio.Transport

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._head = bytearray()
        self._in_body = False
        self._dropped = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def drop(self) -> None:
        """Whatever it says is of no interest any more."""
        self._dropped = True
        self.transport.abort()

    def pause_writing(self) -> None:
        self._exchange.client.set_reading(False)

    def resume_writing(self) -> None:
        self._exchange.client.set_reading(True)

    def data_received(self, data: bytes) -> None:
        try:
            if self._in_body:
                self._exchange.response_body(data)
            else:
                self._take_head(data)
        except http1.ProtocolError as error:
            self.transport.abort()
            self._exchange.upstream_lost(f"sent a broken answer ({error})")

    def _take_head(self, data: bytes) -> None:
        self._head += data
        while (end := self._head.find(b"\r\n\r\n")) >= 0:
            head, rest = bytes(self._head[:end]), bytes(self._head[end + 4 :])
            self._head = bytearray(rest)
            response = http1.parse_response(head, self._exchange.request.method)
            self._exchange.response_head(response)
            if self._dropped:
                return
            if response.status >= 200:
                self._in_body = True
                if rest and not response.body.done:
                    self._exchange.response_body(rest)
                return
        if len(self._head) > http1.MAX_HEAD_BYTES:
            raise http1.ProtocolError("its head is too long", status=502)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._dropped:
            self._exchange.upstream_lost("closed the connection")


def _error_body(message: str, kind: str) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def error_response(status: int, message: str, kind: str, *, close: bool) -> bytes:
    """An answer of the proxy's own, in the shape of OpenAI's errors."""
    payload = json.dumps(_error_body(message, kind)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
    if status == 503:
        headers.append((b"retry-after", str(_RETRY_AFTER_S).encode()))
    if close:
        headers.append((b"connection", b"close"))
    reason = {
        400: b"Bad Request",
        431: b"Request Header Fields Too Large",
        501: b"Not Implemented",
        502: b"Bad Gateway",
    }
    phrase = reason.get(status, b"Service Unavailable" if status == 503 else b"Error")
    return http1.render(b"HTTP/1.1 %d %b" % (status, phrase), headers) + payload
