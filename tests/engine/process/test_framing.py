"""Frames between the two processes: any cut, any size, a peer that does not read, a peer that dies."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_engine.framing import MAX_FRAME_BYTES, EngineChannel, FrameError, FrameReader, PeerGone, frame
from trimtab_engine.messages import Abort, Fatal, Stop

ENCODE = msgspec.msgpack.encode


@pytest.fixture
def pair() -> Iterator[tuple[EngineChannel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = EngineChannel(ours)
    with theirs:
        yield channel, theirs
    channel.close()


@given(payloads=st.lists(st.binary(max_size=300), max_size=8), cuts=st.lists(st.integers(1, 50), min_size=1))
def test_payloads_survive_any_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(p) for p in payloads)
    reader, position, turn = FrameReader(), 0, 0
    got: list[bytes] = []
    while position < len(stream):
        size = cuts[turn % len(cuts)]
        got += reader.feed(stream[position : position + size])
        position, turn = position + size, turn + 1
    assert got == payloads


def test_an_absurd_length_is_an_error_and_no_wait() -> None:
    with pytest.raises(FrameError):
        list(FrameReader().feed(b"\xff\xff\xff\xff"))
    with pytest.raises(FrameError):
        frame(bytes(MAX_FRAME_BYTES + 1))


def test_receive_returns_all_that_is_there(pair: tuple[EngineChannel, socket.socket]) -> None:
    channel, peer = pair
    peer.sendall(frame(ENCODE(Abort(["a"]))) + frame(ENCODE(Stop())))
    assert channel.receive(None) == [Abort(["a"]), Stop()]
    assert channel.receive(0) == []
    assert channel.receive(0.01) == []


def test_end_of_file_comes_after_the_last_message(pair: tuple[EngineChannel, socket.socket]) -> None:
    channel, peer = pair
    peer.sendall(frame(ENCODE(Abort(["a"]))))
    peer.shutdown(socket.SHUT_WR)
    assert channel.receive(None) == [Abort(["a"])]
    with pytest.raises(PeerGone):
        channel.receive(None)


def test_sends_to_a_peer_that_does_not_read_neither_block_nor_get_lost(
    pair: tuple[EngineChannel, socket.socket],
) -> None:
    channel, peer = pair
    sent = [Fatal("internal", f"{i} " + "x" * 10_000) for i in range(300)]  # far beyond the socket's buffer
    for message in sent:
        channel.send(message)
    assert channel.backlog_bytes > 1_000_000
    got: list[Fatal] = []

    def read() -> None:
        reader = FrameReader()
        while len(got) < len(sent):
            got.extend(msgspec.msgpack.decode(p, type=Fatal) for p in reader.feed(peer.recv(65536)))

    thread = threading.Thread(target=read)
    thread.start()
    assert channel.flush(30.0)
    thread.join(30.0)
    assert got == sent
    assert channel.backlog_bytes == 0


def test_the_brake_lets_go_when_the_peer_dies(pair: tuple[EngineChannel, socket.socket]) -> None:
    channel, peer = pair
    for _ in range(300):
        channel.send(Fatal("internal", "x" * 10_000))
    peer.close()
    with pytest.raises(PeerGone):
        channel.wait_for_room(1000)
    assert not channel.flush(1.0)
