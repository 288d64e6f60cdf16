"""The measuring HTTP client's parser: the same answer however the network cuts it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_tuner.wire import ProtocolError, ResponseParser

EVENTS = [b'{"choices":[{"text":"a\\n\\nb"}]}', b"x" * 300, "grüße".encode(), b"[DONE]"]


def chunked(*parts: bytes) -> bytes:
    return (
        b"".join(b"%x;name=value\r\n%s\r\n" % (len(part), part) for part in parts)
        + b"0\r\nTrailer: 1\r\n\r\n"
    )


def stream(body: bytes, *headers: bytes) -> bytes:
    head = [
        b"HTTP/1.1 100 Continue\r\n",
        b"HTTP/1.1 200 OK",
        b"Content-Type: text/event-stream; charset=utf-8",
        *headers,
    ]
    return b"\r\n".join([*head, b"", b""]) + body


SSE = b"".join(b"data: %s\n\n" % event for event in EVENTS)
SSE_CRLF = b": comment\r\n\r\n" + b"".join(b"event: x\r\ndata:%s\r\n\r\n" % event for event in EVENTS)
# Chunks end anywhere, in the middle of an event and of a line end too.
BODIES = [
    stream(chunked(*(b"data: %s\n\n" % event for event in EVENTS)), b"Transfer-Encoding: chunked"),
    stream(chunked(SSE[:7], SSE[7:40], SSE[40:]), b"transfer-encoding:Chunked"),
    stream(chunked(SSE_CRLF[:14], SSE_CRLF[14:33], SSE_CRLF[33:]), b"Transfer-Encoding: chunked"),
    stream(SSE, b"Content-Length: %d" % len(SSE)),
    stream(SSE, b"Connection: close"),
]


@given(st.sampled_from(BODIES), st.lists(st.integers(1, 60), min_size=1, max_size=60))
def test_events_are_the_same_however_the_bytes_are_cut(body: bytes, sizes: list[int]) -> None:
    parser = ResponseParser()
    events: list[bytes] = []
    position = 0
    for size in [*sizes, len(body)]:
        events += parser.feed(body[position : position + size])
        position += size
    parser.end()
    assert events == EVENTS
    assert parser.status == 200
    assert parser.complete


def test_a_plain_reply_is_collected_and_ends_by_its_length() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 4\r\n\r\nno") == []
    assert not parser.complete
    parser.feed(b"ne")
    assert (parser.status, bytes(parser.body), parser.headers["retry-after"], parser.complete) == (
        503,
        b"none",
        "1",
        True,
    )


@pytest.mark.parametrize(
    "received",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
)
def test_a_reply_that_breaks_off_is_not_complete(received: bytes) -> None:
    parser = ResponseParser()
    parser.feed(received)
    parser.end()
    assert not parser.complete


@pytest.mark.parametrize(
    "received",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"x" * 70_000,
    ],
)
def test_what_is_not_http_is_refused(received: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseParser().feed(received)
