"""Frames on the socket between the HTTP process and the engine process: 4-byte big-endian length, then msgpack.

`FrameReader` is used by both sides; `EngineChannel` is the engine's end, made for a loop that must never hang on a slow
peer: sends are buffered and never block, receives wait only as long as asked. The HTTP side uses an asyncio transport
(`server.client`). Knows nothing of what the messages mean.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator

import msgspec

from trimtab_engine.messages import FromEngine, ToEngine

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 256 * 2**20  # a broken length must not make us wait for gigabytes
_READ_BYTES = 256 * 1024
_POLL_READ = select.POLLIN | select.POLLHUP | select.POLLERR


class PeerGone(Exception):
    """The other process closed its end or died."""


class FrameError(Exception):
    """The stream of frames is broken; the connection cannot be used any more."""


def frame(payload: bytes) -> bytes:
    """One frame around `payload`; raises FrameError when it is larger than a peer would take."""
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(payload)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into payloads, whatever the sizes of the pieces it arrives in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take the next piece and yield every payload that is complete now."""
        self._buffer += data
        position = 0
        try:
            while len(self._buffer) - position >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, position)
                if length > MAX_FRAME_BYTES:
                    raise FrameError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
                end = position + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                payload = bytes(self._buffer[position + _LENGTH.size : end])
                position = end
                yield payload
        finally:
            del self._buffer[:position]


class EngineChannel:
    """The engine's end of the socket. One thread; owns `sock` and makes it non-blocking."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = FrameReader()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._unsent: deque[memoryview] = deque()
        self.backlog_bytes = 0  # accepted by `send`, not yet taken by the kernel

    def send(self, message: FromEngine) -> None:
        """Queue one message and hand the kernel what it takes now. Never blocks, never drops.

        A peer that is gone is reported by the next `receive`, not here: there the loop can act on it.
        """
        data = frame(self._encoder.encode(message))
        self._unsent.append(memoryview(data))
        self.backlog_bytes += len(data)
        self._write()

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        """Every message that is here; waits up to `timeout_s` (None: for ever) for the first one.

        Queued sends go on while waiting. Raises PeerGone at end of file, once all messages before it are handed out.
        """
        messages = self._read()
        if messages or timeout_s == 0:
            return messages
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return []
            self._wait(left_s)
            self._write()
            messages = self._read()
            if messages:
                return messages

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is handed to the kernel; False when that took longer. For the end of the process."""
        deadline_s = time.monotonic() + timeout_s
        while self._unsent:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._wait(left_s, read=False)
            try:
                self._write(strict=True)
            except PeerGone:
                return False
        return True

    def wait_for_room(self, limit_bytes: int) -> None:
        """Wait until less than `limit_bytes` are unsent: the brake for a peer that has stopped reading.

        Raises PeerGone when the peer dies meanwhile.
        """
        while self.backlog_bytes >= limit_bytes:
            self._wait(None, read=False)
            self._write(strict=True)

    def close(self) -> None:
        """Close the socket; the peer reads end of file."""
        self._sock.close()

    def _wait(self, timeout_s: float | None, read: bool = True) -> None:
        poller = select.poll()
        events = (_POLL_READ if read else 0) | (select.POLLOUT if self._unsent else 0)
        poller.register(self._sock, events)
        poller.poll(None if timeout_s is None else max(1.0, timeout_s * 1000))

    def _read(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while True:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return messages
            except ConnectionError:
                data = b""
            if not data:
                if messages:
                    return messages  # the next call meets the end of file again
                raise PeerGone("the HTTP process closed the connection")
            messages.extend(self._decoder.decode(payload) for payload in self._reader.feed(data))

    def _write(self, strict: bool = False) -> None:
        while self._unsent:
            piece = self._unsent[0]
            try:
                sent = self._sock.send(piece, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except ConnectionError as error:
                if strict:
                    raise PeerGone(str(error)) from error
                return
            self.backlog_bytes -= sent
            if sent == len(piece):
                self._unsent.popleft()
            else:
                self._unsent[0] = piece[sent:]
