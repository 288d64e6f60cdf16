"""HTTP/1.1 heads and body framing, as much as a relay needs: bytes are followed, never re-encoded.

Called by `proxy`. A relay only has to know where a message ends, so bodies are not decoded: a tracker walks the framing
(RFC 9112: content-length, chunked, or until close) and says which bytes belong to the message. Knows nothing of sockets,
replicas or OpenAI's API.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_HEAD_BYTES = 65_536
_MAX_LINE_BYTES = 4_096  # one chunk-size line or trailer field
_TOKEN = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_HEX = frozenset(b"0123456789abcdefABCDEF")

# Fields about one connection, not about the message (RFC 9110, 7.6.1). transfer-encoding is missing on purpose: the
# framing is relayed as it is.
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade", b"proxy-authenticate"}
)

Headers = list[tuple[bytes, bytes]]


class ProtocolError(Exception):
    """The peer's bytes are not HTTP/1.1 that a relay may pass on; `status` is the answer for a client."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Body:
    """Walks the framing of one body. `done` says that its last byte was seen."""

    def __init__(self, length: int | None, chunked: bool = False) -> None:
        """`length` in bytes; None with `chunked` false means: until the peer closes."""
        self.length = length
        self.chunked = chunked
        self.done = length == 0 and not chunked
        self._left = length or 0  # bytes to go: of the body, or of the chunk at hand with its CRLF
        self._state = "size"  # size → data → size … → trailer
        self._line = b""

    def feed(self, data: bytes) -> tuple[int, int]:
        """Take bytes → (how many belong to this body, how many of them end on a frame boundary).

        For an unchunked body both numbers are equal. Raises ProtocolError on broken chunk framing.
        """
        if self.chunked:
            return self._feed_chunked(data)
        if self.length is None:
            return len(data), len(data)
        taken = min(self._left, len(data))
        self._left -= taken
        self.done = self._left == 0
        return taken, taken

    def _feed_chunked(self, data: bytes) -> tuple[int, int]:
        at, boundary, end = 0, 0, len(data)
        while at < end and not self.done:
            if self._state == "data":
                taken = min(self._left, end - at)
                at += taken
                self._left -= taken
                if self._left == 0:
                    self._state = "size"
                    boundary = at
                continue
            newline = data.find(b"\n", at)
            if newline < 0:
                self._line += data[at:]
                at = end
            else:
                line = (self._line + data[at:newline]).rstrip(b"\r")
                self._line = b""
                at = newline + 1
                self._take_line(line)
            if len(self._line) > _MAX_LINE_BYTES:
                raise ProtocolError("a chunk-size line is too long")
        return at, at if self.done else boundary

    def _take_line(self, line: bytes) -> None:
        if self._state == "trailer":
            self.done = not line
            return
        size = line.split(b";", 1)[0].strip()
        if not size or len(size) > 15 or not _HEX.issuperset(size):
            raise ProtocolError("a chunk size is not a hexadecimal number")
        self._left = int(size, 16)
        if self._left == 0:
            self._state = "trailer"
        else:
            self._left += 2  # the CRLF behind the data
            self._state = "data"


@dataclass(slots=True)
class RequestHead:
    """A request's first line and fields, names in lower case."""

    method: bytes
    target: bytes
    version: bytes  # b"1.0" or b"1.1"
    headers: Headers
    keep_alive: bool
    body: Body


@dataclass(slots=True)
class ResponseHead:
    """A response's first line and fields, names in lower case."""

    status: int
    reason: bytes
    headers: Headers
    body: Body


def parse_request(head: bytes) -> RequestHead:
    """The bytes before the empty line → a head; raises ProtocolError."""
    lines = head.split(b"\r\n")
    parts = lines[0].split(b" ")
    if len(parts) != 3 or not parts[0] or not _TOKEN.issuperset(parts[0]) or not parts[1]:
        raise ProtocolError("the request line is not `METHOD TARGET HTTP/1.1`")
    method, target, protocol = parts
    if protocol not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise ProtocolError("only HTTP/1.1 and HTTP/1.0 are served", status=505)
    version = protocol[5:]
    headers = _parse_fields(lines[1:])
    length, chunked = _framing(headers)
    if method == b"CONNECT":
        raise ProtocolError("CONNECT is not served", status=501)
    options = _values(headers, b"connection")
    keep_alive = b"close" not in options and (version == b"1.1" or b"keep-alive" in options)
    return RequestHead(method, target, version, headers, keep_alive, Body(length or 0, chunked))


def parse_response(head: bytes, method: bytes) -> ResponseHead:
    """The bytes before the empty line → a head; `method` is the request's, HEAD has no body. Raises ProtocolError."""
    lines = head.split(b"\r\n")
    parts = lines[0].split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise ProtocolError("the status line is not HTTP/1.1", status=502)
    status = int(parts[1])
    headers = _parse_fields(lines[1:])
    length, chunked = _framing(headers)
    if method == b"HEAD" or status < 200 or status in (204, 304):
        body = Body(0)
    else:
        body = Body(length, chunked)
    return ResponseHead(status, parts[2] if len(parts) > 2 else b"", headers, body)


def render(first_line: bytes, headers: Headers) -> bytes:
    """A head's bytes, with the empty line."""
    return b"\r\n".join([first_line, *(name + b": " + value for name, value in headers), b"", b""])


def chunk(payload: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def end_to_end(headers: Headers) -> Headers:
    """The fields without those of one connection, also those that `connection` names."""
    dropped = HOP_BY_HOP | set(_values(headers, b"connection")) - {b"close"}
    return [(name, value) for name, value in headers if name not in dropped]


def _parse_fields(lines: list[bytes]) -> Headers:
    headers: Headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        # A space before the colon and folded lines are how requests get smuggled: refused, not repaired.
        if not colon or not name or not _TOKEN.issuperset(name) or b"\n" in value or b"\0" in value:
            raise ProtocolError("a header field is malformed")
        headers.append((name.lower(), value.strip(b" \t")))
    return headers


def _values(headers: Headers, wanted: bytes) -> list[bytes]:
    listed = b",".join(value for name, value in headers if name == wanted)
    return [item.strip().lower() for item in listed.split(b",") if item.strip()]


def _framing(headers: Headers) -> tuple[int | None, bool]:
    lengths = {value for name, value in headers if name == b"content-length"}
    codings = _values(headers, b"transfer-encoding")
    if codings:
        if codings != [b"chunked"] or lengths:
            raise ProtocolError("transfer-encoding must be chunked alone, without content-length")
        return None, True
    if not lengths:
        return None, False
    if len(lengths) > 1 or not (value := lengths.pop()).isdigit() or len(value) > 15:
        raise ProtocolError("content-length must be one number")
    return int(value), False
