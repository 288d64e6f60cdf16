"""Following HTTP/1.1 framing: how the bytes are cut up never changes where a body ends."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_operator.local import http1


def encoded(chunks: list[bytes], trailer: bytes = b"") -> bytes:
    return b"".join(http1.chunk(chunk) for chunk in chunks) + b"0\r\n" + trailer + b"\r\n"


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    rest=st.binary(max_size=10),
    cuts=st.lists(st.integers(0, 300), max_size=8),
    trailer=st.sampled_from([b"", b"x-sum: 1\r\n"]),
)
def test_chunked_body_ends_at_the_same_byte_however_it_is_cut(
    chunks: list[bytes], rest: bytes, cuts: list[int], trailer: bytes
) -> None:
    wire = encoded(chunks, trailer)
    whole = wire + rest
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    body = http1.Body(None, chunked=True)
    taken = 0
    boundaries = {sum(len(http1.chunk(c)) for c in chunks[: i + 1]) for i in range(len(chunks))} | {len(wire)}
    for start, end in itertools.pairwise(places):
        if body.done:
            break
        used, boundary = body.feed(whole[start:end])
        if boundary:
            assert start + boundary in boundaries
        taken += used
    assert body.done
    assert taken == len(wire)


@given(length=st.integers(0, 100), extra=st.binary(max_size=10), cut=st.integers(0, 100))
def test_sized_body_takes_exactly_its_length(length: int, extra: bytes, cut: int) -> None:
    whole = b"x" * length + extra
    body = http1.Body(length)
    taken = sum(body.feed(part)[0] for part in (whole[:cut], whole[cut:]) if not body.done)
    assert (taken, body.done) == (length, True)


@pytest.mark.parametrize("size", [b"", b"-1", b"0x1", b"1 1", b"g", b"1" * 20], ids=repr)
def test_broken_chunk_size_is_refused(size: bytes) -> None:
    with pytest.raises(http1.ProtocolError):
        http1.Body(None, chunked=True).feed(size + b"\r\n")


def test_endless_chunk_size_is_refused() -> None:
    body = http1.Body(None, chunked=True)
    for _ in range(4):
        body.feed(b"1;" + b"x" * 1000)
    with pytest.raises(http1.ProtocolError):
        body.feed(b"x" * 1000)


@pytest.mark.parametrize(
    ("connection", "version", "keeps"),
    [("", b"1.1", True), ("close", b"1.1", False), ("Keep-Alive", b"1.0", True), ("", b"1.0", False)],
)
def test_connection_is_kept_as_the_version_says(connection: str, version: bytes, keeps: bool) -> None:
    head = b"GET / HTTP/" + version + (f"\r\nConnection: {connection}".encode() if connection else b"")
    assert http1.parse_request(head).keep_alive is keeps


def test_fields_of_one_connection_are_not_passed_on() -> None:
    head = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, X-Secret\r\nX-Secret: 1\r\nTE: trailers\r\nX-Kept: 2"
    passed = http1.end_to_end(http1.parse_request(head).headers)
    assert passed == [(b"host", b"a"), (b"x-kept", b"2")]


@pytest.mark.parametrize(
    ("status", "method", "done"),
    [(b"204", b"GET", True), (b"304", b"GET", True), (b"200", b"HEAD", True), (b"200", b"GET", False)],
)
def test_answers_without_a_body_end_with_their_head(status: bytes, method: bytes, done: bool) -> None:
    head = http1.parse_response(b"HTTP/1.1 " + status + b" x\r\ncontent-length: 5", method)
    assert head.body.done is done
