"""A lean HTTP/1.1 client for measuring: one connection a request, no limits, no timeouts, times taken as bytes arrive.

Used by `replay.py` alone. General clients pool connections and schedule reads through several layers, which delays sends
and blurs arrival times under load; here the event loop's own callback takes the time. `ResponseParser` is pure.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .errors import InputError, ServerError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server is. `root` is the path before `/v1`, usually empty."""

    host: str
    port: int
    tls: bool
    root: str

    @staticmethod
    def parse(url: str, path: str = "--url") -> Endpoint:
        """From `http://host:8000`, with or without `/v1` at the end. Raises InputError."""
        parts = urlsplit(url)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = 0
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or not port
            or parts.query
            or parts.fragment
        ):
            raise InputError(path, url, "an http or https address such as http://127.0.0.1:8000")
        root = parts.path.rstrip("/").removesuffix("/v1")
        return Endpoint(parts.hostname, port, parts.scheme == "https", root)

    @property
    def url(self) -> str:
        """For messages and provenance."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.root}"

    def message(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
        """Request bytes; the server is asked to close the connection after its reply."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.root}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class ProtocolError(Exception):
    """The reply is not HTTP/1.1 as expected."""


class ResponseParser:
    """Incremental parser of one response: status line, headers, then a body by length, in chunks or up to the end.

    `feed` returns the data of each complete server-sent event when the reply is an event stream, else nothing and the
    body collects in `body`.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.complete = False
        self._raw = bytearray()
        self._events = bytearray()
        self._remaining: int | None = None  # of the body or of the current chunk; None: up to the end
        self._chunked = False
        self._in_trailer = False

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes as they came; raises ProtocolError."""
        self._raw += data
        while self.status is None:
            if not self._read_head():
                return []
        return self._take_body()

    def end(self) -> None:
        """The peer closed. A body without length ends here; any other must be complete."""
        if self.status is not None and not self._chunked and self._remaining is None:
            self.complete = True

    def _read_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > 65536:
                raise ProtocolError("no end of headers in 64 KiB")
            return False
        status_line, *lines = bytes(self._raw[:end]).decode("latin-1").split("\r\n")
        del self._raw[: end + 4]
        version, _, rest = status_line.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise ProtocolError(f"not an HTTP/1.1 reply: {status_line[:80]!r}")
        status = int(rest[:3])
        if 100 <= status < 200:
            return True  # an interim reply (100 Continue): the real one follows
        self.status = status
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        if not self._chunked and length is not None:
            if not length.isdigit():
                raise ProtocolError(f"Content-Length: {length!r}")
            self._remaining = int(length)
            self.complete = self._remaining == 0
        return True

    def _take_body(self) -> list[bytes]:
        if not self._chunked:
            part = bytes(self._raw) if self._remaining is None else bytes(self._raw[: self._remaining])
            self._raw.clear()
            if self._remaining is not None:
                self._remaining -= len(part)
                self.complete = self._remaining == 0
            return self._deliver(part)
        found: list[bytes] = []
        while not self.complete:
            if self._remaining is None:  # expecting a chunk-size line, or a trailer line after the last chunk
                end = self._raw.find(b"\r\n")
                if end < 0:
                    break
                line = bytes(self._raw[:end])
                del self._raw[: end + 2]
                if self._in_trailer:
                    self.complete = not line
                    continue
                try:
                    size = int(line.split(b";", 1)[0], 16)
                except ValueError:
                    raise ProtocolError(f"chunk size {line[:40]!r}") from None
                if size == 0:
                    self._in_trailer = True
                else:
                    self._remaining = size + 2  # the chunk's data and its line end
                continue
            if len(self._raw) < self._remaining:
                break  # a chunk is one event or less: waiting for its end delays nothing
            part = bytes(self._raw[: self._remaining - 2])
            del self._raw[: self._remaining]
            self._remaining = None
            found += self._deliver(part)
        return found

    def _deliver(self, part: bytes) -> list[bytes]:
        if not self.is_event_stream:
            self.body += part
            return []
        self._events += part
        # A line end may be split over two parts, so it is only normalised once joined.
        *whole, rest = bytes(self._events).replace(b"\r\n", b"\n").split(b"\n\n")
        self._events = bytearray(rest)
        found = []
        for event in whole:
            data = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if data:
                found.append(b"\n".join(data))
        return found


class Exchange(asyncio.Protocol):
    """One connection with one request and its reply. `on_event(now, data)` runs as each server-sent event arrives."""

    def __init__(
        self, clock: Callable[[], float], on_event: Callable[[float, bytes], None] | None = None
    ) -> None:
        self.parser = ResponseParser()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: str | None = None
        self._clock = clock
        self._on_event = on_event
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, message: bytes) -> float:
        """Hand the request to the socket; returns the time just before."""
        assert self._transport is not None, "connected first"
        now = self._clock()
        self._transport.write(message)
        return now

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        now = self._clock()
        try:
            events = self.parser.feed(data)
        except ProtocolError as error:
            self.error = str(error)
            self.close()
            return
        if self._on_event is not None:
            for event in events:
                self._on_event(now, event)
        if self.parser.complete:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio, also after `close`."""
        self.parser.end()
        if not self.parser.complete and self.error is None:
            self.error = (
                f"connection lost: {exc}"
                if exc
                else "the server closed the connection before its reply was complete"
            )
        if not self.done.done():
            self.done.set_result(None)

    @property
    def is_closing(self) -> bool:
        """The connection is gone or going."""
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()


async def connect(
    endpoint: Endpoint, clock: Callable[[], float], on_event: Callable[[float, bytes], None] | None = None
) -> Exchange:
    """Open a connection. Raises OSError."""
    context = ssl.create_default_context() if endpoint.tls else None
    loop = asyncio.get_running_loop()
    _, exchange = await loop.create_connection(
        lambda: Exchange(clock, on_event), endpoint.host, endpoint.port, ssl=context
    )
    return exchange


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply. `json` is None when the body is not JSON."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The parsed body."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


async def call(
    endpoint: Endpoint,
    method: str,
    path: str,
    headers: Mapping[str, str],
    document: object = None,
    timeout_s: float = 30.0,
) -> Reply:
    """One small request outside the measurement. Raises ServerError when there is no HTTP reply."""
    body = b"" if document is None else json.dumps(document).encode()
    clock = asyncio.get_running_loop().time
    where = f"{method} {endpoint.url}{path}"
    try:
        async with asyncio.timeout(timeout_s):
            exchange = await connect(endpoint, clock)
            try:
                exchange.send(endpoint.message(method, path, headers, body))
                await exchange.done
            finally:
                exchange.close()
    except TimeoutError:
        raise ServerError(f"{where}: no reply in {timeout_s:g} s") from None
    except OSError as error:
        raise ServerError(f"{where}: cannot connect: {error}") from None
    parser = exchange.parser
    if exchange.error is not None or parser.status is None:
        raise ServerError(f"{where}: {exchange.error or 'no reply'}")
    return Reply(parser.status, parser.headers, bytes(parser.body))
