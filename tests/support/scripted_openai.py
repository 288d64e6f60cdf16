"""A real local HTTP server that answers completions as a test scripts it: the outer rim of the replayer's tests.

Runs in a thread with an event loop of its own, on an ephemeral loopback port.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self


class Answer:
    """What a script writes to: one HTTP reply."""

    def __init__(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.body = body
        self._writer = writer
        self._count = 0

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt as this server counts it."""
        prompt = self.body["prompt"]
        return len(prompt) if isinstance(prompt, list) else len(prompt.split())

    async def start(self, headers: dict[str, str] | None = None) -> None:
        """Status line and headers of an event stream in chunks."""
        extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n{extra}\r\n"
        )
        await self.raw(head.encode())

    async def token(
        self, text: str = " x", count: int = 1, usage: bool = True, reason: str | None = None
    ) -> None:
        """One chunk that carries `count` tokens."""
        self._count += count
        event: dict[str, Any] = {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}
        if usage:
            event["usage"] = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self._count}
        await self.event(json.dumps(event))

    async def usage(self, cached_tokens: int = 0) -> None:
        """The last chunk of `include_usage`: no choices."""
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self._count,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
        await self.event(json.dumps({"choices": [], "usage": usage}))

    async def event(self, data: str) -> None:
        """One server-sent event in one HTTP chunk."""
        payload = f"data: {data}\n\n".encode()
        await self.raw(b"%x\r\n%s\r\n" % (len(payload), payload))

    async def done(self) -> None:
        """The end of a good stream."""
        await self.event("[DONE]")
        await self.raw(b"0\r\n\r\n")

    async def reply(self, status: int, document: object) -> None:
        """A whole JSON reply."""
        body = json.dumps(document).encode()
        await self.raw(
            b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (status, len(body))
        )
        await self.raw(body)

    async def raw(self, data: bytes) -> None:
        """Bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def whole(self, gap_s: float = 0.0) -> None:
        """A good answer with as many tokens as asked."""
        await self.start()
        for number in range(self.body["max_tokens"]):
            if number and gap_s:
                await asyncio.sleep(gap_s)
            await self.token(reason="length" if number + 1 == self.body["max_tokens"] else None)
        await self.usage()
        await self.done()


Script = Callable[[Answer], Awaitable[None]]


class ScriptedServer:
    """Context manager. `script` answers each completion request; the replayer's own test request is answered well."""

    def __init__(
        self, script: Script, max_model_len: int | None = 8192, vocabulary: int | None = 500
    ) -> None:
        self._script = script
        self._max_model_len = max_model_len
        self._vocabulary = vocabulary
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.probes = 0
        self.metrics = ""
        self.strict = False  # refuse continuous_usage_stats, as servers that do not know it may
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="scripted server")
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10), "the server thread did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def forget(self) -> None:
        """Ready for another replay."""
        self.bodies.clear()
        self.probes = 0

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._serve(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.headers.append(head)
            path = head.split(" ", 2)[1]
            length = next(
                (int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:")),
                0,
            )
            body = json.loads(await reader.readexactly(length)) if length else {}
            await self._route(path, Answer(writer, body))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away, as some tests want
        finally:
            writer.close()

    async def _route(self, path: str, answer: Answer) -> None:
        if path == "/v1/models":
            await answer.reply(200, {"data": [{"id": "scripted", "max_model_len": self._max_model_len}]})
        elif path == "/tokenize" and self._vocabulary is not None:
            await answer.reply(200, {"tokens": list(range(100, self._vocabulary))})
        elif path == "/metrics" and self.metrics:
            body = self.metrics.encode()
            await answer.raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        elif path != "/v1/completions":
            await answer.reply(404, {"error": {"message": "no such path"}})
        elif self.strict and "continuous_usage_stats" in answer.body["stream_options"]:
            await answer.reply(400, {"error": {"message": "unknown field continuous_usage_stats"}})
        elif not self.probes:
            self.probes += 1
            await answer.whole()
        else:
            self.bodies.append(answer.body)
            await self._script(answer)
