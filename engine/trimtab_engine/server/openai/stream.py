"""Delivering replies: as server-sent events or buffered, and giving up as soon as the client has gone.

Used by `completions` and `chat` with their `Format`. The client's leaving is seen by waiting for `http.disconnect` here
(middleware that wraps requests would hide it), and ends all sequences in the engine. Latencies are stamped right after a
chunk was handed to the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trimtab_engine.errors import EngineDead, Shed, TrimtabError
from trimtab_engine.server.openai.errors import GenerationFailed, body_of, error_response, json_response
from trimtab_engine.server.openai.generation import Choice, Delta, merged, usage

_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
ResultT = TypeVar("ResultT")


class Format(Protocol):
    """Wire shape of one kind of reply."""

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """A chunk to send before the first token, so that the first byte is early; None: there is none."""
        ...

    def chunk(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """One chunk of a stream, without usage."""
        ...

    def closing(self) -> dict[str, Any]:
        """The chunk that carries usage and no choice."""
        ...

    def reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The whole buffered reply, without usage."""
        ...


class ClientGone(Exception):
    """The client has closed the connection; nobody is left to answer."""


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(
    receive: Receive, work: Coroutine[Any, Any, ResultT], stalled: Coroutine[Any, Any, None] | None = None
) -> ResultT:
    """Result of `work`; raises ClientGone (and cancels the work) when the client leaves first.

    `stalled` returns when the client is as good as gone.
    """
    task = asyncio.create_task(work)
    watchers = [asyncio.create_task(watch) for watch in (_disconnect(receive), stalled) if watch is not None]
    try:
        await asyncio.wait({task, *watchers}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for waiting in (task, *watchers):
            waiting.cancel()
        await asyncio.gather(task, *watchers, return_exceptions=True)


async def buffered(
    choices: Sequence[Choice], shape: Format, n: int, receive: Receive, headers: dict[str, str]
) -> Response:
    """Run to the end, then answer; raises GenerationFailed, EngineDead, Shed or ClientGone."""
    reason = "server_abort"
    try:
        await unless_disconnected(receive, _collect(choices))
    except ClientGone:
        reason = "client_abort"
        raise
    except (EngineDead, GenerationFailed, Shed):
        reason = "error"
        raise
    finally:
        for choice in choices:
            choice.close(reason)
    return json_response({**shape.reply(choices), "usage": usage(choices, n)}, headers=headers)


async def _collect(choices: Sequence[Choice]) -> None:
    async with contextlib.aclosing(merged(choices)) as deltas:
        async for choice, delta in deltas:
            choice.delivered(delta)


class EventStream(Response):
    """A streamed reply. The status line goes out at once; whatever fails after it is an error frame before [DONE].

    A client that takes no byte for `stall_timeout_s` counts as gone: else its request would stay open for ever, and its
    gap would be the longest one.
    With `hold_status` it waits for the first token: a request that is shed must still become a 503.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        choices: Sequence[Choice],
        shape: Format,
        n: int,
        *,
        include_usage: bool,
        continuous_usage: bool,
        headers: dict[str, str],
        stall_timeout_s: float,
        hold_status: bool = False,
    ) -> None:
        # No proxy may collect what is meant to flow.
        super().__init__(headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._choices = choices
        self._shape = shape
        self._n = n
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._stall_timeout_s = stall_timeout_s
        self._hold_status = hold_status
        self._sending_since_s: float | None = None  # the socket has been full since then
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        reason = "server_abort"
        try:
            # Nobody is left to hear of it when the client has gone.
            with contextlib.suppress(ClientGone):
                try:
                    await unless_disconnected(receive, self._send_all(send), self._stalled())
                except Shed as shed:
                    reason = "error"
                    await error_response(shed)(scope, receive, send)
                except ClientGone:
                    reason = "client_abort"
                    raise
        finally:
            for choice in self._choices:
                choice.close(reason)

    async def _send_all(self, send: Send) -> None:
        if not self._hold_status:
            await self._begin(send)
        end = b""
        try:
            async with contextlib.aclosing(merged(self._choices)) as deltas:
                async for choice, delta in deltas:
                    await self._begin(send)
                    await self._send(send, self._frame(self._shape.chunk(choice, delta)))
                    choice.delivered(delta)
        except (EngineDead, GenerationFailed, Shed) as error:
            if isinstance(error, Shed) and not self._begun:
                raise
            await self._begin(send)
            for choice in self._choices:
                choice.close("error")
            end = _error_frame(error)
        else:
            if self._include_usage:
                end = _sse({**self._shape.closing(), "usage": usage(self._choices, self._n)})
        await self._send(send, end + _DONE, more=False)

    async def _stalled(self) -> None:
        """Return once the client has taken nothing for too long."""
        while True:
            await asyncio.sleep(self._stall_timeout_s / 4)
            since_s = self._sending_since_s
            if since_s is not None and time.monotonic() - since_s >= self._stall_timeout_s:
                return

    async def _begin(self, send: Send) -> None:
        """Send the status line and the opening chunks, once."""
        if self._begun:
            return
        self._begun = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        opening = [c for choice in self._choices if (c := self._shape.opening(choice)) is not None]
        await self._send(send, b"".join(self._frame(chunk) for chunk in opening))

    def _frame(self, chunk: dict[str, Any]) -> bytes:
        if self._continuous_usage:
            chunk = {**chunk, "usage": usage(self._choices, self._n)}
        elif self._include_usage:
            chunk = {**chunk, "usage": None}
        return _sse(chunk)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        self._sending_since_s = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending_since_s = None


def _sse(payload: object) -> bytes:
    return b"data: " + _encode(payload) + b"\n\n"


def _error_frame(error: TrimtabError) -> bytes:
    return _sse(body_of(error))
