"""Requests and their token streams: builds the bytes ahead of time, sends on the dot, books tokens as they arrive.

The inner half of `replay.py`. Knows the OpenAI completions protocol; knows nothing about traces' origin or statistics.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from .errors import ServerError
from .prompts import PromptMaker
from .result import RequestResult
from .trace import Trace, TraceRequest
from .wire import Endpoint, Exchange, connect

# Request bodies built ahead of their time: enough for a burst, bounded in memory (an id takes 6 bytes or so).
_AHEAD_REQUESTS = 512
_AHEAD_BYTES = 64 << 20
_REJECTED = (429, 503)
_PROBE = TraceRequest(0.0, 4, 2)


class RequestFactory:
    """Builds request bytes. A thread stays ahead of the sender, so that long prompts are not made at send time."""

    def __init__(
        self,
        endpoint: Endpoint,
        headers: Mapping[str, str],
        model: str,
        prompts: PromptMaker,
        send_classes: bool,
        extra_body: Mapping[str, Any],
    ) -> None:
        self._endpoint = endpoint
        self._headers = dict(headers)
        self._model = model
        self._prompts = prompts
        self._send_classes = send_classes
        self._extra = dict(extra_body)
        self._continuous_usage = True
        self._built: deque[bytes] = deque()
        self._built_bytes = 0
        self._changed = threading.Condition()
        self._stopped = False
        self._trace: Trace | None = None

    def document(self, index: int, request: TraceRequest) -> dict[str, Any]:
        """The JSON body of one request. `ignore_eos` and `max_tokens` make the output exactly as long as the trace says."""
        stream_options = {"include_usage": True}
        if self._continuous_usage:
            stream_options["continuous_usage_stats"] = True
        body = {
            "model": self._model,
            "prompt": self._prompts.make(index, request),
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": stream_options,
        }
        if self._send_classes and request.slo_class != "default":
            body["slo_class"] = request.slo_class
        return body | self._extra

    async def settle(self) -> bool:
        """Try one tiny request, so that a wrong model, key or field is one clear error and not a replay of failures.

        Returns whether the server reports usage in every chunk (then tokens are counted exactly even where a chunk carries
        several, or one without text). Raises ServerError.
        """
        exchange, events = await self._probe()
        if exchange.parser.status in (400, 422):  # a strict server may know no continuous usage
            self._continuous_usage = False
            exchange, events = await self._probe()
        parser = exchange.parser
        if parser.status != 200 or exchange.error is not None:
            said = error_text(bytes(parser.body)) or exchange.error
            hint = "; servers that take no token ids need text prompts" if parser.status in (400, 422) else ""
            raise ServerError(
                f"{self._where}: a {_PROBE.prompt_tokens}-token test prompt got {parser.status}: {said}{hint}"
            )
        chunks = [json.loads(event) for event in events if event != b"[DONE]"]
        if not any(chunk.get("choices") and chunk.get("usage") for chunk in chunks):
            self._continuous_usage = False
        return self._continuous_usage

    @property
    def _where(self) -> str:
        return f"POST {self._endpoint.url}/v1/completions"

    async def _probe(self) -> tuple[Exchange, list[bytes]]:
        events: list[bytes] = []
        clock = asyncio.get_running_loop().time
        try:
            exchange = await connect(self._endpoint, clock, lambda _, data: events.append(data))
        except OSError as error:
            raise ServerError(f"{self._where}: cannot connect: {error}") from None
        try:
            exchange.send(self.message(-1, _PROBE))
            await exchange.done
        finally:
            exchange.close()
        return exchange, events

    def message(self, index: int, request: TraceRequest) -> bytes:
        """Whole HTTP request."""
        body = json.dumps(self.document(index, request), separators=(",", ":")).encode()
        return self._endpoint.message("POST", "/v1/completions", self._headers, body)

    def start_building(self, trace: Trace) -> asyncio.Future[None]:
        """Start the thread; the future completes once the first bodies are there."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        self._trace = trace

        def build() -> None:
            for index, request in enumerate(trace.requests):
                message = self.message(index, request)
                with self._changed:
                    if index and (len(self._built) >= _AHEAD_REQUESTS or self._built_bytes >= _AHEAD_BYTES):
                        loop.call_soon_threadsafe(_complete, ready)
                        self._changed.wait_for(self._has_room)
                    if self._stopped:
                        return
                    self._built.append(message)
                    self._built_bytes += len(message)
                    self._changed.notify_all()
            loop.call_soon_threadsafe(_complete, ready)

        threading.Thread(target=build, name="prompts", daemon=True).start()
        return ready

    def _has_room(self) -> bool:
        return (
            self._stopped
            or not self._built
            or (len(self._built) < _AHEAD_REQUESTS and self._built_bytes < _AHEAD_BYTES)
        )

    async def next_message(self) -> bytes:
        """The next request's bytes, in trace order."""
        while True:
            with self._changed:
                if self._built:
                    message = self._built.popleft()
                    self._built_bytes -= len(message)
                    self._changed.notify_all()
                    return message
            await asyncio.sleep(0.001)  # the thread is behind: the delay shows as send-time error

    def stop_building(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class Sender:
    """Runs single requests on their own connections."""

    def __init__(self, endpoint: Endpoint, factory: RequestFactory) -> None:
        self._endpoint = endpoint
        self.factory = factory

    async def run(self, result: RequestResult, message: bytes, due: float, zero: float) -> None:
        """Send `message` at loop time `due` and book its answer in `result`, in seconds since `zero`."""
        loop = asyncio.get_running_loop()
        stream = _TokenStream(result, zero)
        exchange: Exchange | None = None
        try:
            try:
                exchange = await connect(self._endpoint, loop.time, stream.on_event)
            except OSError:
                exchange = None  # too early for a server that is just restarting: once more when due
            delay = due - loop.time()
            if delay > 0:
                await asyncio.sleep(delay)
            if exchange is None or exchange.is_closing:
                try:
                    exchange = await connect(self._endpoint, loop.time, stream.on_event)
                except OSError as error:
                    result.sent_s = loop.time() - zero
                    stream.end(loop.time(), "failed", f"cannot connect: {error}")
                    return
            result.sent_s = exchange.send(message) - zero
            await exchange.done
            stream.conclude(exchange, loop.time())
        finally:
            if exchange is not None:
                exchange.close()

    async def warm_up(self, request: TraceRequest, number: int) -> None:
        """One unmeasured request, with contents that no measured one has."""
        loop = asyncio.get_running_loop()
        result = RequestResult(-1, 0.0, request.prompt_tokens, request.output_tokens)
        await self.run(result, self.factory.message(-2 - number, request), loop.time(), loop.time())


class _TokenStream:
    """Books one answer's events."""

    def __init__(self, result: RequestResult, zero: float) -> None:
        self._result = result
        self._zero = zero
        self._counted = 0
        self._finish_reason: str | None = None
        self._done = False
        self._error: str | None = None

    def on_event(self, now: float, data: bytes) -> None:
        """One server-sent event."""
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self._error = f"an event that is not JSON: {data[:120]!r}"
            return
        if not isinstance(event, dict):
            self._error = f"an event that is not an object: {data[:120]!r}"
            return
        if event.get("error") is not None:
            self._error = error_text(data)
            return
        choices = event.get("choices") or ()
        usage = event.get("usage")
        reported = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(usage, dict):
            self._book_usage(usage)
        if choices:
            choice = choices[0]
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            # With usage in every chunk tokens are counted; without, a chunk with text stands for one.
            grown = reported > self._counted if isinstance(reported, int) else bool(choice.get("text"))
            if grown:
                self._counted = reported if isinstance(reported, int) else self._counted + 1
                at = now - self._zero
                if self._result.first_token_s is None:
                    self._result.first_token_s = at
                self._result.token_times_s.append(at)

    def _book_usage(self, usage: Mapping[str, Any]) -> None:
        self._result.prompt_tokens = usage.get("prompt_tokens")
        self._result.output_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details")
        if isinstance(details, Mapping):
            self._result.cached_tokens = details.get("cached_tokens")

    def conclude(self, exchange: Exchange, now: float) -> None:
        """The connection ended: decide what became of the request."""
        parser, result = exchange.parser, self._result
        result.http_status = parser.status
        generation = parser.headers.get("x-trimtab-generation", "")
        result.generation = int(generation) if generation.isdigit() else None
        if parser.status is not None and parser.status != 200:
            self.end(
                now, "rejected" if parser.status in _REJECTED else "failed", error_text(bytes(parser.body))
            )
        elif self._error is not None:
            self.end(now, "failed", self._error)
        elif not parser.is_event_stream:
            self.end(now, "failed", exchange.error or "the reply is not an event stream")
        elif not self._done and self._finish_reason is None:
            self.end(now, "failed", exchange.error or "the stream ended without a finish")
        else:
            if result.output_tokens is None:
                result.output_tokens = self._counted
            if result.output_tokens < result.asked_output_tokens:
                got = f"{result.output_tokens} of {result.asked_output_tokens} tokens (finish reason {self._finish_reason})"
                self.end(now, "truncated", got)
            else:
                self.end(now, "ok", None)

    def end(self, now: float, status: Any, error: str | None) -> None:
        """Close the books."""
        self._result.status = status
        self._result.error = error
        self._result.finish_s = now - self._zero


def error_text(body: bytes) -> str:
    """The message in an OpenAI-shaped error body, or its first 300 characters."""
    text = body.decode("utf-8", "replace")
    try:
        document = json.loads(body)
    except ValueError:
        return text[:300]
    error = document.get("error", document) if isinstance(document, dict) else document
    message = error.get("message") if isinstance(error, dict) else error
    return str(message if message is not None else text)[:300]


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
